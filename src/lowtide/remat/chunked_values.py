"""The value at the end of a chain of pointwise ops, from the chain's inputs, chunk by chunk.

No value inside the chain is ever whole, and chunks stay in the processor's caches. The rules recompute
forward values, and run backward ops in place of the chain before them. Each chunk size is a rule with its own
cost: a plan takes the cheapest rule that fits.
"""

from typing import ClassVar

import torch
from torch import fx

from lowtide.ops.calls import Call
from lowtide.ops.loss_chunks import LARGE_CHUNK_BYTES, LOSS_GRADIENTS, rows_per_chunk
from lowtide.ops.pointwise_chunks import (
    CHUNK,
    FEWEST_CHUNKS,
    LARGE_CHUNK,
    backward_program,
    forward_program,
    in_chunks,
)
from lowtide.ops.schema import is_backward, read_in_backward
from lowtide.remat.rule import Kept, RematRule


class Chunks(RematRule):
    name = "slices"
    words = f"recomputed in chunks of {CHUNK >> 10} Ki elements a thread, with the pointwise ops before it"
    as_eager_only = True
    size: ClassVar[int] = CHUNK

    def why_not(self, node: fx.Node) -> str | None:
        value = node.meta.get("val")
        if not isinstance(value, torch.Tensor) or not read_in_backward(node):
            return None
        return "" if self._is_large(value) and forward_program(node) is not None else None

    def replaces_chain(self, node: fx.Node) -> bool:
        value = node.meta.get("val")
        return isinstance(value, torch.Tensor) and self._is_large(value) and bool(backward_program(node))

    def call(self, node: fx.Node, kept: tuple[Kept, ...]) -> Call:
        found = backward_program(node) if is_backward(node) else forward_program(node)
        assert found is not None
        program, inputs = found
        return Call(in_chunks, (program, inputs, node.meta["val"].dtype, self.size))

    def _is_large(self, value: torch.Tensor) -> bool:
        return value.numel() >= FEWEST_CHUNKS * self.size * torch.get_num_threads()


class LargeChunks(Chunks):
    name = "large_slices"
    words = (
        f"recomputed in chunks of {LARGE_CHUNK >> 10} Ki elements a thread, with the pointwise ops before it"
    )
    size = LARGE_CHUNK


class LargeLossChunks(RematRule):
    """The gradient of a cross entropy in larger chunks than by default."""

    name = "large_rows"
    words = f"in chunks of rows of {LARGE_CHUNK_BYTES >> 20} MiB"
    as_eager_only = True
    chunk_bytes: ClassVar[int] = LARGE_CHUNK_BYTES

    def why_not(self, node: fx.Node) -> str | None:
        return None

    def replaces_chain(self, node: fx.Node) -> bool:
        if node.target not in LOSS_GRADIENTS:
            return False
        value = node.meta["val"]
        is_large = value.nbytes >= FEWEST_CHUNKS * LARGE_CHUNK_BYTES
        return bool(is_large and rows_per_chunk(value, self.chunk_bytes) > rows_per_chunk(value))

    def call(self, node: fx.Node, kept: tuple[Kept, ...]) -> Call:
        assert callable(node.target)
        return Call(node.target, node.args, {**node.kwargs, "chunk_bytes": self.chunk_bytes})


class WholeLoss(LargeLossChunks):
    """The gradient of a cross entropy at once, as in eager."""

    name = "whole_rows"
    words = "at once, not in chunks"
    chunk_bytes = 0
