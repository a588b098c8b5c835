"""Ops that can write their result over one of the values that they read, with the same bits."""

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, fx

from lowtide.ops.calls import Call
from lowtide.ops.loss_chunks import loss_gradient, soft_loss_gradient
from lowtide.ops.packing import fills_storage
from lowtide.ops.random_ops import apply_mask
from lowtide.torch_compat.dispatch import OpOverload, bare_op, real_tensors, schema_of

aten = torch.ops.aten


def times(value: Tensor, number: Any, *, out: Tensor | None = None) -> Tensor:
    """A product with a number. `mul_` would first round the number to the dtype of a half-precision value."""
    if out is None or not fills_storage(out):
        return torch.mul(value, number)
    # 0.0 and -0.0 are equal; fake tensors stay apart from real ones
    is_known = type(number) is float and number != 0 and type(out) is Tensor
    return torch.mul(
        value, _real_factor(number) if is_known else torch.tensor(number, dtype=torch.float64), out=out
    )


@functools.lru_cache(maxsize=256)
def _real_factor(number: float) -> Tensor:
    with real_tensors():
        return torch.tensor(number, dtype=torch.float64, device="cpu")


WITH_OUT: dict[Any, tuple[Callable[..., Any], tuple[int, ...]]] = {
    aten.add.Tensor: (aten.add.out, (0, 1)),
    aten.sub.Tensor: (aten.sub.out, (0, 1)),
    aten.mul.Tensor: (aten.mul.out, (0, 1)),
    aten.div.Tensor: (aten.div.out, (0, 1)),
    aten.mul.Scalar: (times, (0,)),
    aten.add.Scalar: (aten.add_.Scalar, (0,)),
    aten.sub.Scalar: (aten.sub_.Scalar, (0,)),
    aten.div.Scalar: (aten.div_.Scalar, (0,)),
    aten.neg.default: (aten.neg.out, (0,)),
    aten.masked_fill.Scalar: (aten.masked_fill_.Scalar, (0,)),
    aten.where.self: (aten.where.self_out, (1, 2)),
    aten.threshold_backward.default: (aten.threshold_backward.grad_input, (0,)),
    aten.leaky_relu_backward.default: (aten.leaky_relu_backward.grad_input, (0,)),
    aten.hardtanh_backward.default: (aten.hardtanh_backward.grad_input, (0,)),
    aten.elu_backward.default: (aten.elu_backward.grad_input, (0,)),
    aten.gelu_backward.default: (aten.gelu_backward.grad_input, (0,)),
    aten.silu_backward.default: (aten.silu_backward.grad_input, (0,)),
    aten.tanh_backward.default: (aten.tanh_backward.grad_input, (0,)),
    aten.sigmoid_backward.default: (aten.sigmoid_backward.grad_input, (0,)),
    aten._softmax_backward_data.default: (aten._softmax_backward_data.out, (0,)),
    aten._log_softmax_backward_data.default: (aten._log_softmax_backward_data.out, (0,)),
    aten.scatter.src: (aten.scatter_.src, (0,)),
    aten.scatter.value: (aten.scatter_.value, (0,)),
    aten.scatter_add.default: (aten.scatter_add_.default, (0,)),
    aten.index_add.default: (aten.index_add_.default, (0,)),
    aten.index_put.default: (aten.index_put_.default, (0,)),
    aten.index_fill.int_Scalar: (aten.index_fill_.int_Scalar, (0,)),
    aten.index_fill.int_Tensor: (aten.index_fill_.int_Tensor, (0,)),
    aten.masked_scatter.default: (aten.masked_scatter_.default, (0,)),
    apply_mask: (apply_mask, (0,)),
    loss_gradient: (loss_gradient, (1,)),
    soft_loss_gradient: (soft_loss_gradient, (2,)),
}
"""By op: its variant that writes over an argument, and the positions that this argument may have."""

BY_INDEX = (
    aten.scatter.src,
    aten.scatter.value,
    aten.scatter_add.default,
    aten.index_add.default,
    aten.index_put.default,
    aten.index_fill.int_Scalar,
    aten.index_fill.int_Tensor,
    aten.masked_scatter.default,
)
"""Ops that copy their first argument and write into the copy, in the order of an index or a mask. Eager's
formulas write into the argument itself, which is filled with zeros."""

ROUND_ONCE = (
    *BY_INDEX,
    aten.add.Tensor,
    aten.sub.Tensor,
    aten.mul.Tensor,
    aten.div.Tensor,
    aten.masked_fill.Scalar,
    aten.where.self,
)
"""Ops that round each real element at most once, or in the order of an index: their order in memory does not
matter."""

