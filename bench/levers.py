"""The gain of each lever below the floor of recompute: the lowest peak and its time, lever by lever.

    python bench/levers.py resnet152:4 bert-base:16 gpt2:4 transformer:32 --offload disk:/tmp -o levers.csv
    python bench/levers.py bert-base:16 --offload disk:/tmp --picture bert.png
    python bench/levers.py --page docs/results/levers.md --picture bert.png -o levers.csv

The row of a lever includes the levers before it. Levers that every plan has are switched off for the first
rows; the rows from `pieces` on are what users get. Unless `--predict` is given, two optimizer steps
of each are compared with eager by torch.equal, and times taken in turn with eager's. The peak is that of a
fresh process, by torch's own count, and eager's is measured once. Where values are offloaded, the time that
steps waited for the store is taken as well. `--at 50%` asks for that share of eager's peak instead of the
floor, and says what is missing where it cannot be reached. The rows of a target are made in a process of
its own, and not again where the file has them already: a run can be resumed. `--page` makes a page of the
file. `--picture` draws what every budget costs, with and without the store.
"""

import argparse
import csv
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lowtide
from levers_measure import Measure
from levers_off.switches import without
from levers_page import render_page
from lowtide.zoo.targets import TargetSpec

COLUMNS = (
    "target",
    "levers",
    "at",
    "eager_mib",
    "peak_mib",
    "percent_of_eager",
    "set_by",
    "predicted_overhead_percent",
    "swapped_mib",
    "transfer_seconds",
    "hidden_percent",
    "waited_seconds",
    "measured_waited_seconds",
    "measured_mib",
    "measured_eager_mib",
    "measured_overhead_percent",
    "exact",
)
KEY = COLUMNS[:3]
MIB = 2**20

ALL = {"offload": True, "step_in_backward": True, "holds_outputs": False}
LEVERS: dict[str, tuple[tuple[str, ...], dict[str, Any]]] = {
    "recompute": (("packed", "slices", "pieces"), {}),
    "+ packed": (("slices", "pieces"), {}),
    "+ slices": (("pieces",), {}),
    "+ pieces": ((), {}),
    "+ swap": ((), {"offload": True}),
    "+ step in backward": ((), {"offload": True, "step_in_backward": True}),
    "all (+ outputs let go)": ((), ALL),
    "all + state rests": ((), ALL | {"offload_what": "activations,state"}),
    "all + state and weights rest": ((), ALL | {"offload_what": "activations,state,parameters"}),
    "all + head rounds": ((), ALL | {"rounds": "head"}),
    "all without swap": ((), {"step_in_backward": True, "holds_outputs": False}),
}
"""Which levers are switched off, and what is asked for."""


def spec_of(target: str) -> TargetSpec:
    """`name:batch size`, with Adam."""
    name, _, batch_size = target.partition(":")
    return TargetSpec(text=name, batch_size=int(batch_size), optimizer="adam")


def profiled(target: str, levers: str, offload: str) -> lowtide.Profile:
    """A target with some levers. Ops are timed once for all of them."""
    made = spec_of(target).load()
    options = dict(LEVERS[levers][1])
    if options.pop("offload", False):
        options["offload"] = offload
    return lowtide.profile(made.model, made.batch, optimizer=made.optimizer, loss=made.loss, **options)


def row(
    target: str, levers: str, at: str, *, offload: str, timed_runs: int, measure: Measure | None
) -> list[str]:
    """What one target needs with some levers: at the floor, or at a share of eager's peak."""
    absent = LEVERS[levers][0]
    with without(absent):
        profile = profiled(target, levers, offload)
        head = [target, levers, at, f"{profile.peak_bytes / MIB:.1f}"]
        try:
            plan = profile.plan(profile.floor_bytes if at == "floor" else at)
        except lowtide.BudgetTooSmall as error:
            short = f"not below {error.floor_bytes / MIB:.1f}"
            return [*head, short, "", error.node, *[""] * (len(COLUMNS) - len(head) - 3)]
        head += [
            f"{plan.peak_bytes / MIB:.1f}",
            f"{100 * plan.peak_bytes / profile.peak_bytes:.1f}",
            plan.solution.peak_node,
            f"{100 * plan.overhead:.1f}",
            *_transfers(plan),
        ]
        if measure is None:
            return [*head, *[""] * (len(COLUMNS) - len(head))]
        del profile
        found = measure.of(plan, absent=absent, timed_runs=timed_runs)
    return [
        *head,
        "" if found.waited_seconds is None else f"{found.waited_seconds:.3f}",
        f"{found.peak_bytes / MIB:.1f}",
        f"{found.eager_peak_bytes / MIB:.1f}",
        "" if found.overhead is None else f"{100 * found.overhead:.1f}",
        found.differences[0] if found.differences else "yes",
    ]


