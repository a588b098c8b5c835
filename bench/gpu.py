"""Peaks that were published of GPUs, beside what is predicted for them here, where there is none.

    python bench/gpu.py [--only resnet]

Prints the table of docs/results/gpu.md. Peaks of torch's allocator are held against the predicted peak. What
nvidia-smi or NVML shows also has the context of the driver and whatever the process left behind, so that of
those only the slope over the batch size is used, against the slope of what the allocator should reserve.
No constant of the prediction was chosen by these rows.
"""

import argparse
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

import lowtide
from lowtide.planning.allocator import Reserved, reserved_for
from lowtide.planning.schedules import as_eager

MIB = 1 << 20
Built = tuple[nn.Module, dict[str, torch.Tensor]]


@dataclass(frozen=True)
class Published:
    """MiB by batch size; `by_allocator`, else as the driver shows them. `half`: a model in float16.

    Where it was not torch that ran the ops (`runs_eager`), no error is counted: what is kept is another's.
    """

    name: str
    build: Callable[[int], Built]
    source: str
    mib: dict[int, float]
    by_allocator: bool = True
    device: str = "a100-40g"
    optimizer: type[torch.optim.Optimizer] | None = torch.optim.Adam
    half: bool = False
    runs_eager: bool = True


def resnet152(batch_size: int) -> Built:
    return _resnet(batch_size, [3, 8, 36, 3])


def resnet18(batch_size: int) -> Built:
    return _resnet(
        batch_size, [2, 2, 2, 2], layer_type="basic", hidden_sizes=[64, 128, 256, 512], embedding_size=64
    )


def resnet50(batch_size: int) -> Built:
    return _resnet(batch_size, [3, 4, 6, 3])


def resnet101(batch_size: int) -> Built:
    return _resnet(batch_size, [3, 4, 23, 3])


def _resnet(batch_size: int, depths: list[int], **options: Any) -> Built:
    from transformers import ResNetConfig, ResNetForImageClassification

    config = ResNetConfig(depths=depths, num_labels=1000, **{"layer_type": "bottleneck", **options})
    return ResNetForImageClassification(config), _images(batch_size, 224)


def regnetx_032(batch_size: int) -> Built:
    from transformers import RegNetConfig, RegNetForImageClassification

    config = RegNetConfig(
        depths=[2, 6, 15, 2],
        hidden_sizes=[96, 192, 432, 1008],
        groups_width=48,
        layer_type="x",
        num_labels=1000,
    )
    return RegNetForImageClassification(config), _images(batch_size, 224)


def vit_base(batch_size: int) -> Built:
    return _vit(batch_size)


def vit_small(batch_size: int) -> Built:
    return _vit(batch_size, hidden_size=384, num_attention_heads=6, intermediate_size=1536)


def _vit(batch_size: int, **options: Any) -> Built:
    from transformers import ViTConfig, ViTForImageClassification

    model = ViTForImageClassification(ViTConfig(num_labels=1000, **options))
    return model, _images(batch_size, 224)


def convnext_tiny(batch_size: int) -> Built:
    return _convnext(batch_size, 86, num_labels=10)


def convnext_tiny_224(batch_size: int) -> Built:
    return _convnext(batch_size, 224, num_labels=1000)


def convnext_small_224(batch_size: int) -> Built:
    return _convnext(batch_size, 224, num_labels=1000, depths=[3, 3, 27, 3])


def _convnext(batch_size: int, side: int, **options: Any) -> Built:
    from transformers import ConvNextConfig, ConvNextForImageClassification

    return ConvNextForImageClassification(ConvNextConfig(**options)), _images(batch_size, side)


def _images(batch_size: int, side: int) -> dict[str, torch.Tensor]:
    pixels = torch.empty(batch_size, 3, side, side).normal_()
    return {"pixel_values": pixels, "labels": torch.zeros(batch_size, dtype=torch.int64)}


def bert_large(batch_size: int) -> Built:
    """With a loss over all words, of which a run that predicts a few computes a part."""
    from transformers import BertForMaskedLM

    tokens = torch.zeros(batch_size, 512, dtype=torch.int64)
    return BertForMaskedLM(_bert_large_config()), {"input_ids": tokens, "labels": tokens.clone()}


def bert_large_encoder(batch_size: int) -> Built:
    """Without any head."""
    from transformers import BertModel

    return BertModel(_bert_large_config()), {"input_ids": torch.zeros(batch_size, 512, dtype=torch.int64)}


def _bert_large_config() -> Any:
    from transformers import BertConfig

    return BertConfig(
        hidden_size=1024,
        num_hidden_layers=24,
        num_attention_heads=16,
        intermediate_size=4096,
        attn_implementation="eager",  # older than torch's fused attention
    )


