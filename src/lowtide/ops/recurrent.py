"""Recurrent layers: how they are traced, what they keep live, and valid samples of them.

- LSTM layers that eager runs as one op. torch's decomposition loses the dropout between layers;
  `traced_layers` keeps it. The op passes a workspace to its backward op. The fake workspace is empty, and a
  backward op crashes on random bytes (`recurrent_layer`, `with_forward_results`).
- layers on accelerators: one op of `recurrent_stack` for all layers
- layers that eager runs cell by cell, and an LSTM where autograd is off: each is traced as one op of
  `recurrent_cells`. Two short runs tell what eager keeps live of a layer (`eager_keeps_bytes`).
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import fx

from lowtide.ops.calls import Call, call_of, signature
from lowtide.ops.recurrent_cells import (
    CELLS,
    CELLS_BACKWARD,
    GRU_CELL,
    KINDS,
    Tensors,
    casting,
    recurrent_cells,
    run_layer,
)
from lowtide.ops.recurrent_stack import STACK, STACK_BACKWARD, recurrent_stack
from lowtide.torch_compat import dispatch
from lowtide.torch_compat.dispatch import storage_key

aten = torch.ops.aten

RUNS_ONCE = "its workspace belongs to one run"
"""Why a recurrent layer is never recomputed."""


def recurrent_layer(value: torch.Tensor, *args: Any) -> Any:
    """`aten.mkldnn_rnn_layer` with the workspace that its backward reads.

    The op makes the workspace only while autograd records, and a captured forward does not.
    """
    with torch.enable_grad():
        results = aten.mkldnn_rnn_layer(value.detach().requires_grad_(), *args)
    return tuple(result.detach() for result in results)


def eager_runs_whole(value: torch.Tensor, hidden: Any, params: Any) -> bool:
    """Whether eager runs an LSTM's layer as one op: on CPU, in a dtype that oneDNN has, without projections.

    torch's decomposition also wants an input without gradient, else it makes a cell of every step.
    """
    tensors = [value, *hidden, *(weight for layer in params for weight in layer)]
    return (
        dispatch.onednn_is_enabled()
        and value.numel() > 0
        and all(tensor.device.type == "cpu" for tensor in tensors)
        and all(tensor.dtype in (torch.float32, torch.bfloat16) for tensor in tensors)
        and hidden[0].size(2) == hidden[1].size(2)
    )


def use_recurrent_layers(graph: fx.Graph) -> None:
    """A pass: let recurrent layers make the workspace that their backward reads. Preserves all else."""
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
    """The layers of an RNN one after the other, with the dropout that torch loses between them."""
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
    with dispatch.real_tensors():
        args, kwargs = sample(call)
        return [result.untyped_storage().nbytes() for result in recurrent_layer(*args, **kwargs)]


def with_forward_results(call: Call, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """The sample of a backward op with real results of its forward op; other samples unchanged."""
    if call.target is not aten.mkldnn_rnn_layer_backward.default:
        return args
    reverse, mode, hidden, layers, biases, train, both, sizes, batch_first = args[13:22]
    output, hy, cy, workspace = recurrent_layer(
        *args[:7], reverse, sizes, mode, hidden, layers, biases, both, batch_first, train
    )
    return (*args[:7], output, hy, cy, *args[10:22], workspace)


def untracked_bytes(call: Call) -> int:
    """Bytes inside a recurrent backward op that its fake run lacks: a second bias gradient, and a copy of the
    tangent if its real strides differ from the fake ones."""
    if call.target is not aten.mkldnn_rnn_layer_backward.default:
        return 0
    value, bias = call.args[0], call.args[3]
    return int(value.numel() * value.element_size() + bias.numel() * bias.element_size())


MEASURED_STEPS = (2, 4)
"""Sequence lengths of the two short runs that tell what eager keeps live per time step."""


def valid_batch_sizes(call: Call, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """The sample of a packed layer with valid batch sizes; other samples unchanged."""
    if call.target not in (CELLS, CELLS_BACKWARD, STACK, STACK_BACKWARD):
        return args
    at = 1 if call.target in (CELLS, STACK) else 4
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
    """Bytes that eager keeps live of a layer; the graph has an empty tensor for them."""
    if node.target is not CELLS or made is not node.meta["val"][-1]:
        return 0
    return eager_keeps_bytes(call_of(node))


def extra_inside_bytes(node: fx.Node) -> int:
    """Extra bytes live inside eager's backward of a layer: negative, since eager recomputes nothing."""
    if node.target is not CELLS_BACKWARD:
        return 0
    call = call_of(node)
    return -eager_keeps_bytes(Call(CELLS, (call.args[0], *call.args[4:11], True)))


_kept: dict[str, int] = {}


def eager_keeps_bytes(call: Call) -> int:
    """Bytes that eager's autograd keeps live of a layer from forward to backward, besides results and inputs;
    0 for any other op, and where autograd is off. Extrapolated from two short runs on real tensors: all time
    steps keep equal bytes."""
    if call.target is not CELLS or not call.args[-1]:
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
    """The same bytes of a real layer, whose input has this shape."""
    kind, value, _, hidden, weights, has_biases, bidirectional, autocast, _ = call.args
    blocks: dict[int, int] = {}

    def note(tensor: torch.Tensor) -> torch.Tensor:
        blocks[storage_key(tensor)] = tensor.untyped_storage().nbytes()
        return tensor.detach()  # a result that its own node holds would never be freed

    with dispatch.real_tensors(), torch.enable_grad(), casting(autocast, once=True):
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


