"""One plan for all ranks: made once, sent to the others, and checked by its hash."""

import hashlib
import json
from collections.abc import Callable, Sequence
from typing import Any

from lowtide.analyze.captured_step import Captured
from lowtide.errors import PlanMismatch
from lowtide.facts.serial import solution_from_dict, solution_to_dict
from lowtide.parallel.ranks import Ranks, together
from lowtide.plans import Plan
from lowtide.trace.model_call import Loop

Identity = Sequence[tuple[str, str]]
BATCH = "batch"
"""The one part of an identity in which ranks may differ."""


def plan_together(
    ranks: Ranks,
    *,
    capture: Callable[[], Captured],
    settings: Identity,
    make: Callable[[Captured], Plan],
    loop: Loop,
) -> Plan:
    """The plan that `make` gives on the first rank, or on the first of those with the same graphs.

    All ranks capture, since a model may talk to the others while it is captured. Whatever differs between
    them stops all, their batches apart: `settings` are what the user asked for.
    """
    captured, told = together(
        ranks, capture, tell=lambda c: [[*c.step.identity, *settings], c.step.fingerprint]
    )
    _check_same([dict(identity) for identity, _ in told])
    graphs = [fingerprint for _, fingerprint in told]
    maker = graphs.index(graphs[ranks.rank])
    made, plans = together(
        ranks,
        lambda: make(captured) if maker == ranks.rank else None,
        tell=lambda plan: None if plan is None else solution_to_dict(plan.solution),
    )
    if maker != ranks.rank:
        made = Plan(solution_from_dict(plans[maker]), loop=loop, traced=captured.traced)
    assert made is not None
    return made


def check_together(ranks: Ranks, plan: Plan, check: Callable[[], None]) -> None:
    """Stop all ranks where `check` fails on one of them, or where one has another plan for its graphs.

    Those that hold parts of a model may each have made one from a profile of their own.
    """
    own = ranks.divided and plan.step is not None
    _, told = together(ranks, check, tell=lambda _: ["" if own else digest(plan), plan.solution.fingerprint])
    first: dict[str, int] = {}
    for rank, (found, graphs) in enumerate(told):
        if not found:
            continue
        other = first.setdefault(graphs, rank)
        if told[other][0] != found:
            raise PlanMismatch(
                f"rank {rank} has another plan than rank {other} for the same step (hash {found} "
                f"instead of {told[other][0]}): load the same file on every rank, or let "
                "lowtide.checkpoint(), called on all of them, make one plan and send it"
            )


def digest(plan: Plan) -> str:
    """A short hash of all that a plan says."""
    data = json.dumps(solution_to_dict(plan.solution), sort_keys=True)
    return hashlib.sha256(data.encode()).hexdigest()[:16]


def _check_same(identities: Sequence[dict[str, Any]]) -> None:
    for rank, identity in enumerate(identities):
        for what, value in identities[0].items():
            if what != BATCH and identity.get(what) != value:
                raise PlanMismatch(
                    f"rank {rank} has the {what} '{identity.get(what)}', and rank 0 '{value}': all ranks "
                    "train one model. Give them the same, or a process_group of those that do"
                )
