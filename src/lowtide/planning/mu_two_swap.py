"""The whole policy of μ-TWO, with its swap branch: each choice swaps or recomputes, whichever costs less.

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

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from lowtide.facts import Activation, Link
from lowtide.planning.activations import activations
from lowtide.planning.anneal.problem import Ints
from lowtide.planning.anneal.steps import StepProblem
from lowtide.planning.mu_two import (
    Candidate,
    overhead,
    pick,
    refresh,
    update_candidates,
    update_chosen,
)
from lowtide.planning.search.lazy import lazy_plan
from lowtide.planning.swap_sets import Swaps, with_fetches


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


def swap_overhead(activation: Activation, link: Link, free: Prefetching) -> float:
    """Algorithm C: what of its read cannot hide behind ops between the peak interval and its use."""
    hidden = sum(free.seconds[rank] for rank in free.hideable(activation))
    return max(0.0, link.read_seconds(activation.nbytes) - hidden)


def longest_idle(candidates: list[Activation]) -> Activation:
    return max(candidates, key=lambda a: (a.inactive_seconds, a.nbytes, -a.creation_rank, a.name))


def policy_with_swap(steps: StepProblem, swaps: Swaps, link: Link, *, budget_bytes: int) -> Ints:
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
    held = steps.problem.held(order)
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
        held = steps.problem.held(order)
        if held.max(initial=0) < lowest:
            lowest, best = int(held.max(initial=0)), order
    return best


def _sequence(steps: StepProblem, swaps: Swaps, dropped: set[int], swapped: set[int]) -> Ints:
    order = steps.sequence(lazy_plan(steps.table, steps.table.uses.keys() - dropped))
    values = [v for v in swaps.idle(order) if not swapped.isdisjoint(swaps.storages(v))]
    return with_fetches(order, values)


def _end_of_peak(steps: StepProblem, order: Ints, held: NDArray[np.int64], budget_bytes: int) -> int:
    """The last rank during which more is held than the budget."""
    over = np.flatnonzero(held > budget_bytes)
    first = [int(op) for op in order[: over[-1] + 1] if op < steps.problem.num_first]
    return steps.ranks[first[-1]] if first else -1
