"""Ops that hand an opaque block to their backward op, whose size and contents only a real run gives.

Fake tensors say that the block is empty, and a backward op that is given random bytes for it crashes.
"""

from collections.abc import Callable
from typing import Any

import torch

from lowtide.capture.recipes import recurrent_layer
from lowtide.torchside import hooks
from lowtide.torchside.calls import OpCall


def real_result_bytes(call: OpCall, sample: Callable[[OpCall], tuple[Any, Any]]) -> list[int] | None:
    """Bytes of each result of an op whose fake results cannot be trusted; None for all other ops."""
    if call.target is not recurrent_layer:
        return None
    with hooks.real_tensors():
        args, kwargs = sample(call)
        return [result.untyped_storage().nbytes() for result in recurrent_layer(*args, **kwargs)]


def with_forward_results(call: OpCall, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """The sample of a backward op with what its forward op really gives; any other as it is."""
    if call.target is not torch.ops.aten.mkldnn_rnn_layer_backward.default:
        return args
    reverse, mode, hidden, layers, biases, train, both, sizes, batch_first = args[13:22]
    output, hy, cy, workspace = recurrent_layer(
        *args[:7], reverse, sizes, mode, hidden, layers, biases, both, batch_first, train
    )
    return (*args[:7], output, hy, cy, *args[10:22], workspace)


def untracked_bytes(call: OpCall) -> int:
    """What a recurrent backward op holds that its fake run does not show: a second bias gradient, and
    a copy of the incoming gradient where its real strides are not the fake ones."""
    if call.target is not torch.ops.aten.mkldnn_rnn_layer_backward.default:
        return 0
    value, bias = call.args[0], call.args[3]
    return int(value.numel() * value.element_size() + bias.numel() * bias.element_size())
