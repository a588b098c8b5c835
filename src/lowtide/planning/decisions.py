"""One row per activation: what a plan does with it, what that costs, and why, in words."""

from collections.abc import Sequence
from math import fsum

import numpy as np
from numpy.typing import NDArray

from lowtide.facts import Action, Activation, Decision, Node, Recipe, Region, Step
from lowtide.facts.sizes import format_size
from lowtide.planning.search.table import Table
from lowtide.planning.simulate import Timeline


def decide(
    table: Table,
    found: tuple[Activation, ...],
    *,
    plain: Timeline,
    planned: Timeline,
    budget_bytes: int,
) -> tuple[Decision, ...]:
    """The decisions of the schedule `planned` about the activations `found`, against the plain one."""
    step = table.step
    dropped = _read_from_copies(step, planned.order)
    seconds = _seconds_by_storage(step, planned, dropped)
    times = [-1] * len(step.nodes)
    for rank in planned.order:
        times[rank] += 1
    over = np.flatnonzero(plain.bytes_held > budget_bytes)
    dearest = max(
        (a.recompute_seconds / a.nbytes for a in found if a.storage in dropped and a.nbytes), default=0.0
    )
    rows = []
    for a in found:
        holder = step.nodes[table.uses[a.storage].holder]
        again = a.storage in dropped
        cost = fsum(seconds.get(a.storage, ()))
        runs = times[holder.rank] if again else 0
        rows.append(
            Decision(
                name=a.name,
                module=a.module,
                action=Action.RECOMPUTE if again else Action.RETAINED,
                nbytes=a.nbytes,
                seconds=cost,
                times=runs,
                how=holder.recipe.how.value if again and holder.recipe is not None else "",
                creation_rank=a.creation_rank,
                last_forward_use=a.last_forward_use,
                first_backward_use=a.first_backward_use,
                last_backward_use=a.last_backward_use,
                recompute_seconds=a.recompute_seconds,
                reason=_why_recompute(a, cost, runs) if again else _why_retained(a, over, dearest),
            )
        )
    return tuple(rows)


def _read_from_copies(step: Step, order: Sequence[int]) -> set[int]:
    """Storages that some backward node reads from a recomputed value instead of the first one."""
    again: set[int] = set()
    seen: set[int] = set()
    dropped: set[int] = set()
    for rank in order:
        if rank in seen:
            again.add(rank)
            continue
        seen.add(rank)
        if step.nodes[rank].region is not Region.FORWARD:
            for read in step.nodes[rank].reads:
                if read in again:
                    dropped.update(step.nodes[read].holds)
    return dropped


def _seconds_by_storage(step: Step, planned: Timeline, dropped: set[int]) -> dict[int, list[float]]:
    """Every recompute run, charged to the dropped activation it makes or else to the first run it serves."""
    latest: dict[int, int] = {}
    first_reader: dict[int, int] = {}
    recipes: list[Recipe | None] = []
    for position, rank in enumerate(planned.order):
        recipe = step.nodes[rank].recipe if rank in latest else None
        source: Node | Recipe = recipe or step.nodes[rank]
        for read in source.reads:
            first_reader.setdefault(latest[read], position)
        latest[rank] = position
        recipes.append(recipe)
    owner: dict[int, int] = {}
    charged: dict[int, list[float]] = {}
    for position in reversed(range(len(recipes))):
        recipe = recipes[position]
        if recipe is not None:
            mine = next((s for s in recipe.holds if s in dropped), None)
            if mine is None:
                mine = owner.get(first_reader.get(position, -1))
            if mine is not None:
                owner[position] = mine
                charged.setdefault(mine, []).append(recipe.seconds)
    return charged


def _why_recompute(a: Activation, seconds: float, times: int) -> str:
    idle = f"frees {format_size(a.nbytes)} between ranks {a.last_forward_use} and {a.first_backward_use}"
    often = f", run {times} times" if times > 1 else ""
    return f"{idle} for {1e3 * seconds:.3g} ms{often}"


def _why_retained(a: Activation, over: NDArray[np.intp], dearest: float) -> str:
    if a.fixed:
        return f"cannot be recomputed: {a.fixed}"
    if not len(over):
        return "the budget is met without recomputing anything"
    following = int(np.searchsorted(over, a.last_forward_use, side="right"))
    if following == len(over) or over[following] >= a.first_backward_use:
        return "does not live across the peak"
    if a.nbytes and a.recompute_seconds / a.nbytes > dearest:
        cost, limit = (1e3 * 2**20 * each for each in (a.recompute_seconds / a.nbytes, dearest))
        return f"costs more per byte ({cost:.3g} ms/MiB) than what is recomputed (at most {limit:.3g})"
    return "the budget is met without it"