def _layers_rule(kind: str, torch_rule: Callable[..., Any], *, packed: bool) -> Callable[..., Any]:
    """The rule to trace eager's op of `kind`, for padded or packed sequences; `torch_rule` is torch's own."""

    def trace(value: torch.Tensor, *args: Any) -> tuple[torch.Tensor, ...]:
        batch_sizes, rest, batch_first = (args[0], args[1:], False) if packed else (None, args[:-1], args[-1])
        hidden, params, has_biases, num_layers, dropout, train, bidirectional = rest
        if value.device.type != "cpu":
            states, options = list(hidden) if kind == "lstm" else [hidden], (*rest[2:], batch_first)
            return tuple(_stack(kind, value, batch_sizes, states, list(params), *options))
        trains = torch.is_grad_enabled()  # else eager's kernel has no workspace, and rounds differently
        whole = kind == "lstm" and trains and not packed and eager_runs_whole(value, hidden, [params])
        if whole:
            results: tuple[torch.Tensor, ...] = torch_rule(value, *args)
            return results
        value = value.transpose(0, 1) if batch_first else value
        options = (has_biases, num_layers, dropout if train else 0.0, bidirectional)
        output, *states = _layers(kind, value, batch_sizes, hidden, params, *options)
        return output.transpose(0, 1) if batch_first else output, *states

    return trace


def _cell_rule(torch_rule: Callable[..., Any]) -> Callable[..., Any]:
    """The rule to trace a single cell of a GRU; `torch_rule` is torch's own."""

    def trace(value: torch.Tensor, hidden: torch.Tensor, *weights: torch.Tensor | None) -> torch.Tensor:
        given = [weight for weight in weights if weight is not None]
        if len(given) == 3:
            result: torch.Tensor = torch_rule(value, hidden, *given)
            return result
        if value.device.type != "cpu":
            options = (len(given) == 4, 1, 0.0, False, False, False)
            return _stack(GRU_CELL, value, None, [hidden], given, *options)[0]
        cell = recurrent_cells(GRU_CELL, value, None, [hidden], given, len(given) == 4, False, *_setting())
        made: torch.Tensor = cell[0]
        return made

    return trace


def recurrent_rules() -> dict[
    dispatch.OpOverload[..., Any], Callable[[Callable[..., Any]], Callable[..., Any]]
]:
    """For each of eager's ops: a function from torch's tracing rule to ours."""
    layers = {
        op: partial(_layers_rule, kind, packed=packed)
        for kind, ops in KINDS.items()
        for op, packed in zip(ops, (False, True), strict=True)
    }
    return {**layers, aten.gru_cell.default: _cell_rule}


def _layers(  # noqa: PLR0917
    kind: str,
    value: torch.Tensor,
    batch_sizes: torch.Tensor | None,
    hidden: Any,
    params: Any,
    has_biases: bool,
    num_layers: int,
    dropout: float,
    bidirectional: bool,
) -> tuple[torch.Tensor, ...]:
    """All layers, one op each, with the dropout between them."""
    directions = 2 if bidirectional else 1
    per_layer = len(params) // num_layers
    states = list(hidden) if kind == "lstm" else [hidden]
    ends: list[Tensors] = []
    for layer in range(num_layers):
        own = [state.narrow(0, layer * directions, directions) for state in states]
        weights = list(params[layer * per_layer : (layer + 1) * per_layer])
        value, *last, _ = recurrent_cells(
            kind, value, batch_sizes, own, weights, has_biases, bidirectional, *_setting()
        )
        ends.append(last)
        if dropout and layer < num_layers - 1:
            value = torch.dropout(value, dropout, train=True)
    joined = [each[0] if num_layers == 1 else torch.cat(each) for each in zip(*ends, strict=True)]
    return value, *joined


def _stack(
    kind: str,
    value: torch.Tensor,
    sizes: torch.Tensor | None,
    hidden: Tensors,
    weights: Tensors,
    *options: Any,
) -> Tensors:
    """All layers by one op, on an accelerator; without its handle."""
    needs = [tensor.requires_grad for tensor in (value, *hidden, *weights)]
    cast = _autocast(value.device.type)
    made: Tensors = recurrent_stack(kind, value, sizes, hidden, weights, needs, *options, cast)
    return made[:-1]


def _setting() -> tuple[torch.dtype | None, bool]:
    """Autocast's dtype, and whether autograd is on: what a layer on the CPU depends on besides its inputs."""
    return _autocast(), torch.is_grad_enabled()


def _autocast(kind: str = "cpu") -> torch.dtype | None:
    """Autocast's dtype on devices of a kind, None where it is off; single cells run on the CPU alone."""
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None


def add_in_eagers_order(graph: fx.Graph) -> None:
    """A pass: let the backward op of a layer add its gradients to the sum so far, cell by cell as autograd
    does. This matters for weights and inputs that other ops use, too.

        cells_backward(earlier=[]) ── add -> sum        cells_backward(earlier=[before]) -> sum
        before ────────────────────────┘          ==>   before ─┘

    Preserves all else.
    """
    targets = (CELLS_BACKWARD, STACK_BACKWARD)
    found = [node for target in targets for node in graph.find_nodes(op="call_function", target=target)]
    for node in found:
        earlier: list[Any] = [None] * sum(node.args[3])
        for item in list(node.users):
            index = item.args[1]
            total = next(iter(item.users), None)
            if (
                len(item.users) == 1
                and total is not None
                and total.target is aten.add.Tensor
                and total.meta.get("is_gradient_acc")
                and total.args[1] is item
                and total.args[0] is not item
            ):
                earlier[index] = total.args[0]
                total.replace_all_uses_with(item)
                graph.erase_node(total)
        if any(earlier):
            node.args = (*node.args[:2], earlier, *node.args[3:])
