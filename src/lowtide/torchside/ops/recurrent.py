"""Recurrent layers: how they are traced and run, and what only a real run of them tells.

torch traces an RNN by a decomposition that loses the dropout between layers, and its one op for a whole
layer hands an opaque block to its backward op. Fake tensors say that the block is empty, and a backward
op that is given random bytes for it crashes.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from lowtide.torchside import hooks
from lowtide.torchside.calls import Call

aten = torch.ops.aten

RUNS_ONCE = "its workspace belongs to one run"
"""Why a recurrent layer is never run again."""


def recurrent_layer(value: torch.Tensor, *args: Any) -> Any:
    """`aten.mkldnn_rnn_layer` with the workspace that its backward reads.

    The op makes it only where autograd would record it, which a captured graph's forward does not.
    """
    with torch.enable_grad():
        results = aten.mkldnn_rnn_layer(value.detach().requires_grad_(), *args)
    return tuple(result.detach() for result in results)


def use_recurrent_layers(graph: fx.Graph) -> None:
    """Let recurrent layers make the workspace that their backward reads; preserves all else."""
    for node in graph.find_nodes(op="call_function", target=aten.mkldnn_rnn_layer.default):
        node.target = recurrent_layer


def _layer_inputs(params: Any, hidden: Any, layer: int, bidirectional: bool) -> tuple[Any, Any, Any, Any]:
    if not bidirectional:
        return params[layer], hidden[layer], None, None
    return params[2 * layer], hidden[2 * layer], params[2 * layer + 1], hidden[2 * layer + 1]


def traced_layers(  # noqa: PLR0917 - torch calls it so
    value: torch.Tensor,
    hidden: Any,
    params: Any,
    has_biases: bool,
    num_layers: int,
    dropout: float,
    train: bool,
    bidirectional: bool,
    batch_first: bool,
    layer_fn: Callable[..., Any],
) -> tuple[torch.Tensor, list[Any]]:
    """An RNN's layers one after the other, with the dropout between them that torch 2.13 to 2.15 loses."""
    value = value.transpose(0, 1) if batch_first else value
    last_states = []
    for layer in range(num_layers):
        own, state, back, back_state = _layer_inputs(params, hidden, layer, bidirectional)
        result, end = layer_fn(value, state, own, has_biases)
        last_states.append(end)
        if bidirectional:
            backwards, end = layer_fn(value, back_state, back, has_biases, reverse=True)
            last_states.append(end)
            result = torch.cat([result, backwards], result.dim() - 1)
        value = result
        if dropout and train and layer < num_layers - 1:
            value = torch.dropout(value, dropout, train=True)
    return value.transpose(0, 1) if batch_first else value, last_states


def real_result_bytes(call: Call, sample: Callable[[Call], tuple[Any, Any]]) -> list[int] | None:
    """Bytes of each result of an op whose fake results cannot be trusted; None for all other ops."""
    if call.target is not recurrent_layer:
        return None
    with hooks.real_tensors():
        args, kwargs = sample(call)
        return [result.untyped_storage().nbytes() for result in recurrent_layer(*args, **kwargs)]


def with_forward_results(call: Call, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """The sample of a backward op with what its forward op really gives; any other as it is."""
    if call.target is not aten.mkldnn_rnn_layer_backward.default:
        return args
    reverse, mode, hidden, layers, biases, train, both, sizes, batch_first = args[13:22]
    output, hy, cy, workspace = recurrent_layer(
        *args[:7], reverse, sizes, mode, hidden, layers, biases, both, batch_first, train
    )
    return (*args[:7], output, hy, cy, *args[10:22], workspace)


def untracked_bytes(call: Call) -> int:
    """What a recurrent backward op holds that its fake run does not show: a second bias gradient, and
    a copy of the incoming gradient where its real strides are not the fake ones."""
    if call.target is not aten.mkldnn_rnn_layer_backward.default:
        return 0
    value, bias = call.args[0], call.args[3]
    return int(value.numel() * value.element_size() + bias.numel() * bias.element_size())
