"""Walk a plan below a target: evict what costs least per byte of excess, then merge what fits back."""

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
SMALLEST_PART = 1000
"""Blocks below this part of the excess are tried only when nothing larger helps."""


def score(eviction: Eviction) -> float:
    return (max(eviction.seconds, 0.0) + TINY_SECONDS) / eviction.gain


def descend(runs: Runs, target: int, *, max_moves: int) -> bool:
    """Evict until every slot fits into `target`; False when nothing helps any more.

    Scores of the heap go stale as the plan changes; a popped one is estimated anew before use.
    """
    view = View(runs, target)
    least_bytes = int(view.excess.max(initial=0)) // SMALLEST_PART
    heap = _candidates(runs, view, least_bytes=least_bytes)
    number = len(heap)
    moved = False
    while view.excess_bytes and max_moves:
        if not heap:
            if not moved and not least_bytes:
                return False
            least_bytes = least_bytes if moved else 0
            heap = _candidates(runs, view, least_bytes=least_bytes)
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


def _candidates(runs: Runs, view: View, *, least_bytes: int) -> list[tuple[float, int, Block]]:
    heap: list[tuple[float, int, Block]] = []
    for mine in runs.held.values():
        for block in mine.values():
            if block.nbytes >= least_bytes and mine is runs.held[block.start]:
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
    """Merge back every copy that fits, the dearest per byte first."""
    found = [(merge_seconds(runs, b) / (b.nbytes + 1), i, b) for i, b in enumerate(copies(runs))]
    found.sort(key=lambda item: (-item[0], item[1]))
    view = View(runs, target)
    for _, _, block in found:
        if is_live(runs, block) and may_merge(runs, view, block):
            mark = len(runs.journal)
            seconds = runs.recompute_seconds
            merge(runs, block)
            after = View(runs, target)
            if after.excess_bytes > view.excess_bytes or runs.recompute_seconds > seconds:
                runs.rollback(mark)
            else:
                view = after
