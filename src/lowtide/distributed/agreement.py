"""One plan for all ranks: made once, sent to the others, and checked by its hash."""

import hashlib
import json
import logging
from collections.abc import Callable, Sequence
from typing import Any

from lowtide.distributed.ranks import Ranks, together
from lowtide.errors import PlanMismatch
from lowtide.facts.serial import solution_from_dict, solution_to_dict
from lowtide.plans import Plan

logger = logging.getLogger("lowtide")

Identity = Sequence[tuple[str, str]]
BATCH = "batch"
"""The one part of an identity in which ranks may differ."""


def plan_together(ranks: Ranks, *, identity: Callable[[], Identity], make: Callable[[], Plan]) -> Plan:
    """The plan that `make` gives on the first rank, or on the first of those with the same batch layout.

    `identity` says what each rank plans for, its batch included; whatever else differs stops all of them.
    """
    _, told = together(ranks, identity, tell=list)
    identities = [dict(each) for each in told]
    _check_same(identities)
    layouts = [each[BATCH] for each in identities]
    maker = layouts.index(layouts[ranks.rank])
    made, plans = together(
        ranks,
        lambda: make() if maker == ranks.rank else None,
        tell=lambda plan: None if plan is None else solution_to_dict(plan.solution),
    )
    if maker != ranks.rank:
        made = Plan(solution_from_dict(plans[maker]))
    assert made is not None
    return made


def check_together(ranks: Ranks, plan: Plan, check: Callable[[], None]) -> None:
    """Stop all ranks where `check` fails on one of them, or where one has another plan for the same batch."""
    _, told = together(ranks, check, tell=lambda _: [digest(plan), dict(plan.solution.identity).get(BATCH)])
    first: dict[str, int] = {}
    for rank, (found, layout) in enumerate(told):
        other = first.setdefault(layout, rank)
        if told[other][0] != found:
            raise PlanMismatch(
                f"rank {rank} has another plan than rank {other} for the batch '{layout}' (hash {found} "
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
