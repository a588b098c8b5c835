"""Predicted against measured time added by plans, and what the difference is made of.

    python bench/predicted.py resnet152:4 bert-base:16 transformer:32 unet:4 --budgets 80%,60%,50%

All ways of running a step take turns in one process: eager, the captured graph without recompute, and one
plan for each budget. `predicted` and `measured` are % of eager's step; `captured` is what the captured graph
without recompute takes more than eager, and `recompute` what the plan takes more than that graph: a
prediction is about the latter alone. Page faults and system seconds of a step show what the allocator takes
from the system anew, which is in no prediction: `--keep-memory` starts the process with a heap that gives
nothing back. Needs the memory of the plain step, and an idle machine.
"""

import argparse
import os
import resource
import statistics
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass

import lowtide
from lowtide.runtime.runner import Runner, attach, remove, runner_of
from lowtide.verification.measure_step import train_step
from lowtide.zoo.targets import Target, TargetSpec

COLUMNS = (
    *("step", "budget", "predicted %", "measured %", "off by", "captured %", "recompute %"),
    *("seconds", "quartiles", "system s", "page faults"),
)
WARM_UP_STEPS = 2
KEPT_MEMORY = {"MALLOC_TOP_PAD_": str(16 << 30)}
"""For glibc: what its heap grows by, and keeps. Address space, until it is used."""


@dataclass(frozen=True, slots=True)
class Cost:
    """Of one step."""

    seconds: float
    system_seconds: float
    page_faults: int


def cost_of_step(target: Target) -> Cost:
    before, start = resource.getrusage(resource.RUSAGE_SELF), time.perf_counter()
    train_step(target.model, target.batch, target.optimizer, target.loss)
    seconds, after = time.perf_counter() - start, resource.getrusage(resource.RUSAGE_SELF)
    return Cost(seconds, after.ru_stime - before.ru_stime, after.ru_minflt - before.ru_minflt)


def costs_of(target: Target, ways: dict[str, Runner | None], *, runs: int) -> dict[str, list[Cost]]:
    costs: dict[str, list[Cost]] = {way: [] for way in ways}
    for number in range(WARM_UP_STEPS + runs):
        for way, runner in ways.items():
            remove(target.model)
            if runner is not None:
                attach(target.model, runner)
            cost = cost_of_step(target)
            if number >= WARM_UP_STEPS:
                costs[way].append(cost)
    return costs


def rows(name: str, batch_size: int, budgets: list[str], *, runs: int) -> Iterator[tuple[str, ...]]:
    target = TargetSpec(text=name, batch_size=batch_size).load()
    profile = lowtide.profile(target.model, target.batch, optimizer=target.optimizer, loss=target.loss)
    ways: dict[str, Runner | None] = {"eager": None}
    predicted = {"eager": 0.0}
    # more than eager's peak, so that the captured graph runs and not eager itself
    for way, budget, planner in [
        ("captured", 2 * profile.peak_bytes, "none"),
        *((b, b, "auto") for b in budgets),
    ]:
        try:
            plan = profile.plan(budget, planner=planner)
        except lowtide.BudgetTooSmall as error:
            yield f"{name}:{batch_size}", way, f"the floor is {error.floor_bytes / profile.peak_bytes:.0%}"
            continue
        plan.apply(target.model, optimizer=target.optimizer)
        cost_of_step(target)  # a plan that is replaced before it has run would be told of as lost
        ways[way], predicted[way] = runner_of(target.model), 100 * plan.overhead
    costs = costs_of(target, ways, runs=runs)
    seconds = {way: [cost.seconds for cost in found] for way, found in costs.items()}
    eager, captured = (statistics.median(seconds[way]) for way in ("eager", "captured"))
    for way, found in costs.items():
        median = statistics.median(seconds[way])
        low, _, high = statistics.quantiles(seconds[way], n=4, method="inclusive")
        measured = 100 * (median / eager - 1)
        yield (
            f"{name}:{batch_size}",
            way,
            f"{predicted[way]:.1f}",
            f"{measured:.1f}",
            f"{measured - predicted[way]:+.1f}",
            f"{100 * (captured / eager - 1):.1f}",
            f"{100 * (median - captured) / eager:.1f}",
            f"{median:.3f}",
            f"{low:.3f} to {high:.3f}",
            f"{statistics.median(cost.system_seconds for cost in found):.2f}",
            f"{statistics.median(cost.page_faults for cost in found):.0f}",
        )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("targets", nargs="+", metavar="TARGET:BATCH")
    parser.add_argument("--budgets", default="80%,60%,50%")
    parser.add_argument("--timed-runs", type=int, default=7)
    parser.add_argument("--keep-memory", action="store_true", help="give nothing back to the system (glibc)")
    options = parser.parse_args()
    if options.keep_memory and not KEPT_MEMORY.items() <= os.environ.items():  # read when a process starts
        os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, **KEPT_MEMORY})
    print("| " + " | ".join(COLUMNS) + " |")
    print("|---" * len(COLUMNS) + "|")
    for text in options.targets:
        name, _, batch_size = text.rpartition(":")
        for row in rows(name, int(batch_size), options.budgets.split(","), runs=options.timed_runs):
            print("| " + " | ".join(row) + " |", flush=True)


if __name__ == "__main__":
    main()
