"""What others published of GPUs, for bench/gpu.py: the models, the settings and the figures."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

import gpu_blocks as blocks
import gpu_models as models

MIB = 1 << 20
MB = 10**6 / MIB
ALLOCATED, RESERVED, DRIVER = "allocated", "reserved", "driver"


def no_bytes(batch_size: int) -> float:
    return 0.0


@dataclass(frozen=True)
class Published:
    """MiB by batch size, as torch's allocator or the driver counts them (`by`). `dtype` is the model's.

    Where it was not torch that ran the ops, or another version of the model's code, it is not the
    `same_code`, and no error is counted: what is kept is another's.
    """

    name: str
    build: Callable[[int], models.Built]
    source: str
    mib: dict[int, float]
    by: str = ALLOCATED
    device: str = "a100-40g"
    optimizer: Callable[..., torch.optim.Optimizer] | None = torch.optim.Adam
    dtype: torch.dtype = torch.float32
    loss: Callable[[Any], torch.Tensor] | None = None
    same_code: bool = True
    accumulate: bool = False
    """Gradients of earlier steps were live."""
    held_mib: float = 0
    """Other live bytes: another model."""
    buckets: bool = False
    """One of several processes: DistributedDataParallel has a copy of the gradients."""
    left_mib: Callable[[int], float] = no_bytes
    """The outputs of the step before (`outputs = model(...)`), by batch size: the loop keeps them live until
    the next forward pass has ended."""


def momentum(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9, weight_decay=1e-4)


def scores_and_cache(batch_size: int) -> float:
    """BioGPT's scores of 42,384 words, and keys and values of 24 layers, in float16."""
    return batch_size * 256 * 2 * (42384 + 24 * 2 * 1024) / MIB


def scores_and_cache_in_float32(batch_size: int) -> float:
    """Pythia's scores of 50,304 words; of 24 layers keys in float32, and values that are a part of a
    projection for queries, keys and values. The keys in float32 of this step are there besides."""
    return batch_size * 512 * 2 * (50304 + 24 * (2 + 3 + 2) * 1024) / MIB


def summed(output: Any) -> torch.Tensor:
    total: torch.Tensor = output.logits.sum()
    return total


TRANSFORMERS = "transformers' documentation, max_memory_allocated"
VIT_FLOAT16 = {64: MB * 18210}
VIT_BFLOAT16 = {16: MB * 5690, 64: MB * 13820}

