"""The methods of bringing a value back: one file each, and the registry.

- `method`: what a method answers
- `run_again`: the same op on the same inputs
- `replay`: a random op from its earlier generator state
- `batch_norm`: batch norm without counting its statistics twice
- `dropout_mask`: a dropout's result from its kept mask
- `slices`: the end of a chain of pointwise ops, a slice at a time; how large slices are
- `swap`: read back from a store; only where the user names one
- `packed`: masks and signs as bits, indices in fewer bytes

To add one, write its file and put it into `REMAT_RULES`: nothing else names a method.
"""

from torch import fx

from lowtide.remat.batch_norm import BatchNormAgain
from lowtide.remat.chunked_values import LargeRows, LargeSlices, Slices, WholeRows
from lowtide.remat.dropout_mask import DropoutFromMask
from lowtide.remat.offloaded import OffloadedValue
from lowtide.remat.packed_values import Bits, Narrow, Sign
from lowtide.remat.recompute import RunAgain
from lowtide.remat.replay import Replay
from lowtide.remat.rule import Kept, RematRule

__all__ = ["REMAT_RULES", "Kept", "RematRule", "fitting", "method_named", "methods_for", "standing_in"]

REMAT_RULES: tuple[RematRule, ...] = (
    BatchNormAgain(),
    DropoutFromMask(),
    Replay(),
    RunAgain(),
    Slices(),
    LargeSlices(),
    LargeRows(),
    WholeRows(),
    Bits(),
    Sign(),
    Narrow(),
)
"""Where several fit a node, the first is the one that a recompute passes through."""

OFFLOAD = OffloadedValue()


def rules_for(*, offload: bool) -> tuple[RematRule, ...]:
    """Those that may be used, with and without a store to offload to."""
    return (*REMAT_RULES, OFFLOAD) if offload else REMAT_RULES


def fitting(node: fx.Node, *, offload: bool = False) -> tuple[list[RematRule], str]:
    """The methods that fit a forward node, and, where none does, why."""
    reasons = {method: method.why_not(node) for method in rules_for(offload=offload)}
    fit = [method for method, reason in reasons.items() if reason == ""]
    return fit, "" if fit else next((reason for reason in reasons.values() if reason), "no method fits it")


def standing_in(node: fx.Node) -> list[RematRule]:
    """The methods that can run a backward op in another way."""
    return [method for method in REMAT_RULES if method.stands_in(node)]


def rule_named(name: str) -> RematRule:
    """The method that files call `name`."""
    return next(method for method in rules_for(offload=True) if method.name == name)
