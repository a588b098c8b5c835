"""Walk a plan below a target: evict what costs least per byte of excess, then merge what fits back."""

from collections.abc import Iterator
from heapq import heapify, heappop, heappush

from lowtide.planning.search.moves import (
    Eviction,
    View,
    best_eviction,
    copies,
    evict,
    is_live,
    may_merge,
    merge,
    merge_seconds,
)
from lowtide.planning.search.runs import Block, Runs

TINY_SECONDS = 1e-9
"""Free moves compare by what they gain."""
MAX_RUNS = 4
"""Recompute runs per forward node: beyond, a lower peak costs more than anybody would pay."""
REFINE_CHANGES = 2500
"""Runs put in or taken out in one refinement: near the floor a single try can be long."""
REFINE_MOVES = 12
"""Evictions that may take the place of one."""
SMALLEST_PART = 1000
"""Blocks below this part of the excess are tried only when nothing larger helps."""


Candidate = tuple[float, int, Block]
"""(score, number that breaks ties, block)"""


def score(eviction: Eviction) -> float:
    return (max(eviction.seconds, 0.0) + TINY_SECONDS) / eviction.gain


def descend(runs: Runs, target: int, *, max_moves: int) -> bool:
    """Evict until every slot fits into `target`; False when nothing helps any more."""
    view = View(runs, target)
    least_bytes = int(view.excess.max(initial=0)) // SMALLEST_PART
    while view.excess_bytes:
        heap = _candidates(runs, view, least_bytes=least_bytes)
        before = view.excess_bytes
        max_moves -= _evict_cheapest(runs, target, heap, max_moves=max_moves)
        view = View(runs, target)
        if view.excess_bytes == before:
            if not least_bytes:
                return False
            least_bytes = 0
        if max_moves <= 0 or runs.num_recomputes > MAX_RUNS * runs.table.first_backward:
            break
    return not view.excess_bytes


def _evict_cheapest(
    runs: Runs, target: int, heap: list[Candidate], *, max_moves: int, banned: int = -1
) -> int:
    """Evict the candidates with the best scores until all fits; the number of moves tried.

    Scores go stale as the plan changes; a popped one is estimated anew before use. Storage `banned`
    is left alone.
    """
    view = View(runs, target)
    number = len(heap)
    moves = 0
    max_runs = MAX_RUNS * runs.table.first_backward
    while view.excess_bytes and heap and moves < max_moves and runs.num_recomputes <= max_runs:
        old_score, _, block = heappop(heap)
        if block.storage == banned or not is_live(runs, block):
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
        after = View(runs, target)
        if after.excess_bytes >= view.excess_bytes:
            runs.rollback(mark)
            continue
        view = after
        number = _offer_new_blocks(runs, view, eviction, heap, number)
    return moves


def _candidates(runs: Runs, view: View, *, least_bytes: int) -> list[Candidate]:
    heap: list[Candidate] = []
    for block in (*runs.forward_blocks, *copies(runs)):
        if block.nbytes >= least_bytes:
            eviction = best_eviction(runs, view, block)
            if eviction is not None:
                heap.append((score(eviction), len(heap), block))
    heapify(heap)
    return heap


def _offer_new_blocks(runs: Runs, view: View, eviction: Eviction, heap: list[Candidate], number: int) -> int:
    for recipe in eviction.again:
        key = runs.table.key(eviction.slot, recipe)
        for block in runs.held.get(key, {}).values():
            following = best_eviction(runs, view, block)
            if following is not None:
                number += 1
                heappush(heap, (score(following), number, block))
    return number


def trim(runs: Runs, target: int) -> None:
    """Merge back every copy that fits into `target`, the dearest per byte first."""
    _merge_what_fits(runs, target, dearest_copies(runs))


def climb(runs: Runs, targets: list[int]) -> Iterator[int]:
    """`trim` to rising targets, yielding after each."""
    left = dearest_copies(runs)
    for target in targets:
        left = _merge_what_fits(runs, target, left)
        yield target


def dearest_copies(runs: Runs) -> list[Block]:
    found = [(merge_seconds(runs, b) / (b.nbytes + 1), i, b) for i, b in enumerate(copies(runs))]
    found.sort(key=lambda item: (-item[0], item[1]))
    return [block for _, _, block in found]


def _merge_what_fits(runs: Runs, target: int, blocks: list[Block]) -> list[Block]:
    """Those of `blocks` that did not fit."""
    view = View(runs, target)
    left: list[Block] = []
    for block in blocks:
        if not is_live(runs, block):
            continue
        if not may_merge(runs, view, block):
            left.append(block)
            continue
        mark = len(runs.journal)
        seconds = runs.added_seconds
        merge(runs, block)
        after = View(runs, target)
        if after.excess_bytes > view.excess_bytes or runs.added_seconds > seconds:
            runs.rollback(mark)
            left.append(block)
        else:
            view = after
    return left


def refine(runs: Runs, target: int, *, tries: int) -> bool:
    """Give one dear recompute up after another, and fit again without it if that is cheaper.

    True when that won anything.
    """
    if not runs.num_recomputes:
        return False
    start_seconds = runs.added_seconds
    lower = View(runs, target - target // 50)
    heap = _candidates(runs, lower, least_bytes=int(lower.excess.max(initial=0)) // SMALLEST_PART)
    tried: set[tuple[int, int]] = set()
    waiting = dearest_copies(runs)
    until = runs.num_changes + REFINE_CHANGES
    while waiting and len(tried) < tries and runs.num_changes < until:
        block = waiting.pop(0)
        if (block.storage, block.start) in tried or not is_live(runs, block):
            continue
        tried.add((block.storage, block.start))
        mark, seconds = len(runs.journal), runs.added_seconds
        merge(runs, block)
        _evict_cheapest(runs, target, heap[:], max_moves=REFINE_MOVES, banned=block.storage)
        if runs.peak_bytes() <= target and runs.added_seconds < seconds * (1 - 1e-9):
            trim(runs, target)
            waiting = dearest_copies(runs)
        else:
            runs.rollback(mark)
    return runs.added_seconds < start_seconds * (1 - 1e-9)
