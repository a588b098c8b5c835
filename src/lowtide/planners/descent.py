"""Walk a plan below a target: evict what costs least per byte of excess, then merge what fits back."""

from collections.abc import Iterator
from heapq import heapify, heappop, heappush

from lowtide.planners.moves import (
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
from lowtide.planners.runs import Block, Runs

TINY_SECONDS = 1e-9
"""Free moves compare by what they gain."""
MAX_RUNS = 4
"""Recompute runs per forward node: beyond, a lower peak costs more than anybody would pay."""
SMALLEST_PART = 1000
"""Blocks below this part of the excess are tried only when nothing larger helps."""


def score(eviction: Eviction) -> float:
    return (max(eviction.seconds, 0.0) + TINY_SECONDS) / eviction.gain


def descend(runs: Runs, target: int, *, max_moves: int, banned: int = -1) -> bool:
    """Evict until every slot fits into `target`; False when nothing helps any more.

    Storage `banned` is not evicted.

    Scores of the heap go stale as the plan changes; a popped one is estimated anew before use.
    """
    view = View(runs, target)
    least_bytes = int(view.excess.max(initial=0)) // SMALLEST_PART
    heap = _candidates(runs, view, least_bytes=least_bytes, banned=banned)
    number = len(heap)
    moved = False
    max_runs = MAX_RUNS * runs.table.first_backward
    while view.excess_bytes and max_moves and runs.num_recomputes <= max_runs:
        if not heap:
            if not moved and not least_bytes:
                return False
            least_bytes = least_bytes if moved else 0
            heap = _candidates(runs, view, least_bytes=least_bytes, banned=banned)
            number, moved = len(heap), False
            continue
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
        max_moves -= 1
        mark = len(runs.journal)
        evict(runs, eviction)
        after = View(runs, target)
        if after.excess_bytes >= view.excess_bytes:
            runs.rollback(mark)
            continue
        view, moved = after, True
        number = _offer_new_blocks(runs, view, eviction, heap, number)
    return not view.excess_bytes


def _candidates(runs: Runs, view: View, *, least_bytes: int, banned: int) -> list[tuple[float, int, Block]]:
    heap: list[tuple[float, int, Block]] = []
    for block in (*runs.forward_blocks, *copies(runs)):
        if block.nbytes >= least_bytes and block.storage != banned:
            eviction = best_eviction(runs, view, block)
            if eviction is not None:
                heap.append((score(eviction), len(heap), block))
    heapify(heap)
    return heap


def _offer_new_blocks(
    runs: Runs, view: View, eviction: Eviction, heap: list[tuple[float, int, Block]], number: int
) -> int:
    for rank in eviction.again:
        key = runs.table.key(eviction.slot, rank)
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
        seconds = runs.recompute_seconds
        merge(runs, block)
        after = View(runs, target)
        if after.excess_bytes > view.excess_bytes or runs.recompute_seconds > seconds:
            runs.rollback(mark)
            left.append(block)
        else:
            view = after
    return left


def refine(runs: Runs, target: int, *, tries: int, max_moves: int = 40) -> None:
    """Give one dear recompute up after another, and fit again without it if that is cheaper."""
    tried: set[tuple[int, int]] = set()
    for _ in range(tries):
        block = next((b for b in dearest_copies(runs) if (b.storage, b.start) not in tried), None)
        if block is None:
            return
        tried.add((block.storage, block.start))
        mark, seconds = len(runs.journal), runs.recompute_seconds
        merge(runs, block)
        fits = descend(runs, target, max_moves=max_moves, banned=block.storage)
        if fits:
            trim(runs, target)
        if not fits or runs.recompute_seconds >= seconds * (1 - 1e-9):
            runs.rollback(mark)
