"""Random ops, and the state of the generators that they draw from."""

from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from lowtide.ops.dropout import eager_dropout
from lowtide.torch_compat.hooks import OpOverload

aten = torch.ops.aten

HIGH = 1 - 2**-24


def is_random(node: fx.Node) -> bool:
    """Whether a node draws random numbers."""
    if node.target is eager_dropout:
        return True
    return (
        isinstance(node.target, OpOverload)
        and torch.Tag.nondeterministic_seeded in node.target.tags
        and not (node.target is aten.native_dropout.default and node.args[2] is False)
    )


def draw_high(module: fx.GraphModule) -> None:
    """Let a graph that is only captured draw single numbers close to 1, in place.

    Models that drop layers do so where a draw is low: the step that drops none is the one to plan for.
    """
    for node in module.graph.find_nodes(op="call_function", target=aten.rand.default):
        if node.meta["val"].numel() == 1:
            node.target, node.args = aten.full.default, (node.args[0], HIGH)
    module.recompile()


def device_name(node: fx.Node) -> str:
    """`cpu` or `cuda:0`: where a node's (first) result lives, and so the generator that it draws from."""
    value = node.meta["val"]
    tensor = value[0] if isinstance(value, (list, tuple)) else value
    return str(tensor.device)


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


def replay(state: torch.Tensor, device: str, target: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
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
