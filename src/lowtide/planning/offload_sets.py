"""Which values to offload on top of a schedule: one after the other, the longest idle across the peak first.

A schedule is a sequence of ops of the step's problem. A value that backward reads is idle between its last
forward use and its first backward use. Offloading frees its bytes there and changes nothing else. So one pass
over a sequence gives a row of sequences, each with one more value in the store and a lower peak.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from lowtide.facts import Action, Run, Step
from lowtide.planning.planning_problem import PlanningProblem
from lowtide.planning.search.problem import Ints
from lowtide.planning.search.step_problem import Archive
from lowtide.planning.simulate import Timeline, simulate
from lowtide.planning.transfer_schedule import placed

NUM_LEVELS = 24
"""Memory levels for which transfers are placed, from the baseline's peak to the lowest."""
SLACK = 1.5
"""How much longer transfers may take than they were measured, where the budget leaves bytes for that."""
SMALLEST_PART = 1000
"""Values below this part of the peak are not worth a transfer of their own."""


@dataclass(frozen=True, slots=True)
class Idle:
    """A value that `op` can fetch; idle after position `last_use` of a sequence until `next_use`."""

    op: int
    last_use: int
    next_use: int
    nbytes: int
    seconds: float


@dataclass(frozen=True, slots=True, eq=False)
class Offloading:
    """A schedule with its transfers placed; of equally fast ones that which writes less is better."""

    peak_bytes: int
    seconds: float
    store_bytes: int
    runs: tuple[Run, ...]

    @property
    def price(self) -> tuple[float, int]:
        return self.seconds, self.store_bytes


def offload_sets(problem: PlanningProblem) -> "OffloadSets":
    return OffloadSets(problem)


