"""Put right where a captured graph would not compute what eager PyTorch computes."""

import torch
from torch import fx

from lowtide.capture.recipes import apply_mask, dropout_output, eager_dropout, recurrent_layer

aten = torch.ops.aten


def as_eager_computes(graph: fx.Graph) -> None:
    """Replace, in place, ops whose captured form differs from eager's; preserves all else.

    Dropout on CPU takes eager's rounding, forward and backward, and its mask is taken before its
    result, since the result can be made again from the mask. Recurrent layers make the workspace
    that their backward reads.
    """
    for node in graph.find_nodes(op="call_function", target=aten.mkldnn_rnn_layer.default):
        node.target = recurrent_layer
    for node in graph.find_nodes(op="call_function", target=aten.native_dropout.default):
        if node.args[2] is not False and node.meta["val"][0].device.type == "cpu":
            node.target = eager_dropout
            node.args = (*node.args[:2], True)
    for node in graph.find_nodes(op="call_function", target=aten.native_dropout_backward.default):
        dropout = _dropout_of(node.args[1])
        if dropout is not None:
            node.target = apply_mask
            node.args = (*node.args[:2], dropout.args[1])
    for node in graph.nodes:
        pair = dropout_output(node)
        if pair is not None:
            node.prepend(pair[1])


def _dropout_of(mask: object) -> fx.Node | None:
    """The eager dropout that drew this mask."""
    while isinstance(mask, fx.Node) and mask.target is aten.detach.default:
        mask = mask.args[0]
    source = mask.args[0] if isinstance(mask, fx.Node) and mask.args else None
    return source if isinstance(source, fx.Node) and source.target is eager_dropout else None
