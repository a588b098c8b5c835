"""Published peaks of GPUs, beside the peaks that are predicted here, without a GPU.

    python bench/gpu.py [--only resnet]

Prints the table of docs/results/gpu.md. Peaks of torch's allocator are compared with the predicted
peak. The figures of nvidia-smi and NVML include the context of the driver and earlier allocations of the
process. So only their slope over the batch size is compared, with the slope of the predicted reserved bytes.
No constant of the prediction was chosen by these rows.
"""

import argparse
import statistics
from dataclasses import dataclass

import torch
import transformers

import lowtide
from gpu_rows import ALLOCATED, DRIVER, MIB, PUBLISHED, RESERVED, Published
from lowtide.facts import Region
from lowtide.planning.allocator import Reserved, reserved_for
from lowtide.planning.schedules import as_eager


def predicted(row: Published, batch_size: int) -> Reserved:
    """The plain step's peak, and what the allocator should reserve for it."""
    with torch.device("meta"):  # no value of a weight is ever looked at
        model, batch = row.build(batch_size)
    model = model.to(row.dtype).to_empty(device="cpu")
    if isinstance(model, transformers.PreTrainedModel):
        model.tie_weights()
    batch = {
        name: torch.ones(value.shape, dtype=row.dtype if value.is_floating_point() else value.dtype)
        for name, value in batch.items()
    }
    optimizer = None if row.optimizer is None else row.optimizer(model.parameters())
    held_bytes = int(row.held_mib * MIB)
    if row.buckets:
        held_bytes += sum(parameter.nbytes for parameter in model.parameters())
    profile = lowtide.profile(
        model,
        batch,
        optimizer=optimizer,
        loss=row.loss,
        accumulate=row.accumulate,
        reserve=held_bytes,
        device=row.device,
    )
    step, timeline = profile.step, profile.timeline
    forward_bytes = max(
        live
        for run, live in zip(timeline.runs, timeline.live_bytes, strict=True)
        if step.nodes[run.rank].region is Region.FORWARD
    )
    peak_bytes = max(profile.peak_bytes, forward_bytes + row.left_mib(batch_size) * MIB)
    return Reserved(int(peak_bytes), reserved_for(as_eager(step), timeline).reserved_bytes)


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
