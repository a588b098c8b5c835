"""Ops that torch traces wrongly, or not at all, on fake tensors.

- by number: the gradients of `pow` and `lerp` compute with their number in C, and dropout takes its
  probability as a C `float`. Here that number may be an input of the graph (see `torch_compat`).
- by value: the gradient of a product without zeros is the product divided by each factor. The gradient of a
  value that fills a mask is the sum of the gradients under the mask. On fake tensors torch cannot read
  values, and takes formulas that round differently. Here the backward op recomputes eager's own op under
  autograd.
- by value, whole: the gradient of a cumulative product, and the mean of a smoothed cross entropy by the
  weights of all targets that are not ignored (`composite_rules`)
- norms under autocast, whose fake statistics have the wrong dtype (`use_real_dtypes`)

Shortcoming: there is no rule by value for `masked_fill_`, which works in place.
"""

import contextlib
import operator
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from lowtide.ops.random_ops import COMPOSED, dropout_by_number, dropout_by_number_backward
from lowtide.torch_compat import dispatch
from lowtide.torch_compat.dispatch import is_number, storage_key

aten = torch.ops.aten


class _Dropout(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor, probability: Any) -> Tensor:
        with dispatch.below_autograd():
            result, mask = dropout_by_number(value, probability)
        ctx.save_for_backward(mask)
        ctx.probability = probability
        return result  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return dropout_by_number_backward(grad, *ctx.saved_tensors, ctx.probability), None


class _Power(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor, exponent: Any) -> Tensor:
        ctx.save_for_backward(value)
        ctx.exponent = exponent
        with dispatch.below_autograd():
            return aten.pow.Tensor_Scalar(value, exponent)  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        (value,), exponent = ctx.saved_tensors, torch.sym_float(ctx.exponent)  # type: ignore[no-untyped-call]
        if exponent == 0:
            return torch.zeros_like(value, memory_format=torch.contiguous_format), None
        return grad * aten.mul.Scalar(aten.pow.Tensor_Scalar(value, exponent - 1), exponent), None


class _Lerp(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, start: Tensor, end: Tensor, weight: Any) -> Tensor:
        ctx.weight = weight
        with dispatch.below_autograd():
            return aten.lerp.Scalar(start, end, weight)  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        weight = torch.sym_float(ctx.weight)  # type: ignore[no-untyped-call]
        return aten.mul.Scalar(grad, 1 - weight), aten.mul.Scalar(grad, weight), None


def _traced_by_number(function: type[torch.autograd.Function], op: Any) -> Callable[..., Any]:
    def trace(*args: Any, **named: Any) -> Any:
        every = (*args, *named.values())
        if is_number(every[-1]) and every[0].is_floating_point():
            return function.apply(*every)  # type: ignore[no-untyped-call]
        return dispatch.with_autograd(op)(*args, **named)

    return lambda _torchs: trace


def number_rules() -> dict[dispatch.OpOverload[..., Any], Callable[[Callable[..., Any]], Callable[..., Any]]]:
    """For each of eager's ops: a function from torch's tracing rule to ours."""
    ops = {aten.pow.Tensor_Scalar: _Power, aten.lerp.Scalar: _Lerp}
    return {op: _traced_by_number(function, op) for op, function in ops.items()}


@contextlib.contextmanager
def dropouts_by_number() -> Iterator[None]:
    """Trace dropouts that eager composes and whose probability is an input of the graph, in place of torch's
    dropout in C. Elsewhere a probability is a constant of its graph: each value has a graph of its own."""
    plain = torch.dropout

    def dropout(value: Tensor, probability: Any, train: bool) -> Tensor:
        if is_number(probability) and train and value.device.type in COMPOSED and probability != 0:
            return _Dropout.apply(value, probability)  # type: ignore[no-untyped-call, no-any-return]
        return plain(value, probability, train)

    with dispatch.dropout_called_by(dropout):
        yield


OPS = {
    "product": aten.prod.default,
    "product_of_dim": aten.prod.dim_int,
    "masked_fill": aten.masked_fill.Tensor,
}


@torch.library.custom_op("lowtide::gradients_by_value", mutates_args=())
def gradients_by_value(  # noqa: PLR0917 - an op has no keywords
    name: str,
    grad: Tensor,
    tensors: list[Tensor],
    wanted: list[bool],
    numbers: list[int],
    dtype: torch.dtype | None,
) -> list[Tensor]:
    """The `wanted` gradients of the `tensors` of one of `OPS`; `numbers` and `dtype` are its other
    arguments."""
    with dispatch.recording():
        inputs = [t.detach().requires_grad_(needed) for t, needed in zip(tensors, wanted, strict=True)]
        result = _run(name, inputs, numbers, dtype)
        leaves = [leaf for leaf, needed in zip(inputs, wanted, strict=True) if needed]
    found = torch.autograd.grad(result, leaves, grad)
    return [one.clone() if storage_key(one) == storage_key(grad) else one for one in found]


@gradients_by_value.register_fake
def _fake_gradients(
    _name: str, _grad: Tensor, tensors: list[Tensor], wanted: list[bool], *_: Any
) -> list[Tensor]:
    return [torch.empty_like(tensor) for tensor, needed in zip(tensors, wanted, strict=True) if needed]