PUBLISHED = [
    Published(
        "ResNet-152, Adam",
        resnet152,
        "course report 1, max_memory_allocated",
        {4: 1449.6, 8: 2128.6, 16: 3466.0, 32: 6191.1, 64: 11682.0},
    ),
    Published(
        "ResNet-152, no optimizer",
        resnet152,
        "course report 3, memory_allocated",
        {8: 1667.9, 16: 3014.1, 32: 5725.9},
        optimizer=None,
    ),
    Published("ResNet-152", resnet152, "course report 2", {8: 1869, 16: 3464, 32: 6207, 64: 11948}),
    *(
        Published(name, build, "GPUMemNet, nvidia-smi", mib, by_allocator=False)
        for name, build, mib in (
            ("ResNet-152", resnet152, {32: 8621, 64: 14847, 128: 27121}),
            ("ResNet-18", resnet18, {64: 4525, 128: 7269}),
            ("ResNet-50", resnet50, {64: 8465, 128: 15169}),
            ("ResNet-101", resnet101, {64: 11377, 128: 20583}),
            ("RegNetX-3.2GF", regnetx_032, {64: 9645, 128: 16669}),
            ("ViT-base, patches of 16", vit_base, {64: 10197, 128: 17601}),
            ("ViT-small, patches of 16", vit_small, {64: 5979, 128: 9719}),
            ("ConvNeXt-Tiny", convnext_tiny_224, {64: 9551, 128: 16857}),
            ("ConvNeXt-Small", convnext_small_224, {64: 13837, 128: 25133}),
        )
    ),
    Published(
        "ConvNeXt-Tiny, 86 x 86, Adam",
        convnext_tiny,
        "xMem, NVML",
        {200: 3468689408 / MIB, 500: 8004829184 / MIB, 700: 11045699584 / MIB},
        by_allocator=False,
        device="rtx-3060",
    ),
    Published(
        "BERT-large, 512 tokens, float16, no head",
        bert_large_encoder,
        "onnxruntime#11534, max allocated",
        {32: 29291.65},
        device="v100-32g",
        optimizer=None,
        half=True,
        runs_eager=False,
    ),
    Published(
        "BERT-large, 512 tokens, float16, loss over all words",
        bert_large,
        "onnxruntime#11534, max allocated",
        {32: 29291.65},
        device="v100-32g",
        optimizer=None,
        half=True,
        runs_eager=False,
    ),
]


def predicted(row: Published, batch_size: int) -> Reserved:
    """The plain step's peak, and what the allocator should reserve for it."""
    model, batch = row.build(batch_size)
    if row.half:
        model = model.half()
    optimizer = None if row.optimizer is None else row.optimizer(model.parameters())
    profile = lowtide.profile(model, batch, optimizer=optimizer, device=row.device)
    held = reserved_for(as_eager(profile.step), profile.timeline)
    return Reserved(profile.peak_bytes, held.reserved_bytes)


@dataclass(frozen=True)
class Line:
    batch: str
    what: str
    published: float
    predicted: float
    reserved: str = ""

    def show(self, row: Published) -> float:
        """Prints the line, and gives its error."""
        error = self.predicted / self.published - 1
        figures = f"{self.published:,.1f} | {self.predicted:,.1f} | {self.reserved} | {error:+.1%}"
        print(f"| {row.name} | {self.batch} | {row.source} | {self.what} | {figures} |", flush=True)
        return error


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="rows that have this in the model's or the source's name")
    wanted = parser.parse_args().only.lower()
    errors: dict[str, list[float]] = {"peak": [], "slope": []}
    print("| model | batch | published by | what | published | predicted | reserved | error |")
    print("|---|---|---|---|---|---|---|---|")
    known: dict[tuple[object, ...], Reserved] = {}
    for row in PUBLISHED:
        if wanted not in f"{row.name} {row.source}".lower():
            continue
        found = {}
        for size in row.mib:
            key = (row.build, row.device, row.optimizer, row.half, size)
            if key not in known:
                known[key] = predicted(row, size)
            found[size] = known[key]
            if row.by_allocator:
                peak = found[size].allocated_bytes / MIB
                reserved = f"{found[size].reserved_bytes / MIB:,.0f}"
                line = Line(str(size), "peak, MiB", row.mib[size], peak, reserved)
                error = line.show(row)
                errors["peak"] += [error] if row.runs_eager else []
        for low, high in zip(list(row.mib)[:-1], list(row.mib)[1:], strict=True):
            published = (row.mib[high] - row.mib[low]) / (high - low)
            ends = [
                (found[high][i] - found[low][i]) / (high - low) / MIB for i in (0, 1)
            ]  # allocated, reserved
            ours = ends[0] if row.by_allocator else ends[1]
            line = Line(f"{low} to {high}", "MiB per sample", published, ours)
            errors["slope"].append(line.show(row))
    for kind, values in errors.items():
        if values:
            print(f"\nmedian error of {len(values)} {kind}s: {statistics.median(map(abs, values)):.1%}")


if __name__ == "__main__":
    main()
