"""The strides of real results, where fake runs give others.

    elu_backward(gradient, ..., result)    fake run: strides of `result`    real run: strides of `gradient`

A reader of the real result may then need a copy in its workspace that fake strides do not show. One real run
of an op shows it.

Shortcomings: only the order of dimensions is corrected, and only of results without gaps; ops whose tensors
are all contiguous are not run.
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
    """Fake values with real strides, for the nodes whose own `val` has others.

    `nodes` are in the order of the graph. Every distinct op with a tensor that is not contiguous runs once,
    whole if its inputs and outputs take at most `limit_bytes`, else on a chunk. The global random state is
    left as it was.
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
                # An op that cannot run alone keeps the strides of its capture.
                _log.debug("the strides of '%s' are those of its fake run: %s", node.name, error)
                continue
            if value is not None:
                values[node] = value
    if cache is not None and known:
        cache.save()
    return values


def _value(
    node: fx.Node, values: Mapping[fx.Node, Any], orders_of: Callable[[Call], list[Order]]
) -> Any | None:
    """The node's value with real strides, from the strides of its inputs; None where nothing changes."""
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
            real = [_with_order(tensor, order) for tensor, order in zip(tensors, orders, strict=True)]
            changed = changed or any(one is not other for one, other in zip(real, tensors, strict=True))
            left = iter(real)
            value = map_leaves(lambda leaf: next(left) if isinstance(leaf, Tensor) else leaf, value)
    return value if changed else None


def _real_orders(call: Call, *, limit_bytes: int) -> list[Order]:
    """The order of dimensions of each result, from a real run; empty where no chunk is small enough."""
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


def _with_order(tensor: Tensor, order: Order) -> Tensor:
    """A fake tensor like this one with strides in that order; itself where it has them."""
    if order is None or order == _order(tensor):
        return tensor
    strides, step = [1] * tensor.dim(), 1
    for dim in reversed(order):
        strides[dim] = step
        step *= int(tensor.shape[dim])
    return fake_tensor(list(tensor.shape), strides, tensor)
