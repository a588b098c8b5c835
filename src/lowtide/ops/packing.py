"""Pack tensors into fewer bytes and unpack them: truth values and signs as bits, indices in a narrower dtype.

Packing works in chunks that fit into the caches, in memory order. Unpacking restores the captured layout.
"""

import functools
from collections.abc import Iterator

import torch
from torch import Tensor, fx

from lowtide.ops.calls import span_elements
from lowtide.ops.chunk_sizes import chunk_bytes
from lowtide.torch_compat.dispatch import FakeTensor, real_tensors

aten = torch.ops.aten

WORD = 8
"""Truth values per byte."""
CHUNK_WORDS = 1 << 15
"""Bytes of the packed tensor per chunk on the CPU."""

# Multiply eight bytes of 0 or 1, read as one number, by this: the highest byte has the eight bits.
_GATHER = 0x0102040810204080

Layout = tuple[tuple[int, ...], tuple[int, ...]]
"""Sizes and strides."""

SIGN_READERS = (aten.threshold_backward.default, aten.leaky_relu_backward.default)
"""Ops that read only the sign of their second argument: whether it is above zero."""


def pack_bits(mask: Tensor, layout: Layout) -> Tensor:
    """The truth values of `mask`, eight to a byte, in the memory order of `layout`."""
    if isinstance(mask, FakeTensor):
        return mask.new_empty(-(-mask.numel() // WORD), dtype=torch.uint8)
    flat = mask.permute(_memory_order(layout)).reshape(-1).view(torch.uint8)
    if flat.storage_offset() % WORD:
        flat = flat.clone()
    packed = torch.empty(-(-flat.numel() // WORD), dtype=torch.uint8, device=mask.device)
    whole = flat.numel() // WORD
    words = flat[: whole * WORD].view(torch.int64)
    for some, out in _in_chunks(words, packed[:whole]):
        out.copy_(some.mul(_GATHER).bitwise_right_shift_(56))
    if whole < len(packed):
        last = torch.zeros(WORD, dtype=torch.uint8, device=mask.device)
        last[: flat.numel() % WORD] = flat[whole * WORD :]
        packed[whole:] = last.view(torch.int64).mul_(_GATHER).bitwise_right_shift_(56)
    return packed


def unpack_bits(packed: Tensor, layout: Layout) -> Tensor:
    """The mask that `pack_bits` packed."""
    mask = torch.empty_strided(*layout, dtype=torch.bool, device=packed.device)
    if isinstance(packed, FakeTensor):
        return mask
    table = _bytes_of_bits(packed.device)
    flat = mask.permute(_memory_order(layout)).view(-1).view(torch.uint8)
    whole = flat.numel() // WORD
    words = flat[: whole * WORD].view(torch.int64)
    for some, out in _in_chunks(packed[:whole], words):
        torch.index_select(table, 0, some.to(torch.int32), out=out)
    if whole < len(packed):
        last = table[packed[whole:].long()].view(torch.uint8)
        flat[whole * WORD :] = last[: flat.numel() % WORD]
    return mask


def pack_sign(value: Tensor, layout: Layout, *, nan_is_above: bool) -> Tensor:
    """Where `value` is above zero, in bits."""
    above = value.le(0).logical_not_() if nan_is_above else value.gt(0)
    return pack_bits(above, layout)


def unpack_sign(packed: Tensor, layout: Layout, dtype: torch.dtype) -> Tensor:
    """1 where the packed value was above zero, else 0, in the captured dtype and layout."""
    return unpack_bits(packed, layout).to(dtype)


def narrow(value: Tensor, dtype: torch.dtype) -> Tensor:
    """`value` in a narrower dtype that represents its range."""
    return value.to(dtype)


def widen(value: Tensor, dtype: torch.dtype) -> Tensor:
    """The inverse of `narrow`."""
    return value.to(dtype)


def fills_storage(value: Tensor) -> bool:
    """Whether a tensor fills its own storage densely, in whatever order of its dimensions."""
    return (
        value.numel() > 0
        and value.numel() * value.itemsize == value.untyped_storage().nbytes()
        and (value.is_contiguous() or span_elements(value) == value.numel())
    )


def layout_of(value: Tensor) -> Layout | None:
    """Sizes and strides of a tensor that fills its own storage densely; None for any other."""
    if not fills_storage(value):
        return None
    return tuple(map(int, value.shape)), tuple(map(int, value.stride()))


def separate_signs(graph: fx.Graph) -> None:
    """A pass: let ops that read only a sign read it from a view without other readers. Preserves results."""
    for target in SIGN_READERS:
        for node in graph.find_nodes(op="call_function", target=target):
            value = node.args[1]
            if not isinstance(value, fx.Node) or value.op != "call_function" or _is_named(value):
                continue
            with graph.inserting_after(value):
                sign = graph.call_function(aten.detach.default, (value,))
            sign.meta = {**value.meta, "val": value.meta["val"].detach()}
            node.update_arg(1, sign)


def _is_named(value: fx.Node) -> bool:
    return value.target is aten.detach.default


def _memory_order(layout: Layout) -> list[int]:
    """Dimensions from the slowest in memory to the fastest; sizes of 1 do not matter."""
    sizes, strides = layout
    return sorted(range(len(sizes)), key=lambda dim: (sizes[dim] > 1, -strides[dim], dim))


def _in_chunks(*tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    first = tensors[0]
    size = chunk_bytes(len(first) * WORD, CHUNK_WORDS * WORD, first.device) // WORD
    return zip(*(torch.split(tensor, size) for tensor in tensors), strict=True)


@functools.cache
def _bytes_of_bits(device: torch.device) -> Tensor:
    """For every byte, its eight truth values as one number."""
    with real_tensors():
        bits = torch.arange(256).view(-1, 1).bitwise_right_shift(torch.arange(WORD)).bitwise_and_(1)
        return bits.to(torch.uint8).view(torch.int64).view(-1).to(device)
