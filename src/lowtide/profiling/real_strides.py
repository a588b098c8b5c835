"""The layouts that ops really give their results, where their fake runs say otherwise.

A fake `elu_backward` lays its result out like its last input, the real one like its first; the op
that reads it may then need a copy inside that its fake layout does not show. One run of an op tells.

Shortcomings: only the order of dimensions is corrected, and only of results without gaps; ops whose
tensors are all contiguous are taken at their word.
"""

import logging
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, fx

from lowtide.ops.calls import Call, call_of, signature
from lowtide.ops.schema import is_view, writes_inputs
from lowtide.profiling.cache import CostCache, Order
from lowtide.profiling.devices import device_for
from lowtide.profiling.samples import make_sample
from lowtide.profiling.work import fake_result, fake_tensor, shrink, work_of
from lowtide.torch_compat.dispatch import iter_tensors, map_leaves

_log = logging.getLogger(__name__)


def real_values(
    nodes: Iterable[fx.Node], *, device: torch.device, limit_bytes: int, cache: CostCache | None = None
) -> dict[fx.Node, Any]:
    """Fake values with real layouts, for those nodes alone whose own `val` has another layout.

    `nodes` come in the order they run. Runs every distinct op with a tensor that is not contiguous
    once, on its inputs and outputs if they take at most `limit_bytes`, else on a slice of them. The
    global random state is left as it was.
    """
    known: dict[str, list[Order]] = {}

    def orders_of(call: Call) -> list[Order]:
        key = signature(call)
        if key not in known:
            found = cache.orders(key) if cache is not None else None
            known[key] = _real_orders(call, limit_bytes=limit_bytes) if found is None else found
            if cache is not None:
                cache.put_orders(key, known[key])
        return known[key]

    values: dict[fx.Node, Any] = {}
    with ExitStack() as guards:
        guards.enter_context(torch.no_grad())
        guards.enter_context(device_for(device).kept_rng())
        guards.enter_context(torch.autocast(device.type, enabled=False))
        for node in nodes:
            if node.op != "call_function":
                continue
            try:
                value = _value(node, values, orders_of)
            except Exception as error:
                # What cannot be run alone keeps the layout that it was captured with.
                _log.debug("the layout of '%s' is taken from its fake run: %s", node.name, error)
                continue
            if value is not None:
                values[node] = value
    if cache is not None and known:
        cache.save()
    return values


def _value(
    node: fx.Node, values: Mapping[fx.Node, Any], orders_of: Callable[[Call], list[Order]]
) -> Any | None:
    """The node's value in its real layout, given those of its inputs; None where it is the captured one."""
    changed = any(read in values for read in node.all_input_nodes)
    call = call_of(node, values)
    if is_view(call):
        return call.target(*call.args, **call.kwargs) if changed else None
    if writes_inputs(call.target):
        return None
    value = fake_result(call) if changed else node.meta.get("val")
    tensors = list(iter_tensors(value))
    if not all(tensor.is_contiguous() for tensor in (*call.tensors, *tensors)):
        orders = orders_of(call)
        if len(orders) == len(tensors):
            real = [_laid_out(tensor, order) for tensor, order in zip(tensors, orders, strict=True)]
            changed = changed or any(one is not other for one, other in zip(real, tensors, strict=True))
            left = iter(real)
            value = map_leaves(lambda leaf: next(left) if isinstance(leaf, Tensor) else leaf, value)
    return value if changed else None


def _real_orders(call: Call, *, limit_bytes: int) -> list[Order]:
    """The order of dimensions of each result, from a real run; empty where no slice is small enough."""
    part = shrink(call, work_of(call), limit_bytes=limit_bytes)
    if part is None:
        return []
    args, kwargs = make_sample(part.call)
    return [_order(tensor) for tensor in iter_tensors(call.target(*args, **kwargs))]


def _order(tensor: Tensor) -> Order:
    """Dimensions from the outermost to the innermost, those of size 1 left out; None if not dense."""
    strides = tensor.stride()
    order = sorted((dim for dim, size in enumerate(tensor.shape) if size > 1), key=lambda dim: -strides[dim])
    expected = 1
    for dim in reversed(order):
        if strides[dim] != expected:
            return None
        expected *= tensor.shape[dim]
    return order


def _laid_out(tensor: Tensor, order: Order) -> Tensor:
    """A fake tensor like this one with its dimensions in that order in memory; itself if they are."""
    if order is None or order == _order(tensor):
        return tensor
    strides, step = [1] * tensor.dim(), 1
    for dim in reversed(order):
        strides[dim] = step
        step *= int(tensor.shape[dim])
    return fake_tensor(list(tensor.shape), strides, tensor)
