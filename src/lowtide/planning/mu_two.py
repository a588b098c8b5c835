"""The greedy of μ-TWO (Purandare, Wasay, Jain, Idreos, MLSys 2023), with and without its offload branch.

Legend, paper to here: `recomp_srcs` sources, `recomp_time` recompute_seconds, `recomp_cnt` count,
`total_recomp_time` total_seconds, `recompute_ratio` ratio, swap offload. Algorithms: B `policy`, and with
offload `policy_with_offload`; C `offload_overhead`; D `overhead`; E `update_chosen`; F `update_candidates`;
G `DroppedStorages.peak_bytes` (the true simulator: temporaries of the recompute, longer live ranges,
optimizer and aliases count); H, where a value leaves and is prefetched, is `transfer_schedule`.

Where the paper is silent: ties go to the larger, then the earlier activation; totals of chosen activations
and every ratio are refreshed. Known weakness, kept: the ratio ignores where the peak is.

Departures of the offload branch from the paper: a candidate whose read cannot begin behind any op costs its
whole transfer, and no more. Compute that hides one read hides no other: each direction has one transfer at a
time, where C looks at each candidate alone. H looks at every op, not only outside of the peak interval.
Writes, which the paper takes to be hidden, are placed and stall as reads do. Ties go to the longer idle, then
the larger, then the earlier activation; where both branches cost the same, to offload.

With offload, the choices depend on the budget, through the peak interval. So, unlike with `auto`, a larger
budget can be slower.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from heapq import heapify, heappop, heappush

import numpy as np
from numpy.typing import NDArray

from lowtide.facts import Activation, TransferSpeed
from lowtide.planning.activations import NANOSECOND
from lowtide.planning.offload_sets import offload_sets, with_fetches
from lowtide.planning.planning_problem import PlanningProblem
from lowtide.planning.search.dropped_storages import DroppedStorages
from lowtide.planning.search.problem import Ints
from lowtide.planning.search.step_problem import StepProblem
from lowtide.planning.search.table import RematSet
from lowtide.planning.simulate import Timeline
from lowtide.planning.transfer_model import can_offload


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
    """The state of the greedy after one more choice: the newest activation and the true peak."""

    storage: int
    peak_bytes: int
    recompute_seconds: float


def overhead(candidate: Candidate) -> float:
    """Algorithm D: the seconds of all recomputes of a candidate."""
    return candidate.recompute_seconds * candidate.count


def refresh(candidate: Candidate) -> None:
    candidate.total_seconds = overhead(candidate)
    candidate.ratio = candidate.activation.nbytes / max(candidate.total_seconds, NANOSECOND)


def update_chosen(t: Candidate, chosen: Iterable[Candidate]) -> None:
    """Algorithm E: chosen candidates that read `t` now start from the sources of `t`."""
    for r in chosen:
        if t.name in r.sources:
            r.sources = (r.sources - {t.name}) | t.sources
            r.recompute_seconds += t.recompute_seconds
            t.count += 1
            refresh(r)
    refresh(t)


def update_candidates(t: Candidate, candidates: Iterable[Candidate], chosen: list[Candidate]) -> None:
    """Algorithm F: update the remaining candidates after the choice of `t`, which `chosen` contains."""
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


def policy(problem: PlanningProblem) -> list[Prefix]:
    """Algorithm B without offload, run to its end: one prefix per choice. A budget takes the first that fits.

    The choices do not depend on the budget, only where the loop stops does.
    """
    recomputable = [a for a in problem.activations if not a.fixed]
    # only sources that can be chosen matter; a long chain also has all its parameters as sources
    names = {a.name for a in recomputable}
    candidates = [
        Candidate(a.name, a, names.intersection(a.recompute_sources), a.recompute_seconds)
        for a in recomputable
    ]
    pool = Pool(candidates)
    runs = DroppedStorages(problem.table)
    prefixes = [Prefix(-1, runs.peak_bytes(), 0.0)]
    while (t := pool.choose()) is not None:
        runs.drop(t.activation.storage)
        prefixes.append(Prefix(t.activation.storage, runs.peak_bytes(), runs.added_seconds))
    return prefixes


class Pool:
    """The candidates, and the chosen ones: a choice updates only the candidates that it concerns."""

    def __init__(self, candidates: list[Candidate]) -> None:
        for candidate in candidates:
            refresh(candidate)
        self._all = {candidate.name: candidate for candidate in candidates}
        self._chosen: dict[str, Candidate] = {}
        self._readers: dict[str, dict[str, None]] = {}
        """by source, the names of the candidates that start from it, now or before"""
        # ties as in `pick`
        best_last = sorted(
            candidates, key=lambda c: (c.activation.nbytes, -c.activation.creation_rank, c.name)
        )
        self._turn = {candidate.name: -i for i, candidate in enumerate(best_last)}
        self._heap = [(-c.ratio, self._turn[c.name], c.name) for c in candidates]
        heapify(self._heap)
        self._note(candidates)

    def choose(self) -> Candidate | None:
        """The next choice of the greedy; None when all candidates are chosen."""
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


def mu_two(problem: PlanningProblem, budget_bytes: int) -> RematSet | Timeline:
    """The planner: the fewest choices that fit, or the choices with the lowest peak."""
    if can_offload(problem.step):
        order = policy_with_offload(problem, budget_bytes)
        return problem.placed(problem.search_problem.runs(order), budget_bytes)
    found = first_within(problem, budget_bytes)
    return lowest(problem) if found is None else found


def first_within(problem: PlanningProblem, budget_bytes: int) -> RematSet | None:
    """The remats of the fewest choices that fit; None where none fit."""
    for last, prefix in enumerate(problem.once(policy)):
        if prefix.peak_bytes <= budget_bytes:
            return _remats(problem, last)
    return None


def lowest(problem: PlanningProblem) -> RematSet:
    """The remats of the choices with the lowest peak."""
    prefixes = problem.once(policy)
    return _remats(problem, min(range(len(prefixes)), key=lambda last: prefixes[last].peak_bytes))


def _remats(problem: PlanningProblem, last: int) -> RematSet:
    dropped = {prefix.storage for prefix in problem.once(policy)[: last + 1]}
    return problem.retaining(problem.table.uses.keys() - dropped)


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


def offload_overhead(activation: Activation, speed: TransferSpeed, free: Prefetching) -> float:
    """Algorithm C: the seconds of the read that no op between the peak interval and the use hides."""
    hidden = sum(free.seconds[rank] for rank in free.hideable(activation))
    return max(0.0, speed.read_seconds(activation.nbytes) - hidden)


def longest_idle(candidates: list[Activation]) -> Activation:
    return max(candidates, key=lambda a: (a.inactive_seconds, a.nbytes, -a.creation_rank, a.name))


def policy_with_offload(problem: PlanningProblem, budget_bytes: int) -> Ints:
    """Algorithm B: the first sequence that fits, or the one with the lowest peak."""
    speed = problem.step.transfer_speed
    assert speed is not None
    table, steps = problem.table, problem.search_problem
    sets = problem.once(offload_sets)
    recomputable = [
        Candidate(a.name, a, set(a.recompute_sources), a.recompute_seconds)
        for a in problem.activations
        if not a.fixed
    ]
    for candidate in recomputable:
        refresh(candidate)
    order = best = steps.sequence(())
    idle = {s for value in sets.idle(order) for s in sets.storages(value)}
    offloadable = [a for a in problem.activations if a.storage in idle]
    free = Prefetching({node.rank: node.seconds for node in table.step.nodes[table.first_backward :]})
    chosen: list[Candidate] = []
    offloaded: set[int] = set()
    live = steps.problem.live_bytes(order)
    lowest_bytes = int(live.max(initial=0))
    while live.max(initial=0) > budget_bytes and (recomputable or offloadable):
        free.after = _end_of_peak(steps, order, live, budget_bytes)
        to_offload = longest_idle(offloadable) if offloadable else None
        to_recompute = pick(recomputable) if recomputable else None
        if to_offload is not None and (
            to_recompute is None or offload_overhead(to_offload, speed, free) <= overhead(to_recompute)
        ):
            free.use_up(to_offload, speed.read_seconds(to_offload.nbytes))
            offloaded.add(to_offload.storage)
            taken = to_offload.storage
        else:
            assert to_recompute is not None
            recomputable.remove(to_recompute)
            update_chosen(to_recompute, chosen)
            chosen.append(to_recompute)
            update_candidates(to_recompute, recomputable, chosen)
            taken = to_recompute.activation.storage
        offloadable = [a for a in offloadable if a.storage != taken]
        recomputable = [c for c in recomputable if c.activation.storage != taken]
        dropped = {c.activation.storage for c in chosen}
        order = steps.sequence(problem.retaining(table.uses.keys() - dropped))
        order = with_fetches(
            order, [v for v in sets.idle(order) if not offloaded.isdisjoint(sets.storages(v))]
        )
        live = steps.problem.live_bytes(order)
        if live.max(initial=0) < lowest_bytes:
            lowest_bytes, best = int(live.max(initial=0)), order
    return best


def _end_of_peak(steps: StepProblem, order: Ints, live: NDArray[np.int64], budget_bytes: int) -> int:
    """The last rank during which more bytes are live than the budget."""
    over = np.flatnonzero(live > budget_bytes)
    first = [int(op) for op in order[: over[-1] + 1] if op < steps.problem.num_first]
    return steps.ranks[first[-1]] if first else -1
