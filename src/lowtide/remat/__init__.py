"""The rules by which a value can be rematerialized: one file each, and the registry.

- `rule`: what a rule answers
- `recompute`: the same op on the same inputs
- `replay`: a random op from its earlier generator state
- `batch_norm`: batch norm without counting its statistics twice
- `dropout_mask`: a dropout's result from its kept mask
- `chunked_values`: the end of a chain of pointwise ops, chunk by chunk; one rule for each chunk size
- `packed_values`: masks and signs as bits, indices in fewer bytes
- `offloaded`: prefetched from a store; only where the user names one
- `resting_weight`: a weight that rests on a store, read once more

To add a rule, write its file and put it into `REMAT_RULES`: no other file names a rule.
"""

from collections.abc import Collection

from torch import fx

from lowtide.facts import Action
from lowtide.ops.discrete import DECIDED_ONCE, is_decision
from lowtide.remat.batch_norm import RecomputeBatchNorm
from lowtide.remat.chunked_values import Chunks, LargeChunks, LargeLossChunks, WholeLoss
from lowtide.remat.dropout_mask import DropoutFromMask
from lowtide.remat.offloaded import OffloadedValue
from lowtide.remat.packed_values import Bits, Narrow, Sign
from lowtide.remat.recompute import Recompute
from lowtide.remat.replay import Replay
from lowtide.remat.resting_weight import RestingWeight
from lowtide.remat.rule import Kept, RematRule

__all__ = [
    "REMAT_RULES",
    "Kept",
    "RematRule",
    "chain_rules",
    "fitting_rules",
    "rule_named",
    "rules_for",
    "rules_of",
]

REMAT_RULES: tuple[RematRule, ...] = (
    RecomputeBatchNorm(),
    DropoutFromMask(),
    Replay(),
    Recompute(),
    Chunks(),
    LargeChunks(),
    LargeLossChunks(),
    WholeLoss(),
    Bits(),
    Sign(),
    Narrow(),
)
"""In order of preference: where several rules fit a node, a recompute of a later node uses the first."""

OFFLOAD = OffloadedValue()
RESTING_WEIGHT = RestingWeight()
"""Of ops that the plan puts into a graph."""


def rules_for(*, offload: bool) -> tuple[RematRule, ...]:
    """The rules that a step may use; `offload`: the step has a store."""
    return (*REMAT_RULES, OFFLOAD) if offload else REMAT_RULES


def rules_of(offload_what: Collection[str]) -> tuple[RematRule, ...]:
    """The rules of a step of which this may wait on a store (`OFFLOADABLE`)."""
    weights = (RESTING_WEIGHT,) if {"frozen", "parameters"}.intersection(offload_what) else ()
    return (*rules_for(offload="activations" in offload_what), *weights)


def fitting_rules(node: fx.Node, *, offload: bool = False) -> tuple[list[RematRule], str]:
    """The rules that fit a forward node, and the reason where none fits."""
    rules = rules_for(offload=offload)
    decides = is_decision(node)
    if decides:
        rules = tuple(rule for rule in rules if rule.action is not Action.RECOMPUTE)
    reasons = {rule: rule.why_not(node) for rule in rules}
    fit = [rule for rule, reason in reasons.items() if reason == ""]
    if decides and not fit:
        return [], DECIDED_ONCE
    return fit, "" if fit else next((reason for reason in reasons.values() if reason), "no rule fits it")


def chain_rules(node: fx.Node) -> list[RematRule]:
    """The rules that run a backward op together with the chain of ops before it."""
    return [rule for rule in REMAT_RULES if rule.replaces_chain(node)]


def rule_named(name: str) -> RematRule:
    """The rule that files call `name`."""
    rules = (*rules_for(offload=True), RESTING_WEIGHT)
    return next(rule for rule in rules if rule.name == name)
