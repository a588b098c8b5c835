"""The greedy of μ-TWO (Purandare, Wasay, Jain, Idreos, MLSys 2023).

Legend, paper to here: `recomp_srcs` sources, `recomp_time` recompute_seconds, `recomp_cnt` count,
`total_recomp_time` total_seconds, `recompute_ratio` ratio. Algorithms: B `policy`, D `overhead`,
E `update_chosen`, F `update_candidates`, G `DroppedStorages.peak_bytes` (the true simulator: temporaries of
the recompute, lengthened lives, optimizer and aliases count). C and H, and B with its swap branch, are in
`mu_two_swap.py`; here is what a step without a store needs.

Where the paper is silent: ties go to the larger, then the earlier activation; totals of those
already chosen and every ratio are refreshed. Known weakness, kept: the ratio does not look where
the peak is.

The whole policy of μ-TWO, with its swap branch: each choice swaps or recomputes, whichever costs less.

Algorithms, besides those of `mu_two.py`: B `policy_with_swap`, C `swap_overhead`; H, where a value is
offloaded and prefetched, is `planning/placing.py`.

Departures from the paper: a swap candidate whose read cannot begin behind any op still costs its whole
transfer, and no more; compute that hides one read hides no other (one transfer at a time per direction,
where the paper's C looks at each candidate alone); H looks for room at every op instead of outside of the
peak interval alone; writes, which the paper takes to be hidden, are placed and stall as reads do; the peak is
that of the true simulator. Ties go to the longer idle, then the larger, then the earlier activation, and
where both branches cost the same to the swap, which leaves the compute alone.

Its choices depend on the budget, through the peak interval. So, unlike `auto`, a larger budget can be slower.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from heapq import heapify, heappop, heappush

import numpy as np
from numpy.typing import NDArray

from lowtide.facts import Activation, TransferSpeed
from lowtide.planning.activations import NANOSECOND, activations
from lowtide.planning.offload.offload_sets import Swaps, with_fetches
from lowtide.planning.search.dropped_storages import DroppedStorages, retain_only
from lowtide.planning.search.problem import Ints
from lowtide.planning.search.step_problem import StepProblem
from lowtide.planning.search.table import RematSet, Table


@dataclass(slots=True, eq=False)
class Candidate:
    """An activation during the greedy."""

    name: str
    activation: Activation
    sources: set[str]
    recompute_seconds: float
    count: int = 1
    total_seconds: float = 0.0
    ratio: float = 0.0


@dataclass(frozen=True, slots=True)
class Prefix:
    """What the greedy has after one more choice: its newest activation and the true peak."""

    storage: int
    peak_bytes: int
    recompute_seconds: float


def overhead(candidate: Candidate) -> float:
    """Algorithm D: what recomputing it costs in all."""
    return candidate.recompute_seconds * candidate.count


def refresh(candidate: Candidate) -> None:
    candidate.total_seconds = overhead(candidate)
    candidate.ratio = candidate.activation.nbytes / max(candidate.total_seconds, NANOSECOND)


def update_chosen(t: Candidate, chosen: Iterable[Candidate]) -> None:
    """Algorithm E: those already chosen that read `t` now start from the sources of `t`."""
    for r in chosen:
        if t.name in r.sources:
            r.sources = (r.sources - {t.name}) | t.sources
            r.recompute_seconds += t.recompute_seconds
            t.count += 1
            refresh(r)
    refresh(t)


def update_candidates(t: Candidate, candidates: Iterable[Candidate], chosen: list[Candidate]) -> None:
    """Algorithm F: what the choice of `t` (already among `chosen`) means for those that remain."""
    for c in candidates:
        if t.name not in c.sources and c.name not in t.sources:
            continue
        alive = (
            t.activation.first_backward_use
            <= c.activation.first_backward_use
            <= t.activation.last_backward_use
        )
        longer = t.name in c.sources and not alive
        if longer:
            c.sources = (c.sources - {t.name}) | t.sources
            c.recompute_seconds += t.recompute_seconds
        if longer or c.name in t.sources:
            c.count = 1 + sum(c.name in r.sources for r in chosen)
            refresh(c)


def pick(candidates: list[Candidate]) -> Candidate:
    """The highest ratio; ties to the larger, then the earlier activation."""
    return max(candidates, key=lambda c: (c.ratio, c.activation.nbytes, -c.activation.creation_rank, c.name))


def policy(table: Table, found: Iterable[Activation]) -> list[Prefix]:
    """Algorithm B, run to its end: one prefix per choice. A budget takes the first that fits.

    `found` are all activations of the step.

    The choices do not depend on the budget, only where the loop stops does.
    """
    recomputable = [a for a in found if not a.fixed]
    # sources that are never chosen change nothing, and those of long chains would be all parameters
    names = {a.name for a in recomputable}
    candidates = [
        Candidate(a.name, a, names.intersection(a.recompute_sources), a.recompute_seconds)
        for a in recomputable
    ]
    pool = Pool(candidates)
    runs = DroppedStorages(table)
    prefixes = [Prefix(-1, runs.peak_bytes(), 0.0)]
    while (t := pool.choose()) is not None:
        runs.drop(t.activation.storage)
        prefixes.append(Prefix(t.activation.storage, runs.peak_bytes(), runs.added_seconds))
    return prefixes


class Pool:
    """The candidates, and those chosen so far: a choice looks at those alone that it concerns."""

    def __init__(self, candidates: list[Candidate]) -> None:
        for candidate in candidates:
            refresh(candidate)
        self._all = {candidate.name: candidate for candidate in candidates}
        self._chosen: dict[str, Candidate] = {}
        self._readers: dict[str, dict[str, None]] = {}
        """by source, the names of those that start from it, or once did"""
        # of equal ratio, as `pick` has them
        best_last = sorted(
            candidates, key=lambda c: (c.activation.nbytes, -c.activation.creation_rank, c.name)
        )
        self._turn = {candidate.name: -i for i, candidate in enumerate(best_last)}
        self._heap = [(-c.ratio, self._turn[c.name], c.name) for c in candidates]
        heapify(self._heap)
        self._note(candidates)

    def choose(self) -> Candidate | None:
        """The next one of the greedy; None when all are chosen."""
        while self._heap:
            ratio, _, name = heappop(self._heap)
            t = self._all[name]
            if name not in self._chosen and t.ratio == -ratio:
                break
        else:
            return None
        longer = self._chosen_readers([name])
        update_chosen(t, longer)
        self._note(longer, t.sources)
        self._chosen[name] = t
        concerned = [
            self._all[other]
            for other in {**self._readers.get(name, {}), **dict.fromkeys(sorted(t.sources))}
            if other in self._all and other not in self._chosen
        ]
        update_candidates(t, concerned, self._chosen_readers([c.name for c in concerned]))
        for c in concerned:
            heappush(self._heap, (-c.ratio, self._turn[c.name], c.name))
        self._note(concerned, t.sources)
        return t

    def _chosen_readers(self, names: Iterable[str]) -> list[Candidate]:
        readers = {reader: None for name in names for reader in self._readers.get(name, ())}
        return [self._chosen[reader] for reader in readers if reader in self._chosen]

    def _note(self, candidates: Iterable[Candidate], sources: Iterable[str] | None = None) -> None:
        for candidate in candidates:
            for source in candidate.sources.intersection(candidate.sources if sources is None else sources):
                self._readers.setdefault(source, {})[candidate.name] = None


def plan_of(table: Table, prefixes: list[Prefix], last: int) -> RematSet:
    """The plan after the choices up to `prefixes[last]`."""
    dropped = {prefix.storage for prefix in prefixes[: last + 1]}
    return retain_only(table, table.uses.keys() - dropped)


@dataclass(slots=True)
class Prefetching:
    """Compute of the backward pass that can still hide a read, by rank."""

    seconds: dict[int, float]
    after: int = -1
    """the last rank of the peak interval"""

    def hideable(self, activation: Activation) -> list[int]:
        """Ranks between the peak interval and the first backward use, the latest first."""
        return [
            rank
            for rank in range(activation.first_backward_use - 1, self.after, -1)
            if self.seconds.get(rank)
        ]

    def use_up(self, activation: Activation, seconds: float) -> None:
        for rank in self.hideable(activation):
            taken = min(seconds, self.seconds[rank])
            self.seconds[rank] -= taken
            seconds -= taken


def swap_overhead(activation: Activation, link: TransferSpeed, free: Prefetching) -> float:
    """Algorithm C: what of its read cannot hide behind ops between the peak interval and its use."""
    hidden = sum(free.seconds[rank] for rank in free.hideable(activation))
    return max(0.0, link.read_seconds(activation.nbytes) - hidden)


def longest_idle(candidates: list[Activation]) -> Activation:
    return max(candidates, key=lambda a: (a.inactive_seconds, a.nbytes, -a.creation_rank, a.name))


def policy_with_swap(steps: StepProblem, swaps: Swaps, link: TransferSpeed, *, budget_bytes: int) -> Ints:
    """Algorithm B: the sequence of its choices when it fits, or where it had its lowest peak."""
    table = steps.table
    found = activations(table.step)
    recomputable = [
        Candidate(a.name, a, set(a.recompute_sources), a.recompute_seconds) for a in found if not a.fixed
    ]
    for candidate in recomputable:
        refresh(candidate)
    plain = steps.sequence(())
    swappable_storages = {s for value in swaps.idle(plain) for s in swaps.storages(value)}
    swappable = [a for a in found if a.storage in swappable_storages]
    nodes = table.step.nodes[table.first_backward :]
    free = Prefetching({node.rank: node.seconds for node in nodes})
    chosen: list[Candidate] = []
    swapped: set[int] = set()
    order = best = plain
    held = steps.problem.live_bytes(order)
    lowest = int(held.max(initial=0))
    while held.max(initial=0) > budget_bytes and (recomputable or swappable):
        free.after = _end_of_peak(steps, order, held, budget_bytes)
        swap = longest_idle(swappable) if swappable else None
        again = pick(recomputable) if recomputable else None
        if swap is not None and (again is None or swap_overhead(swap, link, free) <= overhead(again)):
            free.use_up(swap, link.read_seconds(swap.nbytes))
            swapped.add(swap.storage)
            taken = swap.storage
        else:
            assert again is not None
            recomputable.remove(again)
            update_chosen(again, chosen)
            chosen.append(again)
            update_candidates(again, recomputable, chosen)
            taken = again.activation.storage
        swappable = [a for a in swappable if a.storage != taken]
        recomputable = [c for c in recomputable if c.activation.storage != taken]
        order = _sequence(steps, swaps, {c.activation.storage for c in chosen}, swapped)
        held = steps.problem.live_bytes(order)
        if held.max(initial=0) < lowest:
            lowest, best = int(held.max(initial=0)), order
    return best


def _sequence(steps: StepProblem, swaps: Swaps, dropped: set[int], swapped: set[int]) -> Ints:
    order = steps.sequence(retain_only(steps.table, steps.table.uses.keys() - dropped))
    values = [v for v in swaps.idle(order) if not swapped.isdisjoint(swaps.storages(v))]
    return with_fetches(order, values)


def _end_of_peak(steps: StepProblem, order: Ints, held: NDArray[np.int64], budget_bytes: int) -> int:
    """The last rank during which more is held than the budget."""
    over = np.flatnonzero(held > budget_bytes)
    first = [int(op) for op in order[: over[-1] + 1] if op < steps.problem.num_first]
    return steps.ranks[first[-1]] if first else -1
