"""What may be run again in the backward pass, how, and what may not and why."""

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from lowtide.facts import How

aten = torch.ops.aten

BATCH_NORM_WITH_STATISTICS = {aten._native_batch_norm_legit_functional.default}
"""Functional batch norms: outputs are (result, mean, inverse deviation, new running mean, new variance)."""

DROPOUT = aten.native_dropout.default

REPEATABLE_NAMESPACES = {"aten", "prims", "mkldnn", "mkl", "onednn"}


def apply_mask(value: torch.Tensor, mask: torch.Tensor, probability: float) -> torch.Tensor:
    """A dropout's output from its input and its mask; the arithmetic of `aten.native_dropout` on CPU.

    That op rounds the scale to the input's type before it multiplies: with a Python number instead,
    bfloat16 results differ in the last bit.
    """
    return scale_mask(value, mask, 0.0 if probability == 1 else 1 / (1 - probability))


def scale_mask(value: torch.Tensor, mask: torch.Tensor, scale: float) -> torch.Tensor:
    """`value * mask * scale`, the scale rounded to the value's type first, as eager dropout does."""
    return value.mul(mask).mul_(torch.tensor(scale, dtype=value.dtype))


def recurrent_layer(value: torch.Tensor, *args: Any) -> Any:
    """`aten.mkldnn_rnn_layer` with the workspace that its backward reads.

    The op makes it only where autograd would record it, which a captured graph's forward does not.
    """
    with torch.enable_grad():
        results = aten.mkldnn_rnn_layer(value.detach().requires_grad_(), *args)
    return tuple(result.detach() for result in results)


def reason_fixed(node: fx.Node) -> str:
    """Why a forward node can never be run again; empty when it can."""
    if node.op == "placeholder":
        return "an input of the step"
    if node.op == "get_attr":
        return "a constant"
    target = node.target
    if target is operator.getitem:
        return "running statistics are counted once" if _is_statistic(node) else ""
    if target is recurrent_layer:
        return "its workspace belongs to one run"
    if not isinstance(target, torch._ops.OpOverload):
        return "a higher-order op"
    if target._schema.is_mutable:
        return "writes to one of its inputs"
    if target.namespace in ("_c10d_functional", "c10d_functional", "c10d"):
        return "talks to other processes"
    if target.namespace not in REPEATABLE_NAMESPACES:
        return "a custom op: not known to give the same result twice"
    if node.kwargs.get("generator") is not None:
        return "draws from a generator of its own"
    if not _is_tensors(node.meta.get("val")):
        return "does not make tensors"
    return ""


def _is_statistic(node: fx.Node) -> bool:
    source, index = node.args
    return isinstance(source, fx.Node) and source.target in BATCH_NORM_WITH_STATISTICS and index in (3, 4)


def _is_tensors(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return all(item is None or _is_tensors(item) for item in value)
    return isinstance(value, torch.Tensor)


def is_random(node: fx.Node) -> bool:
    return (
        isinstance(node.target, torch._ops.OpOverload)
        and torch.Tag.nondeterministic_seeded in node.target.tags
        and not (node.target is DROPOUT and node.args[2] is False)
    )


def how_again(node: fx.Node) -> How:
    """The way a forward node that is not fixed is run again."""
    if node.target in BATCH_NORM_WITH_STATISTICS:
        return How.NO_STATS
    if dropout_output(node) is not None:
        return How.MASK
    if is_random(node):
        return How.REPLAY
    return How.AGAIN


def dropout_output(node: fx.Node) -> tuple[fx.Node, fx.Node] | None:
    """(input, mask) when `node` is the result of a dropout on CPU that drew a mask."""
    if node.target is not operator.getitem or node.args[1] != 0:
        return None
    dropout = node.args[0]
    if not isinstance(dropout, fx.Node) or dropout.target is not DROPOUT or dropout.args[2] is False:
        return None
    source = dropout.args[0]
    assert isinstance(source, fx.Node)
    if source.meta["val"].device.type != "cpu":
        return None
    for user in dropout.users:
        if user.target is operator.getitem and user.args[1] == 1:
            return source, user
    return None


def without_statistics(node: fx.Node) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """Batch norm that reads no running statistics and writes none: (op, arguments)."""
    value, weight, bias, _mean, _variance, training, momentum, eps = node.args
    return aten._native_batch_norm_legit.no_stats, (value, weight, bias, training, momentum, eps)


def random_state(device: str) -> torch.Tensor:
    """The state of a device's default generator."""
    return torch.get_rng_state() if device == "cpu" else torch.get_device_module(device).get_rng_state()


def random_state_bytes(device: str) -> int:
    return random_state(device).numel()


def replay(state: torch.Tensor, device: str, target: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Run a random op from an earlier generator state; the generator itself goes on as if it had not."""
    set_state = torch.set_rng_state if device == "cpu" else torch.get_device_module(device).set_rng_state
    now = random_state(device)
    set_state(state)
    try:
        return target(*args, **kwargs)
    finally:
        set_state(now)