class _ByValue(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, name: str, numbers: list[int], dtype: torch.dtype | None, *tensors: Tensor
    ) -> Tensor:
        ctx.save_for_backward(*tensors)
        ctx.name, ctx.rest = name, (numbers, dtype)
        with dispatch.below_autograd():
            return _run(name, tensors, numbers, dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        tensors, wanted = list(ctx.saved_tensors), list(ctx.needs_input_grad[3:])
        found = iter(gradients_by_value(ctx.name, grad, tensors, wanted, *ctx.rest))
        return (None, None, None, *(next(found) if needed else None for needed in wanted))


def _run(name: str, tensors: Sequence[Tensor], numbers: Sequence[int], dtype: torch.dtype | None) -> Tensor:
    options = {} if dtype is None else {"dtype": dtype}
    result: Tensor = OPS[name](*tensors, *numbers, **options)
    return result


def _traced_by_value(name: str) -> Callable[..., Any]:
    def trace(*args: Any, dtype: torch.dtype | None = None, **named: Any) -> Any:
        every = (*args, *named.values())
        tensors = [arg for arg in every if isinstance(arg, Tensor)]
        numbers = [int(arg) for arg in every if not isinstance(arg, Tensor)]
        return _ByValue.apply(name, numbers, dtype, *tensors)  # type: ignore[no-untyped-call]

    return lambda _torchs: trace


def value_rules() -> dict[dispatch.OpOverload[..., Any], Callable[[Callable[..., Any]], Callable[..., Any]]]:
    """For each of eager's ops: a function from torch's tracing rule to ours."""
    return {op: _traced_by_value(name) for name, op in OPS.items()}


@torch.library.custom_op("lowtide::cumprod_gradient", mutates_args=())
def cumprod_gradient(grad: Tensor, value: Tensor, dim: int, result: Tensor) -> Tensor:
    """The gradient of a cumulative product; eager divides by the factors where none is zero."""
    found: Tensor = aten.cumprod_backward(grad, value, dim, result)
    return found.clone() if storage_key(found) == storage_key(grad) else found


@cumprod_gradient.register_fake
def _fake_cumprod_gradient(grad: Tensor, value: Tensor, dim: int, result: Tensor) -> Tensor:
    return torch.empty_like(value, memory_format=torch.contiguous_format)


@torch.library.custom_op("lowtide::weight_of_targets", mutates_args=())
def weight_of_targets(weight: Tensor, target: Tensor, ignored: Tensor) -> Tensor:
    """The sum of the class weights of all targets that are not ignored, in eager's order."""
    return weight.gather(0, target.masked_select(~ignored).flatten()).sum()


@weight_of_targets.register_fake
def _fake_weight_of_targets(weight: Tensor, target: Tensor, ignored: Tensor) -> Tensor:
    return weight.new_empty(())


MEAN = 1
"""torch's number of the reduction."""


def _traced_cross_entropy(torchs: Callable[..., Any]) -> Callable[..., Any]:
    """Eager's cross entropy op by op, where torch's would sum the weights otherwise on fake tensors: with
    class weights, smoothed labels, and a mean."""

    def trace(  # noqa: PLR0917 - an op has no keywords
        value: Tensor,
        target: Tensor,
        weight: Tensor | None = None,
        reduction: int = MEAN,
        ignore_index: int = -100,
        label_smoothing: float = 0.0,
    ) -> Any:
        by_index = target.shape != value.shape and not target.is_floating_point()
        if weight is None or reduction != MEAN or not (by_index and label_smoothing):
            return torchs(value, target, weight, reduction, ignore_index, label_smoothing)
        dim = 0 if value.dim() == 1 else 1
        logs = aten.log_softmax.int(value, dim, value.dtype)
        loss = aten.nll_loss_nd(logs, target, weight, reduction, ignore_index)
        by_class = weight.view([-1 if each == dim else 1 for each in range(value.dim())])
        ignored = target == ignore_index
        smooth = (-(logs * by_class).sum(dim)).masked_fill(ignored, 0.0).sum()
        mean = smooth / weight_of_targets(weight, target, ignored)
        return loss * (1 - label_smoothing) + mean * (label_smoothing / logs.shape[dim])

    return trace


def composite_rules() -> dict[
    dispatch.OpOverload[..., Any], Callable[[Callable[..., Any]], Callable[..., Any]]
]:
    """For ops that ATen itself writes with other ops: a function from torch's tracing rule to ours."""
    return {
        aten.cumprod_backward.default: lambda _torchs: cumprod_gradient,
        aten.cross_entropy_loss.default: _traced_cross_entropy,
    }


WEIGHTS = {
    aten.native_layer_norm.default: (2,),
    aten._native_batch_norm_legit_functional.default: (1, 3),
    aten.native_group_norm.default: (1,),
}
"""Norms whose second and third results are mean and inverse deviation. These results have the dtype of the
first argument at these positions that is not None: the weight, the running mean."""


def use_real_dtypes(graph: fx.Graph) -> None:
    """A pass: give the mean and inverse deviation of norms the weight's dtype, as the CPU's kernels do.
    Fake tensors have the input's dtype there, and are right on other devices. Preserves all ops."""
    for target, places in WEIGHTS.items():
        for node in graph.find_nodes(op="call_function", target=target):
            given = [node.args[place] for place in places]
            weight = next((each for each in given if isinstance(each, fx.Node)), None)
            if weight is not None and node.meta["val"][0].device.type == "cpu":
                _set_type(node, weight.meta["val"].dtype)


def _set_type(norm: fx.Node, dtype: torch.dtype) -> None:
    values = list(norm.meta["val"])
    if values[1].dtype is dtype:
        return
    with values[1].fake_mode:
        values[1:3] = [torch.empty_like(value, dtype=dtype) for value in values[1:3]]
    norm.meta["val"] = tuple(values)
    for item in norm.users:
        for index in (1, 2):
            if item.target is operator.getitem and item.args[1] == index:
                _set_value(item, values[index])


def _set_value(node: fx.Node, value: Tensor) -> None:
    node.meta["val"] = value
    for user in node.users:
        if user.target is aten.detach.default:
            _set_value(user, value)
