"""A value that is offloaded to a store and prefetched in backward."""

import operator

import torch
from torch import Tensor, fx

from lowtide.facts import Action
from lowtide.offload.offload_store import finish_offload, finish_prefetch, start_offload, start_prefetch
from lowtide.ops.calls import Call
from lowtide.ops.schema import read_in_backward
from lowtide.remat.rule import Blocks, Kept, RematRule
from lowtide.torch_compat.dispatch import iter_tensors, storage_key

SMALLEST_BYTES = 64 << 10
"""Smaller values are not worth a transfer."""


class OffloadedValue(RematRule):
    """The write begins when the value is made, the read where a plan says; both run beside the ops.

    The forward pass keeps a handle. The rule does not fit a value that the step changes in place, since the
    time of the copy is not fixed.
    """

    name = "swap"
    words = "written to a store and read back"
    action = Action.OFFLOAD
    wait = staticmethod(finish_prefetch)

    def why_not(self, node: fx.Node) -> str | None:
        value = node.meta.get("val")
        if node.op != "call_function" or not isinstance(value, Tensor):
            return None
        if value.layout is not torch.strided or value.untyped_storage().nbytes() < SMALLEST_BYTES:
            return None
        return "" if read_in_backward(node) and not _is_part(node) else None

    def kept(self, node: fx.Node) -> tuple[Kept, ...]:
        with node.meta["val"].fake_mode:
            handle = torch.empty(1, dtype=torch.int64, device="cpu")
        return (Kept("leave", Call(finish_offload, (node,)), handle, timed=False, begin=start_offload),)

    def call(self, node: fx.Node, kept: tuple[Kept, ...]) -> Call:
        return Call(start_prefetch, kept)

    def blocks(self, node: fx.Node, *, makes: Blocks, holds: Blocks) -> tuple[Blocks, Blocks]:
        # the prefetch makes a storage, even where the first run only takes the value out of a tuple
        return holds, holds


def _is_part(node: fx.Node) -> bool:
    """Whether an earlier op made the storage of a value, as for the results of a split."""
    maker = node.args[0] if node.target is operator.getitem else node
    assert isinstance(maker, fx.Node)
    sources = [source.meta.get("val") for source in maker.all_input_nodes]
    return storage_key(node.meta["val"]) in map(storage_key, iter_tensors(sources))