PUBLISHED = [
    Published(
        "ResNet-152, Adam",
        models.resnet152,
        "course report 1, max_memory_allocated",
        {4: 1449.6, 8: 2128.6, 16: 3466.0, 32: 6191.1, 64: 11682.0},
    ),
    Published(
        "ResNet-152, no optimizer",
        models.resnet152,
        "course report 3, memory_allocated",
        {8: 1667.9, 16: 3014.1, 32: 5725.9},
        optimizer=None,
    ),
    Published("ResNet-152", models.resnet152, "course report 2", {8: 1869, 16: 3464, 32: 6207, 64: 11948}),
    *(
        Published(name, build, "GPUMemNet, nvidia-smi", mib, by=DRIVER)
        for name, build, mib in (
            ("ResNet-152", models.resnet152, {32: 8621, 64: 14847, 128: 27121}),
            ("ResNet-18", models.resnet18, {64: 4525, 128: 7269}),
            ("ResNet-50", models.resnet50, {64: 8465, 128: 15169}),
            ("ResNet-101", models.resnet101, {64: 11377, 128: 20583}),
            ("RegNetX-3.2GF", models.regnetx_032, {64: 9645, 128: 16669}),
            ("ViT-base, patches of 16", models.vit_base, {64: 10197, 128: 17601}),
            ("ViT-small, patches of 16", models.vit_small, {64: 5979, 128: 9719}),
            ("ConvNeXt-Tiny", models.convnext_tiny_224, {64: 9551, 128: 16857}),
            ("ConvNeXt-Small", models.convnext_small_224, {64: 13837, 128: 25133}),
        )
    ),
    Published(
        "ConvNeXt-Tiny, 86 x 86, Adam",
        models.convnext_tiny,
        "xMem, NVML",
        {200: 3468689408 / MIB, 500: 8004829184 / MIB, 700: 11045699584 / MIB},
        by=DRIVER,
        device="rtx-3060",
    ),
    Published(
        "BERT-large, 512 tokens, float16, no head",
        models.bert_large_encoder,
        "onnxruntime#11534, max allocated",
        {32: 29291.65},
        device="v100-32g",
        optimizer=None,
        dtype=torch.float16,
        same_code=False,
    ),
    Published(
        "BERT-large, 512 tokens, float16, loss over all words",
        models.bert_large,
        "onnxruntime#11534, max allocated",
        {32: 29291.65},
        device="v100-32g",
        optimizer=None,
        dtype=torch.float16,
        same_code=False,
    ),
    *(
        Published(
            name,
            build,
            TRANSFORMERS,
            {size: MB * nbytes for size, nbytes in found.items()},
            device=device,
            optimizer=None,
            dtype=torch.float16,
            loss=summed,
        )
        for name, build, device, found in (
            (
                "BERT-base, 512 tokens, float16, scores in memory",
                models.bert_base,
                "a100-80g",
                {4: 1970.447, 8: 3629.401, 16: 6964.659},
            ),
            (
                "BERT-base, 512 tokens, float16, fused attention",
                models.bert_base_fused,
                "a100-80g",
                {4: 1227.162, 8: 2134.262, 16: 3961.013},
            ),
            (
                "DistilBERT, 256 tokens, float16, scores in memory",
                models.distilbert,
                "t4-16g",
                {2: 427.491, 4: 594.156, 8: 983.45},
            ),
            (
                "DistilBERT, 256 tokens, float16, fused attention",
                models.distilbert_fused,
                "t4-16g",
                {2: 425.787, 4: 502.745, 8: 798.48},
            ),
        )
    ),
    Published(
        "GPT-2, 16 tokens, AdamW",
        models.gpt2,
        "optimum-benchmark, max allocated",
        {2: MB * 2506.73664},
        optimizer=torch.optim.AdamW,
    ),
    *(
        Published(
            name, build, "rasbt, max_memory_reserved", found, by=RESERVED, dtype=dtype, same_code=same_code
        )
        for name, build, dtype, found, same_code in (
            ("ViT-large", models.vit_large, torch.float32, {64: MB * 26790}, True),
            (
                "ViT-large, autocast to float16",
                models.vit_large_in_float16,
                torch.float32,
                VIT_FLOAT16,
                False,
            ),
            ("ViT-large in bfloat16", models.vit_large, torch.bfloat16, VIT_BFLOAT16, False),
            (
                "ViT-large, autocast to float16, attention of torch 2.0",
                models.vit_large_in_float16_of_2_0,
                torch.float32,
                VIT_FLOAT16,
                True,
            ),
            (
                "ViT-large in bfloat16, attention of torch 2.0",
                models.vit_large_of_2_0,
                torch.bfloat16,
                VIT_BFLOAT16,
                True,
            ),
        )
    ),
    *(
        Published(
            name,
            build,
            TRANSFORMERS,
            {size: MB * nbytes for size, nbytes in found.items()},
            device="t4-16g",
            optimizer=None,
            dtype=torch.float16,
            loss=summed,
            left_mib=scores_and_cache,
        )
        for name, build, found in (
            ("BioGPT, 256 tokens, float16, scores in memory", blocks.biogpt, {4: 2350.179, 8: 3989.98}),
            ("BioGPT, 256 tokens, float16, fused attention", blocks.biogpt_fused, {4: 1848.435, 8: 2986.492}),
        )
    ),
    *(
        Published(
            name,
            build,
            TRANSFORMERS,
            {2: MB * nbytes},
            device="t4-16g",
            optimizer=None,
            dtype=torch.float16,
            loss=summed,
            same_code=False,
        )
        for name, build, nbytes in (
            ("BEiT, 1048 x 640, float16, scores in memory", blocks.beit, 6738.915),
            ("BEiT, 1048 x 640, float16, fused attention", blocks.beit_fused, 4319.886),
        )
    ),
    Published(
        "Pythia-410m, 512 tokens, float16, fused attention",
        models.pythia_410m,
        TRANSFORMERS,
        {1: MB * 1953.76, 4: MB * 3877.29},
        device="rtx-3060",
        optimizer=None,
        dtype=torch.float16,
        loss=summed,
        same_code=False,
        left_mib=scores_and_cache_in_float32,
    ),
    *(
        Published(
            name,
            build,
            "mmaction2, max_memory_allocated",
            found,
            device="v100-32g",
            optimizer=momentum,
            accumulate=True,  # torch of that day set gradients to zero and kept them
            buckets=True,
        )
        for name, build, found in (
            ("SlowOnly (ResNet-50 of 3-d convolutions), 4 frames", blocks.slow_only_4, {8: 3168}),
            ("SlowOnly (ResNet-50 of 3-d convolutions), 8 frames", blocks.slow_only_8, {8: 5820}),
            ("TSN (ResNet-50), 3 frames", blocks.segments, {32: 8339}),
        )
    ),
    Published(
        "cross entropy of 16,384 rows, over words",
        blocks.loss_alone,
        "Liger-Kernel, max_memory_allocated",
        {4096: 1280.126, 8192: 2560.126, 16384: 5120.126},
        optimizer=None,
        accumulate=True,
    ),
    Published(
        "head over 128,256 words and its loss, bfloat16, over tokens",
        blocks.words_head,
        "Liger-Kernel, max_memory_allocated",
        {4096: 6092.282, 8192: 9162.313, 16384: 15302.376},
        device="a100-80g",
        optimizer=None,
        dtype=torch.bfloat16,
        accumulate=True,
        held_mib=1002,
    ),
]
