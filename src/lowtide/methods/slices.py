"""A value at the end of a chain of pointwise ops, made from the chain's inputs a slice at a time.

What the chain makes on its way is never whole, and stays in the processor's caches.
"""

import torch
from torch import fx

from lowtide.methods.method import Kept, Method
from lowtide.torchside.calls import Call
from lowtide.torchside.ops.chains import LEAST_SLICES, SLICE, in_slices, program_of
from lowtide.torchside.ops.readers import read_in_backward


class Slices(Method):
    name = "slices"
    words = "run again in slices, with the pointwise ops before it"
    as_eager_only = True

    def why_not(self, node: fx.Node) -> str | None:
        value = node.meta.get("val")
        if not isinstance(value, torch.Tensor) or not read_in_backward(node):
            return None
        is_large = value.numel() >= LEAST_SLICES * SLICE * torch.get_num_threads()
        return "" if is_large and program_of(node) is not None else None

    def call(self, node: fx.Node, kept: tuple[Kept, ...]) -> Call:
        found = program_of(node)
        assert found is not None
        program, inputs = found
        return Call(in_slices, (program, inputs, node.meta["val"].dtype))