def _transfers(plan: lowtide.Plan) -> list[str]:
    offload = plan.solution.offload
    if offload is None or not offload.store_bytes:
        return ["", "", "", ""]
    hidden = 1 - offload.stall_seconds / offload.transfer_seconds
    return [
        f"{offload.store_bytes / MIB:.1f}",
        f"{offload.transfer_seconds:.3f}",
        f"{100 * hidden:.0f}",
        f"{offload.stall_seconds:.3f}",
    ]


def draw(target: str, *, offload: str, path: Path) -> None:
    """What every budget costs, with and without the store, in one picture."""
    from lowtide.experiments.measured import curves_of, point_of
    from lowtide.report.experiment_plots import plot_tradeoff

    profile = profiled(target, "+ swap", offload)
    plans, without_offload = curves_of(profile, points=30)
    points = [point_of(plan) for plan in plans]
    figure = plot_tradeoff(points, step_seconds=profile.step_seconds, without_offload=without_offload)
    figure.savefig(path, dpi=150)


def done_already(path: Path) -> set[tuple[str, ...]]:
    if not path.exists():
        return set()
    with path.open(newline="") as file:
        return {tuple(line[column] for column in KEY) for line in csv.DictReader(file)}


def in_a_process(arguments: list[str]) -> Iterator[list[str]]:
    """The rows of one target, as the process that makes them prints them."""
    command = [sys.executable, __file__, "--one", *arguments]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        for line in child.stdout:
            if line.startswith("["):
                yield json.loads(line)
    if child.returncode:
        raise SystemExit(f"{' '.join(command)} ended with status {child.returncode}")


def rows_of(target: str, wanted: list[tuple[str, str]], *, measured: bool, **settings: Any) -> None:
    """Print rows of one target, each when it is done."""
    with tempfile.TemporaryDirectory(prefix="levers-") as folder:
        measure = Measure(spec_of(target), Path(folder)) if measured else None
        for levers, at in wanted:
            print(json.dumps(row(target, levers, at, measure=measure, **settings)), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("targets", nargs="*", help="name:batch size")
    parser.add_argument("--levers", default=",".join(LEVERS), help="which rows, separated by commas")
    parser.add_argument("--at", default="floor", help="floor, or shares of eager's peak, separated by commas")
    parser.add_argument("--offload", default=f"disk:{tempfile.gettempdir()}", help="disk:FOLDER")
    parser.add_argument("--timed-runs", type=int, default=2, help="pairs of timed steps")
    parser.add_argument("--predict", action="store_true", help="measure nothing")
    parser.add_argument(
        "--picture", type=Path, help="draw the curves of the one target; with --page, show them"
    )
    parser.add_argument("--page", type=Path, help="make a page of the file, and nothing else")
    parser.add_argument("--one", action="store_true", help="make one row in this process, and print it")
    parser.add_argument("-o", "--output", type=Path, default=Path("levers.csv"))
    options = parser.parse_args()
    if options.page is not None:
        picture = os.path.relpath(options.picture, options.page.parent) if options.picture else ""
        options.page.write_text(render_page(options.output, picture=picture))
        return
    if options.picture is not None:
        draw(options.targets[0], offload=options.offload, path=options.picture)
        return
    wanted = [(levers, at) for levers in options.levers.split(",") for at in options.at.split(",")]
    if options.one:
        rows_of(
            options.targets[0],
            wanted,
            measured=not options.predict,
            offload=options.offload,
            timed_runs=options.timed_runs,
        )
        return
    done = done_already(options.output)
    with options.output.open("a", newline="") as file:
        writer = csv.writer(file)
        if not done:
            writer.writerow(COLUMNS)
        for target in options.targets:
            for at in options.at.split(","):
                missing = [
                    levers for levers, where in wanted if where == at and (target, levers, at) not in done
                ]
                if not missing:
                    continue
                given = [target, "--levers", ",".join(missing), "--at", at, "--offload", options.offload]
                given += ["--timed-runs", str(options.timed_runs), *["--predict"] * options.predict]
                for found in in_a_process(given):
                    writer.writerow(found)
                    file.flush()
                    print(*found, sep="\t", flush=True)


if __name__ == "__main__":
    main()