class OffloadSets:
    """The values to offload in sequences of one step."""

    def __init__(self, problem: PlanningProblem) -> None:
        self._problem, self._steps = problem, problem.search_problem

    def search(self, seeds: Iterable[Ints]) -> Archive[Offloading]:
        """Offload values of each seed until it fits, for every memory level down to the lowest."""
        cheapest = sorted(seeds, key=self._steps.added_seconds)
        rows = [list(self.rows(seed)) for seed in cheapest]
        low = min(peak_bytes for row in rows for peak_bytes, _ in row)
        high = max(low, self._problem.baseline.peak_bytes)
        levels = {high - (high - low) * i // (NUM_LEVELS - 1) for i in range(NUM_LEVELS)}
        found: Archive[Offloading] = Archive()
        for seed, row in zip(cheapest, rows, strict=True):
            least_seconds = self._steps.added_seconds(seed)
            for level in sorted(levels, reverse=True):
                fits = next((order for peak_bytes, order in row if peak_bytes <= level), None)
                known = found.best(level)
                if fits is None or (known and known.seconds <= least_seconds):
                    continue
                timeline = self._problem.placed(self._steps.runs(fits), level)
                assert timeline.traffic is not None
                found.add(
                    Offloading(
                        timeline.peak_bytes,
                        timeline.added_seconds,
                        timeline.traffic.store_bytes,
                        timeline.runs,
                    )
                )
        return found

    @cached_property
    def ops(self) -> dict[int, int]:
        """By storage of the problem, the op that fetches it."""
        steps = self._steps
        found: dict[int, int] = {}
        for place, number in enumerate(steps.remats):
            remat = steps.table.remats[number]
            source = steps.table.step.nodes[remat.rank].remat(remat.rule)
            op = steps.problem.num_first + place
            if source is not None and source.action is Action.OFFLOAD:
                for storage in self._makes[op]:
                    found.setdefault(storage, op)
        return found

    def storages(self, value: Idle) -> list[int]:
        """The storages of the step that a fetch of the value makes."""
        steps = self._steps
        remat = steps.table.remats[steps.remats[value.op - steps.problem.num_first]]
        return [storage for storage, _, _ in remat.fresh]

    def idle(self, order: Ints) -> list[Idle]:
        """Values of a sequence that could be offloaded, in the order of their storages."""
        problem = self._steps.problem
        border = self._border(order)
        before: dict[int, int] = {}
        after: dict[int, int] = {}
        clock = np.concatenate([[0.0], np.cumsum(self._seconds[order])])
        for position, op in enumerate(order.tolist()):
            used, made = self._reads[op], self._makes[op]
            if position < border:
                before.update(dict.fromkeys((*used, *made), position))
                continue
            for storage in used:
                after.setdefault(storage, position)
            for storage in made:
                after.setdefault(storage, -1)  # another remat makes it
        found = []
        for storage, fetch in sorted(self.ops.items()):
            position, last = after.get(storage, -1), before.get(storage)
            if position >= 0 and last is not None and self._may_run_at(fetch, order, position):
                idle = float(clock[position] - clock[last + 1])
                found.append(Idle(fetch, last, position, int(problem.nbytes[storage]), idle))
        return found

    def rows(self, order: Ints) -> Iterator[tuple[int, Ints]]:
        """Sequences with more and more values offloaded, and the expected peak of each."""
        live = self._steps.problem.live_bytes(order).copy()
        idle = self.idle(order)
        least_bytes = int(live.max(initial=0)) // SMALLEST_PART
        idle = [value for value in idle if value.nbytes > least_bytes]
        chosen: list[Idle] = []
        while True:
            yield int(live.max(initial=0)), with_fetches(order, chosen)
            top = int(live.argmax()) if len(live) else 0
            usable = [value for value in idle if value.last_use < top < value.next_use]
            if not usable:
                return
            value = max(usable, key=lambda v: (v.seconds, v.nbytes, -v.op))
            idle.remove(value)
            chosen.append(value)
            live[value.last_use + 1 : value.next_use] -= value.nbytes

    def _border(self, order: Ints) -> int:
        """The position where the backward pass begins."""
        steps = self._steps
        return next(
            (
                position
                for position, op in enumerate(order)
                if op >= steps.problem.num_first or steps.ranks[op] >= steps.table.first_backward
            ),
            len(order),
        )

    def _may_run_at(self, fetch: int, order: Ints, position: int) -> bool:
        """Whether an op may run right before that position."""
        slot = self._steps.problem.slot
        following = (op for op in order[position:] if op < self._steps.problem.num_first)
        return bool(slot[fetch] == slot[next(following)])

    @cached_property
    def _reads(self) -> list[list[int]]:
        problem = self._steps.problem
        return _lists(problem.read_ptr, problem.reads)

    @cached_property
    def _makes(self) -> list[list[int]]:
        problem = self._steps.problem
        return _lists(problem.make_ptr, problem.makes)

    @cached_property
    def _seconds(self) -> NDArray[np.float64]:
        """What every op of the problem takes, first runs included."""
        steps = self._steps
        nodes = steps.table.step.nodes
        first = [nodes[rank].seconds if rank < len(nodes) else 0.0 for rank in steps.ranks]
        return np.array([*first, *steps.problem.seconds[steps.problem.num_first :]], dtype=np.float64)


def _lists(ends: Ints, flat: Ints) -> list[list[int]]:
    items = flat.tolist()
    return [items[start:end] for start, end in pairwise(ends.tolist())]


def with_fetches(order: Ints, values: list[Idle]) -> Ints:
    """A sequence that fetches these values before their next use."""
    at = sorted((value.next_use, value.op) for value in values)
    unique = list(dict.fromkeys(at))
    return np.insert(order, [position for position, _ in unique], [op for _, op in unique]).astype(np.int32)


def with_slack(step: Step, found: Offloading, budget_bytes: int) -> Timeline:
    """A schedule with its transfers further apart from their uses, where that costs nothing."""
    timeline = simulate(step, found.runs)
    careful = placed(step, found.runs, budget_bytes=budget_bytes, slack=SLACK)
    # not where it is faster, either: then a larger budget could be slower
    is_same = careful.added_seconds == timeline.added_seconds
    return careful if is_same and careful.peak_bytes <= budget_bytes else timeline
