"""The methods of bringing a value back: one file each, and the registry.

- `method`: what a method answers
- `run_again`: the same op on the same inputs
- `replay`: a random op from its earlier generator state
- `batch_norm`: batch norm without counting its statistics twice
- `dropout_mask`: a dropout's result from its kept mask
- `slices`: the end of a chain of pointwise ops, a slice at a time; how large slices are
- `swap`: read back from a store; only where the user names one
- `packed`: masks and signs as bits, indices in fewer bytes

To add one, write its file and put it into `METHODS`: nothing else names a method.
"""

from torch import fx

from lowtide.methods.batch_norm import BatchNormAgain
from lowtide.methods.dropout_mask import DropoutFromMask
from lowtide.methods.method import Kept, Method
from lowtide.methods.packed import Bits, Narrow, Sign
from lowtide.methods.replay import Replay
from lowtide.methods.run_again import RunAgain
from lowtide.methods.slices import LargeRows, LargeSlices, Slices, WholeRows
from lowtide.methods.swap import Swap

__all__ = ["METHODS", "Kept", "Method", "fitting", "method_named", "methods_for", "standing_in"]

METHODS: tuple[Method, ...] = (
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

SWAP = Swap()


def methods_for(*, swap: bool) -> tuple[Method, ...]:
    """Those that may be used, with and without a store to swap to."""
    return (*METHODS, SWAP) if swap else METHODS


def fitting(node: fx.Node, *, swap: bool = False) -> tuple[list[Method], str]:
    """The methods that fit a forward node, and, where none does, why."""
    reasons = {method: method.why_not(node) for method in methods_for(swap=swap)}
    fit = [method for method, reason in reasons.items() if reason == ""]
    return fit, "" if fit else next((reason for reason in reasons.values() if reason), "no method fits it")


def standing_in(node: fx.Node) -> list[Method]:
    """The methods that can run a backward op in another way."""
    return [method for method in METHODS if method.stands_in(node)]


def method_named(name: str) -> Method:
    """The method that files call `name`."""
    return next(method for method in methods_for(swap=True) if method.name == name)
