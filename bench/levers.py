"""What each lever below the floor of recompute wins: the lowest peak, its time, one lever after the other.

    python bench/levers.py resnet152:4 bert-base:16 gpt2:4 transformer:32 -o levers.csv

A lever that every plan has by now is switched off inside of this process for the first rows, whose peaks and
times are therefore predicted only. The rows from `pieces` on are what users get, and are verified in fresh
processes unless `--predict` is given: three optimizer steps compared with eager by torch.equal, peaks by
torch's own count, times in turn. Rows that the file has already are not made again: a run can be resumed.
"""

import argparse
import csv
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import lowtide
from lowtide import methods
from lowtide.checking.verification import verify
from lowtide.zoo.targets import TargetSpec

COLUMNS = (
    "target",
    "levers",
    "eager_mib",
    "floor_mib",
    "percent_of_eager",
    "set_by",
    "predicted_overhead_percent",
    "measured_mib",
    "measured_eager_mib",
    "measured_overhead_percent",
    "exact",
)
MIB = 2**20
PACKED = ("bits", "sign", "narrow")

LEVERS: dict[str, tuple[tuple[str, ...], dict[str, Any]]] = {
    "recompute": (("packed", "slices", "pieces"), {}),
    "+ packed": (("slices", "pieces"), {}),
    "+ slices": (("pieces",), {}),
    "+ pieces": ((), {}),
    "+ step in backward": ((), {"step_in_backward": True}),
    "+ outputs let go": ((), {"step_in_backward": True, "holds_outputs": False}),
}
"""Which levers are switched off, and what is asked for."""


@contextmanager
def without(levers: tuple[str, ...]) -> Iterator[None]:
    """Profile and plan as if these levers were not there."""
    with ExitStack() as stack:
        if "packed" in levers:
            others = tuple(method for method in methods.METHODS if method.name not in PACKED)
            stack.enter_context(mock.patch.object(methods, "METHODS", others))
        if "slices" in levers:
            stack.enter_context(mock.patch("lowtide.torchside.ops.use_loss_rows", lambda graph: None))
            stack.enter_context(mock.patch("lowtide.torchside.ops.use_score_rows", lambda graph: None))
            stack.enter_context(mock.patch("lowtide.capture.analyse.overwrites", lambda segment: {}))
        if "pieces" in levers:
            stack.enter_context(mock.patch("lowtide.capture.step._piece_bytes", lambda *_: None))
        yield


def row(name: str, batch_size: int, levers: str, *, timed_runs: int, measured: bool) -> tuple[str, ...]:
    """The lowest peak of one target with some levers."""
    spec = TargetSpec(text=name, batch_size=batch_size, optimizer="adam")
    target = spec.load()
    absent, options = LEVERS[levers]
    with without(absent):
        profile = lowtide.profile(
            target.model, target.batch, optimizer=target.optimizer, loss=target.loss, **options
        )
        plan = profile.plan(profile.floor_bytes)
    del target
    head = (
        f"{name}:{batch_size}",
        levers,
        f"{profile.peak_bytes / MIB:.1f}",
        f"{plan.peak_bytes / MIB:.1f}",
        f"{100 * plan.peak_bytes / profile.peak_bytes:.1f}",
        plan.solution.peak_node,
        f"{100 * plan.overhead:.1f}",
    )
    if absent or not measured:
        return (*head, "", "", "", "")
    found = verify(spec, plan, timed_runs=timed_runs)
    return (
        *head,
        f"{found.measured_peak_bytes / MIB:.1f}",
        f"{found.baseline_measured_peak_bytes / MIB:.1f}",
        "" if found.overhead is None else f"{100 * found.overhead:.1f}",
        "yes" if found.exact else found.differences[0],
    )


def done_already(path: Path) -> set[tuple[str, str]]:
    if not path.exists():
        return set()
    with path.open(newline="") as file:
        return {(line["target"], line["levers"]) for line in csv.DictReader(file)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("targets", nargs="+", help="name:batch size")
    parser.add_argument("--levers", default=",".join(LEVERS), help="which rows, separated by commas")
    parser.add_argument("--timed-runs", type=int, default=3)
    parser.add_argument("--predict", action="store_true", help="measure nothing")
    parser.add_argument("-o", "--output", type=Path, default=Path("levers.csv"))
    options = parser.parse_args()
    done = done_already(options.output)
    with options.output.open("a", newline="") as file:
        writer = csv.writer(file)
        if not done:
            writer.writerow(COLUMNS)
        for target in options.targets:
            name, _, batch_size = target.partition(":")
            for levers in options.levers.split(","):
                if (target, levers) in done:
                    continue
                found = row(
                    name,
                    int(batch_size),
                    levers,
                    timed_runs=options.timed_runs,
                    measured=not options.predict,
                )
                writer.writerow(found)
                file.flush()
                print(*found, sep="\t", file=sys.stdout, flush=True)


if __name__ == "__main__":
    main()
