"""The stalls for a store that is too slow, predicted and measured.

A disk is fast enough to hide nearly all transfers, so that its waits are a few milliseconds and say little of
the prediction. Here every transfer takes as long as a link of a known bandwidth would take, behind the same
interface. Plans offload and recompute nothing. The speed is measured as always.

    python bench/slow_link.py tiny-bert-base:64 --budget 70% --mib-per-second 20,40,80
"""

import argparse
import csv
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from unittest import mock

import lowtide
from levers_measure import _step, _waits
from lowtide.facts.sizes import parse_budget
from lowtide.offload import disk_store
from lowtide.planning.repeated_graphs import planner_for
from lowtide.planning.simulate import simulate
from lowtide.planning.variants import offload_alone
from lowtide.zoo.targets import TargetSpec

COLUMNS = (
    "MiB/s", "peak, MiB", "offloaded, MiB", "transfers, s", "waited, s", "predicted, s", "off by", "hidden",
)  # fmt: skip


@contextmanager
def slow(bytes_per_second: float) -> Iterator[None]:
    """Let every transfer of a disk take at least as long as at that bandwidth."""

    def slowed(run):  # type: ignore[no-untyped-def]
        def copy(file: disk_store._File, box: list[memoryview], start: int) -> None:
            begin, nbytes = time.perf_counter(), len(box[0])
            run(file, box, start)
            time.sleep(max(0.0, nbytes / bytes_per_second - (time.perf_counter() - begin)))

        return copy

    with (
        mock.patch.object(disk_store._File, "write", slowed(disk_store._File.write)),
        mock.patch.object(disk_store._File, "read", slowed(disk_store._File.read)),
    ):
        yield


def row(spec: TargetSpec, *, mib_per_second: float, budget: str, folder: Path, steps: int) -> list[str]:
    target = spec.load()
    with slow(mib_per_second * 2**20):
        found = lowtide.profile(
            target.model,
            target.batch,
            optimizer=target.optimizer,
            loss=target.loss,
            offload=f"disk:{folder}",
            cache=False,
        )
        planner = planner_for(found.step)
        budget_bytes = parse_budget(budget, whole=planner.eager_peak_bytes)
        entry = planner.problem.once(offload_alone).best(budget_bytes)
        if entry is None:
            raise SystemExit(f"offloading alone does not meet {budget}")
        timeline = simulate(planner.step, entry.runs)
        plan = lowtide.Plan(
            planner.solution_of("auto", timeline, budget_bytes), known=found.known, loop=found.loop
        )
        plan.apply(target.model)
        step = _step(target, plan.solution.holds_outputs)
        step()
        step()
        waited = []
        for _ in range(steps):
            with _waits() as waits:
                step()
            waited.append(sum(waits))
    traffic = timeline.traffic
    assert traffic is not None
    measured, predicted = median(waited), traffic.stall_seconds
    return [
        f"{mib_per_second:g}",
        f"{timeline.peak_bytes / 2**20:.1f}",
        f"{traffic.store_bytes / 2**20:.1f}",
        f"{traffic.transfer_seconds:.3f}",
        f"{measured:.3f}",
        f"{predicted:.3f}",
        f"{predicted / measured - 1:+.1%}",
        f"{1 - measured / traffic.transfer_seconds:.0%}",
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "target", help="a target and its batch size, as tiny-bert-base:64 or file.py:factory:64"
    )
    parser.add_argument("--budget", default="70%")
    parser.add_argument("--mib-per-second", default="20,40,80")
    parser.add_argument("--steps", type=int, default=7)
    parser.add_argument("--csv", type=Path)
    args = parser.parse_args()
    name, _, batch_size = args.target.rpartition(":")
    spec = TargetSpec(text=name, batch_size=int(batch_size))
    with tempfile.TemporaryDirectory() as folder:
        rows = [
            row(spec, mib_per_second=float(speed), budget=args.budget, folder=Path(folder), steps=args.steps)
            for speed in args.mib_per_second.split(",")
        ]
    print(f"| {' | '.join(COLUMNS)} |\n|{' --- |' * len(COLUMNS)}")
    for cells in rows:
        print(f"| {' | '.join(cells)} |")
    if args.csv is not None:
        with args.csv.open("w", newline="") as file:
            csv.writer(file).writerows([COLUMNS, *rows])


if __name__ == "__main__":
    sys.exit(main())
