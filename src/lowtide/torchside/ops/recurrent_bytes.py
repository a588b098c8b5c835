"""What recurrent layers of cells take: valid samples of them, and the bytes that eager keeps of one."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from lowtide.torchside import hooks
from lowtide.torchside.calls import Call, call_of, signature, storage_key
from lowtide.torchside.ops.recurrent_cells import CELLS, CELLS_BACKWARD, GRU_CELL, casting, run_layer

MEASURED_STEPS = (2, 4)
"""Steps of the two short runs that tell what eager keeps per step."""


def valid_batch_sizes(call: Call, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """The sample of a packed layer with sizes that its rows can have; any other as it is."""
    if call.target not in (CELLS, CELLS_BACKWARD):
        return args
    at = 1 if call.target is CELLS else 4
    value, batch_sizes, hidden = args[at : at + 3]
    if batch_sizes is None or not batch_sizes.numel():
        return args
    left, most = value.shape[0], hidden[0].shape[1]
    sizes: list[int] = []
    for remaining in reversed(range(batch_sizes.numel())):
        sizes.append(min(sizes[-1] if sizes else most, left - remaining))
        left -= sizes[-1]
    return (*args[: at + 1], torch.tensor(sizes), *args[at + 2 :])


def extra_result_bytes(node: fx.Node, made: torch.Tensor) -> int:
    """How much more than a layer's result eager has there: what it keeps, in place of the empty tensor."""
    if node.target is not CELLS or made is not node.meta["val"][-1]:
        return 0
    return eager_keeps_bytes(call_of(node))


def extra_inside_bytes(node: fx.Node) -> int:
    """How much more eager holds inside the backward of a layer: less, since it has kept what we make anew."""
    if node.target is not CELLS_BACKWARD:
        return 0
    call = call_of(node)
    return -eager_keeps_bytes(Call(CELLS, (call.args[0], *call.args[4:11])))


_kept: dict[str, int] = {}


def eager_keeps_bytes(call: Call) -> int:
    """What eager's autograd keeps of a layer from its forward to its backward, results and inputs left out;
    0 for any other op. From two short runs on real tensors: each step keeps as much as the one before."""
    if call.target is not CELLS:
        return 0
    name = signature(call)
    if name not in _kept:
        kind, value, batch_sizes, hidden = call.args[:4]
        if kind == GRU_CELL:
            return _kept_bytes(call, value.shape)
        batch = int(hidden[0].shape[1])
        rows = int(value.shape[0]) if batch_sizes is not None else int(value.shape[0]) * batch
        few, more = (_kept_bytes(call, (steps, batch, value.shape[-1])) for steps in MEASURED_STEPS)
        per_row = (more - few) / (batch * (MEASURED_STEPS[1] - MEASURED_STEPS[0]))
        _kept[name] = round(few + per_row * (rows - batch * MEASURED_STEPS[0]))
    return _kept[name]


def _kept_bytes(call: Call, shape: Sequence[int]) -> int:
    """The same of a real layer, whose input has this shape."""
    kind, value, _, hidden, weights, has_biases, bidirectional, autocast = call.args
    blocks: dict[int, int] = {}

    def note(tensor: torch.Tensor) -> torch.Tensor:
        blocks[storage_key(tensor)] = tensor.untyped_storage().nbytes()
        return tensor

    with hooks.real_tensors(), torch.enable_grad(), casting(autocast, once=True):
        inputs = [torch.zeros(shape, dtype=value.dtype)]
        inputs += [torch.zeros(tensor.shape, dtype=tensor.dtype) for tensor in (*hidden, *weights)]
        for tensor in inputs:
            tensor.requires_grad_()
        with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
            states, parameters = inputs[1 : 1 + len(hidden)], inputs[1 + len(hidden) :]
            results = run_layer(kind, inputs[0], None, states, parameters, has_biases, bidirectional)
        for tensor in (*inputs, *results):
            blocks.pop(storage_key(tensor), None)
    return sum(blocks.values())
