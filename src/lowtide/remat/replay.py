"""The same random op, run from the generator state that it had in the forward pass."""

import torch
from torch import fx

from lowtide.generators import random_state
from lowtide.ops.calls import Call
from lowtide.ops.random_ops import (
    device_name,
    eager_dropout,
    is_random,
    random_state_bytes,
    replay,
    replay_dropout,
)
from lowtide.ops.recurrent_stack import STACK, draws_dropout
from lowtide.remat.recompute import reason_unrepeatable
from lowtide.remat.rule import Kept, RematRule

STARTS_OVER = "the dropout of recurrent layers would start over where the generator is set"
"""Why no random op is drawn again beside a cuDNN layer with dropout. cuDNN has a random state of its own:
torch makes it anew from the seed after the generator was set."""


class Replay(RematRule):
    name = "replay"
    words = "drawn again from its random state"
    costs_as_first = True

    def why_not(self, node: fx.Node) -> str | None:
        if not is_random(node):
            return None
        if any(draws_dropout(other) for other in node.graph.find_nodes(op="call_function", target=STACK)):
            return STARTS_OVER
        return "" if node.target is eager_dropout else reason_unrepeatable(node)

    def kept(self, node: fx.Node) -> tuple[Kept, ...]:
        device = device_name(node)
        value = node.meta["val"]
        tensor = value[0] if isinstance(value, (list, tuple)) else value
        with tensor.fake_mode:
            state = torch.empty(random_state_bytes(device), dtype=torch.uint8)
        return (Kept("random_state", Call(random_state, (device,)), state, before=True, timed=False),)

    def call(self, node: fx.Node, kept: tuple[Kept, ...]) -> Call:
        first = (kept[0], device_name(node))
        if node.target is eager_dropout:
            return Call(replay_dropout, (*first, *node.args))
        return Call(replay, (*first, node.target, *node.args), node.kwargs)

    def workspace_bytes(self, node: fx.Node) -> int:
        # saves the generator's present state while the op draws from the earlier one
        return random_state_bytes(device_name(node))
