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

import gpu_models as models
import lowtide
from lowtide.planning.allocator import Reserved, reserved_for
from lowtide.planning.schedules import as_eager

MIB = 1 << 20
MB = 10**6 / MIB
ALLOCATED, RESERVED, DRIVER = "allocated", "reserved", "driver"


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
    optimizer: type[torch.optim.Optimizer] | None = torch.optim.Adam
    dtype: torch.dtype = torch.float32
    loss: Callable[[Any], torch.Tensor] | None = None
    same_code: bool = True


def summed(output: Any) -> torch.Tensor:
    total: torch.Tensor = output.logits.sum()
    return total


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
            "transformers' documentation, max_memory_allocated",
            {size: MB * nbytes for size, nbytes in found.items()},
            device=device,
            optimizer=None,
            dtype=torch.float16,
            loss=summed,
            same_code=same_code,
        )
        for name, build, device, found, same_code in (
            (
                "BERT-base, 512 tokens, float16, scores in memory",
                models.bert_base,
                "a100-80g",
                {4: 1970.447, 8: 3629.401, 16: 6964.659},
                True,
            ),
            (
                "BERT-base, 512 tokens, float16, fused attention",
                models.bert_base_fused,
                "a100-80g",
                {4: 1227.162, 8: 2134.262, 16: 3961.013},
                True,
            ),
            (
                "DistilBERT, 256 tokens, float16, scores in memory",
                models.distilbert,
                "t4-16g",
                {2: 427.491, 4: 594.156, 8: 983.45},
                True,
            ),
            (
                "DistilBERT, 256 tokens, float16, fused attention",
                models.distilbert_fused,
                "t4-16g",
                {2: 425.787, 4: 502.745, 8: 798.48},
                True,
            ),
            (
                "Pythia-410m, 512 tokens, float16, fused attention",
                models.pythia_410m,
                "rtx-3060",
                {1: 1953.76, 4: 3877.29},
                False,
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
        Published(name, build, "rasbt, max_memory_reserved", found, by=RESERVED, dtype=dtype)
        for name, build, dtype, found in (
            ("ViT-large", models.vit_large, torch.float32, {64: MB * 26790}),
            ("ViT-large, autocast to float16", models.vit_large_in_float16, torch.float32, {64: MB * 18210}),
            ("ViT-large in bfloat16", models.vit_large, torch.bfloat16, {16: MB * 5690, 64: MB * 13820}),
        )
    ),
]


def predicted(row: Published, batch_size: int) -> Reserved:
    """The plain step's peak, and what the allocator should reserve for it."""
    model, batch = row.build(batch_size)
    model = model.to(row.dtype)
    batch = {
        name: value.to(row.dtype) if value.is_floating_point() else value for name, value in batch.items()
    }
    optimizer = None if row.optimizer is None else row.optimizer(model.parameters())
    profile = lowtide.profile(model, batch, optimizer=optimizer, loss=row.loss, device=row.device)
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
    errors: dict[str, list[float]] = {ALLOCATED: [], RESERVED: [], "slope": []}
    print("| model | batch | published by | what | published | predicted | reserved | error |")
    print("|---|---|---|---|---|---|---|---|")
    known: dict[tuple[object, ...], Reserved] = {}
    for row in PUBLISHED:
        if wanted not in f"{row.name} {row.source}".lower():
            continue
        found = {}
        for size in row.mib:
            key = (row.build, row.device, row.optimizer, row.dtype, size)
            if key not in known:
                known[key] = predicted(row, size)
            found[size] = known[key]
            if row.by != DRIVER:
                reserved = found[size].reserved_bytes / MIB
                peak = reserved if row.by == RESERVED else found[size].allocated_bytes / MIB
                line = Line(str(size), f"{row.by}, MiB", row.mib[size], peak, f"{reserved:,.0f}")
                error = line.show(row)
                errors[row.by] += [error] if row.same_code else []
        for low, high in zip(list(row.mib)[:-1], list(row.mib)[1:], strict=True):
            published = (row.mib[high] - row.mib[low]) / (high - low)
            ends = [
                (found[high][i] - found[low][i]) / (high - low) / MIB for i in (0, 1)
            ]  # allocated, reserved
            ours = ends[0] if row.by == ALLOCATED else ends[1]
            line = Line(f"{low} to {high}", "MiB per sample", published, ours)
            error = line.show(row)
            errors["slope"] += [error] if row.same_code else []
    for kind, values in errors.items():
        if values:
            print(f"\nmedian error of {len(values)} rows, {kind}: {statistics.median(map(abs, values)):.1%}")


if __name__ == "__main__":
    main()
