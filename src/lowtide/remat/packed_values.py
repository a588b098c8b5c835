"""Values packed into fewer bytes in forward and unpacked in backward, without loss."""

import operator
from math import prod
from typing import Any

import torch
from torch import Tensor, fx

from lowtide.facts import Action
from lowtide.ops.calls import Call
from lowtide.ops.packing import (
    SIGN_READERS,
    layout_of,
    narrow,
    pack_bits,
    pack_sign,
    unpack_bits,
    unpack_sign,
    widen,
)
from lowtide.ops.schema import is_backward, is_view_op, read_in_backward, readers, schema_name
from lowtide.remat.rule import Blocks, Kept, RematRule

aten = torch.ops.aten

SMALLEST_BYTES = 4096
"""Smaller values are not worth an op."""


class Packed(RematRule):
    """Base of the rules of this file: the forward pass keeps a packed storage in place of the value's own."""

    action = Action.RETAINED

    def blocks(self, node: fx.Node, *, makes: Blocks, holds: Blocks) -> tuple[Blocks, Blocks]:
        # unpacking makes a storage, even where the first run only takes the value out of a tuple
        return holds, holds


class Bits(Packed):
    """Truth values: masks of dropouts, conditions, results of comparisons."""

    name = "bits"
    words = "unpacked from one bit each"

    def why_not(self, node: fx.Node) -> str | None:
        value = _dense(node)
        is_mask = value is not None and value.dtype is torch.bool and not is_view_op(node.target)
        return "" if is_mask and read_in_backward(node) else None

    def kept(self, node: fx.Node) -> tuple[Kept, ...]:
        return (_kept("bits", Call(pack_bits, (node, layout_of(node.meta["val"]))), node),)

    def call(self, node: fx.Node, kept: tuple[Kept, ...]) -> Call:
        return Call(unpack_bits, (*kept, layout_of(node.meta["val"])))


class Sign(Packed):
    """A value of which backward reads only the sign, as for a ReLU.

    Unpacking gives 1 or 0, not the value. So the rule fits only a view without other readers.
    """

    name = "sign"
    words = "its sign, unpacked from one bit each"

    def why_not(self, node: fx.Node) -> str | None:
        value = _dense(node)
        if node.target is not aten.detach.default or is_backward(node) or value is None:
            return None
        return "" if _sign_readers(node) is not None else None

    def kept(self, node: fx.Node) -> tuple[Kept, ...]:
        found = _sign_readers(node)
        assert found is not None
        # at a NaN, only `threshold_backward` passes the gradient on
        nan_is_above = found == {aten.threshold_backward.default}
        call = Call(pack_sign, (node, layout_of(node.meta["val"])), {"nan_is_above": nan_is_above})
        return (_kept("sign", call, node),)

    def call(self, node: fx.Node, kept: tuple[Kept, ...]) -> Call:
        value = node.meta["val"]
        return Call(unpack_sign, (*kept, layout_of(value), value.dtype))


class Narrow(Packed):
    """Indices, in the narrowest dtype that represents every possible index."""

    name = "narrow"
    words = "widened from fewer bytes each"

    def why_not(self, node: fx.Node) -> str | None:
        value = _dense(node)
        if value is None or value.dtype not in (torch.int64, torch.int32) or not read_in_backward(node):
            return None
        dtype = _narrowest(node)
        return "" if dtype is not None and dtype.itemsize < value.dtype.itemsize else None

    def kept(self, node: fx.Node) -> tuple[Kept, ...]:
        dtype = _narrowest(node)
        assert dtype is not None
        value = node.meta["val"]
        with value.fake_mode:
            small = torch.empty_like(value, dtype=dtype)
        return (Kept("narrow", Call(narrow, (node, dtype)), small),)

    def call(self, node: fx.Node, kept: tuple[Kept, ...]) -> Call:
        return Call(widen, (*kept, node.meta["val"].dtype))


def _dense(node: fx.Node) -> Tensor | None:
    """The fake value of an op that fills its storage and is worth packing."""
    value = node.meta.get("val")
    if node.op != "call_function" or not isinstance(value, Tensor) or value.layout is not torch.strided:
        return None
    nbytes = value.untyped_storage().nbytes()
    return value if nbytes >= SMALLEST_BYTES and layout_of(value) is not None else None


def _kept(name: str, call: Call, node: fx.Node) -> Kept:
    value = node.meta["val"]
    with value.fake_mode:
        bits = torch.empty(-(-value.numel() // 8), dtype=torch.uint8, device=value.device)
    return Kept(name, call, bits)


def _sign_readers(node: fx.Node) -> set[Any] | None:
    """The one op by which readers use a value's sign, as a set; None for other readers, or several ops."""
    found = list(readers(node))
    targets = {reader.target for reader, _ in found}
    fits = all(
        reader.target in SIGN_READERS
        and is_backward(reader)
        and reader.args[1] is value
        and reader.args[0] is not value
        and (reader.target is aten.leaky_relu_backward.default or reader.args[2] == 0)
        for reader, value in found
    )
    return targets if fits and len(targets) == 1 else None


def _narrowest(node: fx.Node) -> torch.dtype | None:
    """The narrowest dtype that represents all of an op's indices; None for an unknown range."""
    bound = _index_bound(node)
    if bound is None:
        return None
    types = (torch.uint8, torch.int16, torch.int32)
    return next((dtype for dtype in types if bound - 1 <= torch.iinfo(dtype).max), None)


def _index_bound(node: fx.Node) -> int | None:
    """An upper bound, exclusive, of the indices in `node`, which are never negative; None if unknown."""
    tables = [user.all_input_nodes[0] for user in node.users if _looks_up(user, node)]
    if tables:  # an index outside of the table raises in forward
        return min(int(table.meta["val"].shape[0]) for table in tables)
    source: Any = node
    part: Any = 0
    if node.target is operator.getitem:
        source, part = node.args[0], node.args[1]
    name = schema_name(source.target).removeprefix("aten::")
    arguments = source.args
    tensors = [arg.meta["val"] for arg in arguments if isinstance(arg, fx.Node)]
    shape = tuple(map(int, tensors[0].shape)) if tensors and isinstance(tensors[0], Tensor) else ()
    if part == 1 and name in PLANES:
        return prod(shape[-PLANES[name] :])
    if part == 1 and name in ALONG and shape:
        place = ALONG[name]
        dim = source.kwargs.get("dim", arguments[place] if place < len(arguments) else -1)
        return shape[dim] if isinstance(dim, int) else None
    if name in ("argsort", "argmax", "argmin") and shape:
        return max(1, prod(shape))
    return None


def _looks_up(user: fx.Node, node: fx.Node) -> bool:
    return user.target is aten.embedding.default and user.args[1] is node and not is_backward(user)


PLANES = {
    "max_pool2d_with_indices": 2,
    "max_pool3d_with_indices": 3,
    "adaptive_max_pool2d": 2,
    "adaptive_max_pool3d": 3,
    "fractional_max_pool2d": 2,
    "fractional_max_pool3d": 3,
}
"""Ops whose second result indexes their input's last dimensions, and the number of these dimensions."""

ALONG = {
    "sort": 1,
    "topk": 2,
    "max": 1,
    "min": 1,
    "median": 1,
    "nanmedian": 1,
    "mode": 1,
    "kthvalue": 2,
    "cummax": 1,
    "cummin": 1,
}
"""Ops whose second result indexes one dimension, and the position of the argument `dim`."""
