"""What may be run again in the backward pass, how, and what may not and why."""

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from lowtide.facts import How
from lowtide.torchside.hooks import FakeTensor, OpOverload

aten = torch.ops.aten

BATCH_NORM_WITH_STATISTICS = {aten._native_batch_norm_legit_functional.default}
"""Functional batch norms: outputs are (result, mean, inverse deviation, new running mean, new variance)."""

MASKED_PIECE = 1 << 17
"""Elements that `apply_mask` works on at a time."""

REPEATABLE_NAMESPACES = {"aten", "prims", "mkldnn", "mkl", "onednn"}


def eager_dropout(value: torch.Tensor, probability: float, train: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """(result, mask) of a dropout, bit for bit as eager PyTorch computes it on CPU.

    `aten.native_dropout`, which capture records instead, rounds its scale otherwise: for one in seven
    probabilities its results differ from eager's in the last bit.
    """
    assert train, "a dropout that drops nothing is not captured as one"
    if probability == 1:
        mask = torch.zeros_like(value, dtype=torch.bool)
    else:
        mask = torch.empty_like(value, dtype=torch.bool).bernoulli_(1 - probability)
    return apply_mask(value, mask, probability), mask


def apply_mask(value: torch.Tensor, mask: torch.Tensor, probability: float) -> torch.Tensor:
    """A dropout's result, or its gradient, from the kept mask: eager's arithmetic, without eager's mask.

    Works in pieces, since torch makes a float copy of whatever bool tensor it multiplies with.
    """
    scale = torch.zeros((), dtype=value.dtype)
    if probability != 1:
        scale = torch.ones((), dtype=value.dtype).div_(1 - probability)
    whole = isinstance(value, FakeTensor) or value.numel() <= MASKED_PIECE
    if whole or not (value.is_contiguous() and mask.is_contiguous()):
        return value.mul(mask).mul_(scale)
    result = torch.empty_like(value)
    flat = (value.view(-1), mask.view(-1), result.view(-1))
    for one, kept, out in zip(*(torch.split(tensor, MASKED_PIECE) for tensor in flat), strict=True):
        torch.mul(one, kept, out=out)
        out.mul_(scale)
    return result


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
    if target is eager_dropout:
        return ""
    if target is operator.getitem:
        return "running statistics are counted once" if _is_statistic(node) else ""
    if target is recurrent_layer:
        return "its workspace belongs to one run"
    if not isinstance(target, OpOverload):
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
    if node.target is eager_dropout:
        return True
    return (
        isinstance(node.target, OpOverload)
        and torch.Tag.nondeterministic_seeded in node.target.tags
        and not (node.target is aten.native_dropout.default and node.args[2] is False)
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
    """(input, mask) when `node` is the result of an eager dropout."""
    if node.target is not operator.getitem or node.args[1] != 0:
        return None
    dropout = node.args[0]
    if not isinstance(dropout, fx.Node) or dropout.target is not eager_dropout:
        return None
    source = dropout.args[0]
    assert isinstance(source, fx.Node)
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
    if device == "cpu":
        return torch.get_rng_state()
    state: torch.Tensor = torch.get_device_module(device).get_rng_state(device)
    return state


def set_random_state(state: torch.Tensor, device: str) -> None:
    if device == "cpu":
        torch.set_rng_state(state)
    else:
        torch.get_device_module(device).set_rng_state(state, device)


def random_state_bytes(device: str) -> int:
    return random_state(device).numel()


def replay(state: torch.Tensor, device: str, target: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Run a random op from an earlier generator state; the generator itself goes on as if it had not."""
    now = random_state(device)
    set_random_state(state, device)
    try:
        return target(*args, **kwargs)
    finally:
        set_random_state(now, device)


def replay_dropout(
    state: torch.Tensor, device: str, value: torch.Tensor, probability: float, train: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """`eager_dropout` from an earlier generator state."""
    result: tuple[torch.Tensor, torch.Tensor] = replay(
        state, device, eager_dropout, value, probability, train
    )
    return result
