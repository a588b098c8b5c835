"""Why a plan can be faster than eager: page faults and system time of a step, eager and planned in turn.

    python bench/page_faults.py bert-base:16 transformer:32 --budget 70%

Whatever an allocator gives back to the system has to be faulted in again at its next use.
"""

import argparse
import resource
import statistics
import time
from collections.abc import Iterator

import lowtide
from lowtide.checking.train_step import train_step
from lowtide.running.runner import runner_of
from lowtide.torchside.route import set_route
from lowtide.zoo.targets import Target, TargetSpec

COLUMNS = ("step", "way", "seconds", "user s", "system s", "page faults")
WARM_UP_STEPS = 2


def cost_of_step(target: Target) -> tuple[float, float, float, int]:
    """Wall, user and system seconds, and page faults of one step."""
    before, start = resource.getrusage(resource.RUSAGE_SELF), time.perf_counter()
    train_step(target.model, target.batch, target.optimizer, target.loss)
    seconds, after = time.perf_counter() - start, resource.getrusage(resource.RUSAGE_SELF)
    return (
        seconds,
        after.ru_utime - before.ru_utime,
        after.ru_stime - before.ru_stime,
        after.ru_minflt - before.ru_minflt,
    )


def rows(name: str, batch_size: int, *, budget: str, runs: int) -> Iterator[tuple[str, ...]]:
    target = TargetSpec(text=name, batch_size=batch_size).load()
    profile = lowtide.profile(target.model, target.batch, optimizer=target.optimizer)
    profile.plan(budget).apply(target.model)
    ways = {"eager": None, f"plan, {budget}": runner_of(target.model)}
    costs: dict[str, list[tuple[float, ...]]] = {way: [] for way in ways}
    for number in range(WARM_UP_STEPS + runs):
        for way, route in ways.items():
            set_route(target.model, route)
            cost = cost_of_step(target)
            if number >= WARM_UP_STEPS:
                costs[way].append(cost)
    for way, found in costs.items():
        seconds, user, system, faults = (statistics.median(values) for values in zip(*found, strict=True))
        yield f"{name}:{batch_size}", way, f"{seconds:.2f}", f"{user:.2f}", f"{system:.2f}", f"{faults:.0f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("targets", nargs="+", metavar="TARGET:BATCH")
    parser.add_argument("--budget", default="70%")
    parser.add_argument("--timed-runs", type=int, default=5)
    options = parser.parse_args()
    print(" | ".join(COLUMNS))
    for text in options.targets:
        name, _, batch_size = text.rpartition(":")
        for row in rows(name, int(batch_size), budget=options.budget, runs=options.timed_runs):
            print(" | ".join(row), flush=True)


if __name__ == "__main__":
    main()
