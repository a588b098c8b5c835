"""How long until a planned model trains, how long a new batch shape takes, and what a step costs.

Every target is used for the first time in a fresh process. `new shape` is what the first step of another
batch size takes longer than its second, beside the same for `torch.compile(backend="aot_eager")`, in a
process of its own; `step` is the time of a step that needs no recompute beside eager's, the median of steps
that take turns. Costs of ops are remembered from one run to the next: run it twice for those of a warm cache.

    python bench/first_use.py transformer:8 bert-base:4 resnet152:4 -o first_use.csv
"""

import argparse
import copy
import csv
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

DEFAULT_TARGETS = ("transformer:8", "bert-base:4", "resnet152:4")
COLUMNS = (
    "target",
    "import_seconds",
    "profile_seconds",
    "plan_seconds",
    "first_step_seconds",
    "total_seconds",
    "new_shape_seconds",
    "aot_eager_new_shape_seconds",
    "new_shape_ratio",
    "step_ratio",
)
Times = dict[str, float]


@contextmanager
def timed(times: Times, name: str) -> Iterator[None]:
    start = time.perf_counter()
    yield
    times[f"{name}_seconds"] = time.perf_counter() - start


def load(target: str, *, more: int = 0) -> Any:
    from lowtide.zoo.targets import TargetSpec

    name, batch_size = target.split(":")
    return TargetSpec(text=name, batch_size=int(batch_size) + more).load()


def train(model: Any, loaded: Any, optimizer: Any = None) -> None:
    from lowtide.trace.model_call import call, loss_of

    loss_of(call(model, loaded.batch), loaded.loss).backward()
    if optimizer is not None:
        optimizer.step()
    model.zero_grad()


def seconds(run: Callable[[], None]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def new_shape_seconds(model: Any, target: str) -> float:
    """How much longer the first step of a smaller batch takes than the next ones."""
    other = load(target, more=-1)
    first = seconds(lambda: train(model, other))
    return first - min(seconds(lambda: train(model, other)) for _ in range(2))


def first_use(target: str) -> Times:
    times: Times = {}
    import torch  # noqa: F401 - its own time is not lowtide's

    with timed(times, "import"):
        import lowtide

        lowtide.profile  # noqa: B018 - loads what it needs
    loaded = load(target)
    with timed(times, "profile"):
        profile = lowtide.profile(loaded.model, loaded.batch, optimizer=loaded.optimizer, loss=loaded.loss)
    with timed(times, "plan"):
        plan = profile.plan((profile.peak_bytes + profile.floor_bytes) // 2)
    plan.apply(loaded.model)
    with timed(times, "first_step"):
        train(loaded.model, loaded, loaded.optimizer)
    times["total_seconds"] = sum(times.values())
    times["new_shape_seconds"] = new_shape_seconds(loaded.model, target)
    return times


def aot_eager(target: str) -> Times:
    import torch

    loaded = load(target)
    compiled = torch.compile(loaded.model, backend="aot_eager", dynamic=False)
    train(compiled, loaded)
    return {"aot_eager_new_shape_seconds": new_shape_seconds(compiled, target)}


def step_ratio(target: str) -> Times:
    import lowtide

    loaded = load(target)
    planned = copy.deepcopy(loaded.model)
    profile = lowtide.profile(planned, loaded.batch, loss=loaded.loss)
    profile.plan(4 * profile.peak_bytes, "none").apply(planned)
    models = {"eager": loaded.model, "planned": planned}
    steps: dict[str, list[float]] = {name: [] for name in models}
    for model in models.values():
        train(model, loaded)
    end = time.perf_counter() + 20
    while time.perf_counter() < end or len(steps["eager"]) < 5:
        for name, model in models.items():
            steps[name].append(seconds(lambda model=model: train(model, loaded)))
    ratio = statistics.median(steps["planned"]) / statistics.median(steps["eager"])
    return {"step_ratio": ratio}


PARTS = {"first": first_use, "aot": aot_eager, "step": step_ratio}


def measure(target: str, parts: list[str]) -> dict[str, Any]:
    row: dict[str, Any] = {"target": target}
    for part in parts:
        command = [sys.executable, __file__, target, "--child", part]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
        row |= json.loads(done.stdout.splitlines()[-1])
    if {"first", "aot"} <= set(parts):
        row["new_shape_ratio"] = row["new_shape_seconds"] / row["aot_eager_new_shape_seconds"]
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("targets", nargs="*", default=DEFAULT_TARGETS, help="name:batch_size")
    parser.add_argument("--parts", nargs="*", choices=PARTS, default=list(PARTS))
    parser.add_argument("--child", choices=PARTS, help=argparse.SUPPRESS)
    parser.add_argument("-o", "--output", type=Path)
    options = parser.parse_args()
    if options.child:
        print(json.dumps(PARTS[options.child](options.targets[0])))
        return
    rows = []
    print(" | ".join(column.removesuffix("_seconds") for column in COLUMNS))
    for target in options.targets:
        rows.append(measure(target, options.parts))
        cells = [rows[-1].get(column, "") for column in COLUMNS]
        print(" | ".join(f"{cell:.2f}" if isinstance(cell, float) else cell for cell in cells), flush=True)
    if options.output:
        with options.output.open("w", newline="") as file:
            writer = csv.DictWriter(file, COLUMNS)
            writer.writeheader()
            writer.writerows(rows)


if __name__ == "__main__":
    main()
