"""Batch norm by the library that eager chooses on an accelerator.

On CUDA, `torch.batch_norm` calls cuDNN, MIOpen or torch's own kernel: this depends on dtypes, sizes, memory
format, parameters and mode. torch traces its own kernel in all cases, and the libraries round differently.
Here the traced ops become eager's own choice, forward and backward:

    _native_batch_norm_legit_functional ──┬─ result, mean, ..     eager_batch_norm ──┬─ result, mean, ..
                                          │                 ==>                      └─ reserve ──┐
    native_batch_norm_backward(mean, ..) ─┘                       eager_batch_norm_backward(mean, .., reserve)

cuDNN passes its `reserve` to its backward. Only cuDNN knows its size: the fake reserve is empty, and a run
shows the bytes (`OpCost.hidden_bytes`).

Shortcoming: `torch.backends.cudnn.enabled` must stay as it was when the model was captured.
"""

import operator
from typing import Any

import torch
from torch import Tensor, fx

from lowtide.errors import LowtideError
from lowtide.ops.calls import Call
from lowtide.torch_compat.dispatch import FakeTensor, batch_norm_library

aten = torch.ops.aten

TORCH = 0
"""torch's own kernel, as `aten._batch_norm_impl_index` numbers libraries: cuDNN is 1, MIOpen 2."""

RESERVE = 5
"""The place of the reserve in the results of `eager_batch_norm`."""

BACKWARD = aten.native_batch_norm_backward.default

Results = tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None, Tensor]


def eager_batch_norm(  # noqa: PLR0917 - called from a graph
    value: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    training: bool,
    momentum: float,
    eps: float,
    library: int,
) -> Results:
    """(result, mean, inverse deviation, new running mean, new running variance, reserve) of a batch norm.

    The running statistics are None where eager leaves them unchanged. `library` is the one that eager chose
    when the model was captured.
    """
    if isinstance(value, FakeTensor):
        return _fake(value, weight, bias, running_mean, running_var, training, momentum, eps)
    counts = training and running_mean is not None and running_var is not None
    new_mean = running_mean.clone() if counts and running_mean is not None else running_mean
    new_var = running_var.clone() if counts and running_var is not None else running_var
    result, mean, deviation, reserve, used = aten._batch_norm_impl_index(
        value, weight, bias, new_mean, new_var, training, momentum, eps, torch.backends.cudnn.enabled
    )
    if used != library:
        raise LowtideError(
            f"batch norm runs by {_name(used)} and was captured with {_name(library)}: set "
            "torch.backends.cudnn.enabled as it was when the model was captured, or capture it again"
        )
    # MIOpen gives no statistics in evaluation mode
    mean, deviation = (value.new_empty(0) if each is None else each for each in (mean, deviation))
    return result, mean, deviation, new_mean if counts else None, new_var if counts else None, reserve


def eager_batch_norm_again(  # noqa: PLR0917 - called from a graph
    value: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    statistics: torch.dtype,
    momentum: float,
    eps: float,
    library: int,
) -> Results:
    """`eager_batch_norm` in training mode a second time: it counts into running statistics of its own, which
    have the dtype `statistics`, so that the library runs the same kernel."""
    mean, var = (value.new_zeros(value.shape[1], dtype=statistics) for _ in range(2))
    result, mean, deviation, _, _, reserve = eager_batch_norm(
        value, weight, bias, mean, var, True, momentum, eps, library
    )
    return result, mean, deviation, None, None, reserve


def eager_batch_norm_backward(  # noqa: PLR0917 - called from a graph
    grad: Tensor,
    value: Tensor,
    weight: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    mean: Tensor | None,
    deviation: Tensor | None,
    training: bool,
    eps: float,
    wanted: list[bool],
    reserve: Tensor,
    library: int,
) -> tuple[Tensor | None, ...]:
    """The `wanted` gradients of input, weight and bias, by the formulas of eager's autograd."""
    statistics = (running_mean, running_var, mean, deviation)
    if library == TORCH or not training or isinstance(value, FakeTensor):
        gradients: tuple[Tensor | None, ...] = BACKWARD(
            grad, value, weight, *statistics, training, eps, wanted
        )
        return gradients
    value = value.contiguous(memory_format=_suggested_format(value))
    grad = grad.contiguous(memory_format=_suggested_format(value))
    # cuDNN may write to its reserve, and a second backward pass reads it, too
    found = aten._batch_norm_impl_index_backward(
        library, value, grad, weight, *statistics, training, eps, wanted, reserve.clone()
    )
    return tuple(gradient if needed else None for gradient, needed in zip(found, wanted, strict=True))


