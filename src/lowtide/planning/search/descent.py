"""Walk a plan below a target: evict what costs least per byte of excess, then merge what fits back.

Take a schedule over to a step of the same ops with other sizes, and mend it where it does not fit.
"""

from collections.abc import Sequence
from heapq import heapify, heappop, heappush

from lowtide.facts import Run
from lowtide.planning.search.moves import (
    Eviction,
    RunsView,
    best_eviction,
    copies,
    evict,
    is_live,
    may_merge,
    merge,
    merge_seconds,
)
from lowtide.planning.search.runs import Block, Rerun, Runs
from lowtide.planning.search.table import Table

TINY_SECONDS = 1e-9
"""Free moves compare by what they gain."""
MAX_RUNS = 4
"""Recompute runs per forward node: beyond, a lower peak costs more than anybody would pay."""
SMALLEST_PART = 1000
"""Blocks below this part of the excess are tried only when nothing larger helps."""


Candidate = tuple[float, int, Block]
"""(score, number that breaks ties, block)"""


def score(eviction: Eviction) -> float:
    return (max(eviction.seconds, 0.0) + TINY_SECONDS) / eviction.gain


def descend(runs: Runs, target: int, *, max_moves: int) -> bool:
    """Evict until every slot fits into `target`; False when nothing helps any more."""
    view = RunsView(runs, target)
    least_bytes = int(view.excess.max(initial=0)) // SMALLEST_PART
    while view.excess_bytes:
        heap = _candidates(runs, view, least_bytes=least_bytes)
        before = view.excess_bytes
        max_moves -= _evict_cheapest(runs, target, heap, max_moves=max_moves)
        view = RunsView(runs, target)
        if view.excess_bytes == before:
            if not least_bytes:
                return False
            least_bytes = 0
        if max_moves <= 0 or runs.num_recomputes > MAX_RUNS * runs.table.first_backward:
            break
    return not view.excess_bytes


def _evict_cheapest(runs: Runs, target: int, heap: list[Candidate], *, max_moves: int) -> int:
    """Evict the candidates with the best scores until all fits; the number of moves tried.

    Scores go stale as the plan changes; a popped one is estimated anew before use.
    """
    view = RunsView(runs, target)
    number = len(heap)
    moves = 0
    max_runs = MAX_RUNS * runs.table.first_backward
    while view.excess_bytes and heap and moves < max_moves and runs.num_recomputes <= max_runs:
        old_score, _, block = heappop(heap)
        if not is_live(runs, block):
            continue
        eviction = best_eviction(runs, view, block)
        if eviction is None:
            continue
        new_score = score(eviction)
        if new_score > old_score * 1.0001 and heap and new_score > heap[0][0]:
            number += 1
            heappush(heap, (new_score, number, block))
            continue
        moves += 1
        mark = len(runs.journal)
        evict(runs, eviction)
        after = RunsView(runs, target)
        if after.excess_bytes >= view.excess_bytes:
            runs.rollback(mark)
            continue
        view = after
        number = _offer_new_blocks(runs, view, eviction, heap, number)
    return moves


def _candidates(runs: Runs, view: RunsView, *, least_bytes: int) -> list[Candidate]:
    heap: list[Candidate] = []
    for block in (*runs.forward_blocks, *copies(runs)):
        if block.nbytes >= least_bytes:
            eviction = best_eviction(runs, view, block)
            if eviction is not None:
                heap.append((score(eviction), len(heap), block))
    heapify(heap)
    return heap


def _offer_new_blocks(
    runs: Runs, view: RunsView, eviction: Eviction, heap: list[Candidate], number: int
) -> int:
    for remat in eviction.again:
        key = runs.table.key(eviction.slot, remat)
        for block in runs.held.get(key, {}).values():
            following = best_eviction(runs, view, block)
            if following is not None:
                number += 1
                heappush(heap, (score(following), number, block))
    return number


def trim(runs: Runs, target: int) -> None:
    """Merge back every copy that fits into `target`, the dearest per byte first."""
    _merge_what_fits(runs, target, dearest_copies(runs))


def dearest_copies(runs: Runs) -> list[Block]:
    found = [(merge_seconds(runs, b) / (b.nbytes + 1), i, b) for i, b in enumerate(copies(runs))]
    found.sort(key=lambda item: (-item[0], item[1]))
    return [block for _, _, block in found]


def _merge_what_fits(runs: Runs, target: int, blocks: list[Block]) -> None:
    view = RunsView(runs, target)
    for block in blocks:
        if not is_live(runs, block) or not may_merge(runs, view, block):
            continue
        mark = len(runs.journal)
        seconds = runs.added_seconds
        merge(runs, block)
        after = RunsView(runs, target)
        if after.excess_bytes > view.excess_bytes or runs.added_seconds > seconds:
            runs.rollback(mark)
        else:
            view = after


MAX_MOVES = 400
"""Evictions to mend a plan: where more are needed, another plan is the better start."""


def carried(table: Table, runs: Sequence[Run], *, budget_bytes: int) -> frozenset[Rerun] | None:
    """The plan that `runs` follow, changed so that it fits and recomputes nothing needlessly; None where
    that takes a search of its own."""
    state = Runs(table)
    state.go_to(plan_of_runs(table, runs))
    if state.peak_bytes() > budget_bytes and not descend(state, budget_bytes, max_moves=MAX_MOVES):
        return None
    trim(state, budget_bytes)
    return state.plan()


def plan_of_runs(table: Table, runs: Sequence[Run]) -> frozenset[Rerun]:
    """What `runs` bring back, each before the first run that comes next."""
    numbers = {(op.rank, op.rule): number for number, op in enumerate(table.remats)}
    plan: set[Rerun] = set()
    slot = table.size
    for run in reversed(runs):
        if run.is_first:
            slot = run.rank
        else:
            plan.add((slot, numbers[run.rank, run.rule]))
    return frozenset(plan)
