"""The greedy of μ-TWO (Purandare, Wasay, Jain, Idreos, MLSys 2023).

Legend, paper to here: `recomp_srcs` sources, `recomp_time` recompute_seconds, `recomp_cnt` count,
`total_recomp_time` total_seconds, `recompute_ratio` ratio. Algorithms: B `policy`, D `overhead`,
E `update_chosen`, F `update_candidates`, G `Runs.peak_bytes` (the true simulator: temporaries of the
recompute, lengthened lives, optimizer and aliases count). C and H, and B with its swap branch, are in
`mu_two_swap.py`; here is what a step without a store needs.

Where the paper is silent: ties go to the larger, then the earlier activation; totals of those
already chosen and every ratio are refreshed. Known weakness, kept: the ratio does not look where
the peak is.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from heapq import heapify, heappop, heappush

from lowtide.facts import Activation
from lowtide.planning.activations import NANOSECOND
from lowtide.planning.search.lazy import LazyRuns, lazy_plan
from lowtide.planning.search.runs import Rerun
from lowtide.planning.search.table import Table


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
    runs = LazyRuns(table)
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


def plan_of(table: Table, prefixes: list[Prefix], last: int) -> frozenset[Rerun]:
    """The plan after the choices up to `prefixes[last]`."""
    dropped = {prefix.storage for prefix in prefixes[: last + 1]}
    return lazy_plan(table, table.uses.keys() - dropped)
