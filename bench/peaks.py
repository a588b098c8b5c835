"""Predicted against measured peak of a plain step: every built-in target small, three of them full size.

    python bench/peaks.py [TARGET:BATCH[:SIZE]...] [-o peaks.csv]

SIZE is the image size or the sequence length. Each step runs in a fresh process, with and without
the optimizer; "torch" is the profiler's count, "resident" what the kernel saw. Small targets are made
large enough for the resident peak to mean something. Prints a Markdown table.
"""

import argparse
import csv
import sys
from collections.abc import Iterator
from pathlib import Path

from lowtide import api
from lowtide.measure import measure_step
from lowtide.units import format_size
from lowtide.zoo import find_entry
from lowtide.zoo.targets import TargetSpec

SMALL = (
    "tiny-resnet152:16:128",
    "tiny-bert-base:32:128",
    "tiny-bert-base-mlm:16:128",
    "tiny-transformer:32:128",
    "tiny-gpt2:16:128",
    "tiny-vit:32:128",
    "tiny-unet:8:128",
)
FULL = ("resnet152:4", "bert-base:8:128", "transformer:16")
COLUMNS = (
    "target",
    "batch",
    "optimizer",
    "predicted",
    "torch",
    "resident",
    "predicted/torch",
    "resident/torch",
)


def read_target(text: str, *, optimizer: str) -> TargetSpec:
    name, batch, size = (*text.split(":"), "")[:3]
    option = {find_entry(name).option: int(size)} if size else {}
    return TargetSpec(text=name, batch_size=int(batch), optimizer=optimizer, **option)


def rows(targets: list[str]) -> Iterator[tuple[str | int, ...]]:
    for text in targets:
        for optimizer in ("adam", "none"):
            spec = read_target(text, optimizer=optimizer)
            target = spec.load()
            profile = api.profile(target.model, target.batch, optimizer=target.optimizer)
            measured = measure_step(spec)
            resident = measured.resident_peak_bytes
            yield (
                spec.text,
                spec.batch_size,
                optimizer,
                profile.peak_bytes,
                measured.peak_bytes,
                "" if resident is None else resident,
                f"{profile.peak_bytes / measured.peak_bytes - 1:+.2%}",
                "" if resident is None else f"{resident / measured.peak_bytes - 1:+.2%}",
            )


def shown(cell: str | int, column: str) -> str:
    is_size = column in ("predicted", "torch", "resident") and isinstance(cell, int)
    return format_size(int(cell)) if is_size else str(cell)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("targets", nargs="*", default=[*SMALL, *FULL])
    parser.add_argument("-o", "--output", type=Path)
    arguments = parser.parse_args()
    print(f"| {' | '.join(COLUMNS)} |\n|{'---|' * len(COLUMNS)}")
    found = []
    for row in rows(arguments.targets):
        found.append(row)
        cells = (shown(cell, column) for cell, column in zip(row, COLUMNS, strict=True))
        print(f"| {' | '.join(cells)} |", flush=True)
    if arguments.output:
        arguments.output.parent.mkdir(parents=True, exist_ok=True)
        with arguments.output.open("w", newline="") as file:
            csv.writer(file).writerows([COLUMNS, *found])
        print(f"wrote {arguments.output}", file=sys.stderr)


if __name__ == "__main__":
    main()