def _fake(  # noqa: PLR0917
    value: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    training: bool,
    momentum: float,
    eps: float,
) -> Results:
    found = aten._native_batch_norm_legit.no_stats(value, weight, bias, True, momentum, eps)
    counts = training and running_mean is not None and running_var is not None
    old = (running_mean, running_var)
    new = [torch.empty_like(each) if counts and each is not None else None for each in old]
    return *found, new[0], new[1], value.new_empty(0, dtype=torch.uint8)


def _suggested_format(value: Tensor) -> torch.memory_format:
    """The memory format in which eager hands a value to cuDNN."""
    for dims, last in ((4, torch.channels_last), (5, torch.channels_last_3d)):
        if value.dim() == dims and value.is_contiguous(memory_format=last) and not value.is_contiguous():
            return last
    return torch.contiguous_format


def _name(library: int) -> str:
    return ("torch's own kernel", "cuDNN", "MIOpen")[library]


def use_eager_batch_norm(graph: fx.Graph) -> None:
    """A pass: let batch norms on accelerators run by the library that eager chooses. Preserves all else."""
    forwards = {
        aten._native_batch_norm_legit_functional.default: _with_statistics,
        aten._native_batch_norm_legit_no_training.default: _in_evaluation,
        aten._native_batch_norm_legit.no_stats: _without_statistics,
    }
    for target, arguments in forwards.items():
        for node in graph.find_nodes(op="call_function", target=target):
            if node.meta["val"][0].device.type != "cpu":
                _use_eager(node, arguments(*node.args))
    for node in graph.find_nodes(op="call_function", target=BACKWARD):
        forward = _forward_of(node.args[5])
        if forward is not None:
            node.target = eager_batch_norm_backward
            node.args = (*node.args, _reserve_of(forward), forward.args[-1])


def _with_statistics(*args: Any) -> tuple[Any, ...]:
    return args


def _in_evaluation(*args: Any) -> tuple[Any, ...]:
    return (*args[:5], False, *args[5:])


def _without_statistics(*args: Any) -> tuple[Any, ...]:
    return (*args[:3], None, None, *args[3:])


def _use_eager(node: fx.Node, args: tuple[Any, ...]) -> None:
    known = [arg.meta["val"] if isinstance(arg, fx.Node) else None for arg in args[:5]]
    node.target = eager_batch_norm
    node.args = (*args, batch_norm_library(*known, training=args[5], eps=args[7]))
    results = node.meta["val"]
    with results[0].fake_mode:
        reserve = torch.empty(0, dtype=torch.uint8, device=results[0].device)
    node.meta["val"] = (*results, *(None,) * (RESERVE - len(results)), reserve)


def _forward_of(mean: object) -> fx.Node | None:
    """The batch norm in eager's way whose mean this is."""
    while isinstance(mean, fx.Node) and mean.target is aten.detach.default:
        mean = mean.args[0]
    source = mean.args[0] if isinstance(mean, fx.Node) and mean.target is operator.getitem else None
    return source if isinstance(source, fx.Node) and source.target is eager_batch_norm else None


def _reserve_of(forward: fx.Node) -> fx.Node:
    for user in forward.users:
        if user.target is operator.getitem and user.args[1] == RESERVE:
            return user
    with forward.graph.inserting_after(forward):
        item = forward.graph.call_function(operator.getitem, (forward, RESERVE))
    item.meta = {**forward.meta, "val": forward.meta["val"][RESERVE]}
    return item


def with_real_reserve(call: Call, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """The sample of a backward op of cuDNN or MIOpen with real results of its forward op; other samples
    unchanged."""
    if call.target is not eager_batch_norm_backward or call.args[-1] == TORCH or not call.args[7]:
        return args
    _, value, weight, *_, eps, _, _, library = args
    _, mean, deviation, _, _, reserve = eager_batch_norm(
        value, weight, weight, None, None, True, 0.1, eps, library
    )
    return (*args[:5], mean, deviation, *args[7:10], reserve, library)