BY_COMPONENT = (
    *BY_INDEX,
    aten.add.Tensor,
    aten.sub.Tensor,
    aten.neg.default,
    aten.masked_fill.Scalar,
    aten.where.self,
)
"""Ops on complex numbers that round each component at most once. A product rounds several times, otherwise in
vectors than one by one, and the strides of a kernel's result decide which of the two it takes."""


def keeps_bits(target: Any, dtype: torch.dtype, kwargs: Mapping[str, Any]) -> bool:
    """Whether an op of `WITH_OUT` has the same bits where it writes over a value of this dtype."""
    return not dtype.is_complex or (target in BY_COMPONENT and not kwargs)


MOST_LAYOUTS = 256
"""Shapes and strides of arguments that one variant remembers."""

IN_ROWS = (aten._softmax_backward_data.out, aten._log_softmax_backward_data.out)
"""Variants that write row after row, whatever the strides of their `out`."""


def write_over(op: OpOverload, place: int, *args: Any, **kwargs: Any) -> Tensor:
    """`op` with its result written over argument `place`, which no later op reads.

    The result gets new memory where tensors have other strides than at capture, and `op` cannot use them or
    would give its result others.
    """
    return writer(op, place)(*args, **kwargs)


@functools.cache
def writer(op: OpOverload, place: int) -> Callable[..., Tensor]:
    """`write_over` of one op and place: what is the same for all calls is looked up here, once."""
    arguments = schema_of(op).arguments
    kernel, in_rows, writes_first = bare_op(op), op in IN_ROWS, arguments[0].is_write
    name = arguments[-1].name  # `out` comes last in a schema
    plain = _PLAIN[op]
    num_deciding = place if plain in ROUND_ONCE else None
    results: dict[tuple[Any, ...], list[int]] = {}

    def write(*args: Any, **kwargs: Any) -> Tensor:
        out: Tensor = args[place]
        if num_deciding != 0 and _differ(out, args[:num_deciding]):
            layouts = tuple((arg.shape, arg.stride()) for arg in args if isinstance(arg, Tensor))
            if layouts not in results:
                if len(results) == MOST_LAYOUTS:
                    results.clear()
                results[layouts] = _strides_of_result(plain, args, kwargs)
            if results[layouts] != _strides(out):
                return plain(*args, **kwargs)  # type: ignore[no-any-return]
        if in_rows and not out.is_contiguous():
            out = torch.empty_like(out, memory_format=torch.contiguous_format)
        elif not fills_storage(out):
            out = out.clone()
        if writes_first:
            kernel(out, *args[1:], **kwargs)
        else:
            kernel(*args, **kwargs, **{name: out})
        return out

    return write


def _differ(out: Tensor, deciding: tuple[Any, ...]) -> bool:
    """Whether an argument that decides about the strides of a result has others than the argument `out`: the
    first argument decides where an element is rounded once, all arguments elsewhere."""
    strides = out.stride()
    return len(strides) > 1 and any(
        arg is not out
        and isinstance(arg, Tensor)
        and arg.stride() != strides
        and arg.shape == out.shape
        and _strides(arg) != _strides(out)
        for arg in deciding
    )


def _strides_of_result(
    plain: Callable[..., Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> list[int]:
    """The strides that an op gives to a result of its own."""
    with real_tensors():
        return _strides(plain(*(_without_memory(arg) for arg in args), **kwargs))


def _without_memory(value: Any) -> Any:
    if not isinstance(value, Tensor):
        return value
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")


def _strides(tensor: Tensor) -> list[int]:
    """The strides of dimensions of more than one element."""
    return [step for size, step in zip(tensor.shape, tensor.stride(), strict=True) if size > 1]


def overwriting(target: Any, place: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
    """The call of an op of `WITH_OUT` that writes over its argument `place`."""
    op = WITH_OUT[target][0]
    if isinstance(op, OpOverload):
        return Call(write_over, (op, place, *args), kwargs)
    return Call(op, args, {**kwargs, "out": args[place]})


def is_overwriting(node: fx.Node) -> bool:
    """Whether a node runs an op that writes its result over an input."""
    return node.target is write_over or (node.target in _PLAIN and node.kwargs.get("out") is not None)


_PLAIN = {op: target for target, (op, _) in WITH_OUT.items()}
"""Ops of `WITH_OUT` by their variants that write over an argument."""


def plain_call(call: Call) -> Call:
    """The call of `overwriting` as it was, with a result of its own."""
    if call.target is write_over:
        op, _place, *args = call.args
        return Call(_PLAIN[op], tuple(args), call.kwargs)
    kwargs = {name: value for name, value in call.kwargs.items() if name != "out"}
    return Call(_PLAIN[call.target], call.args, kwargs)
