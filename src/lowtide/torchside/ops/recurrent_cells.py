"""Recurrent layers that eager computes cell by cell in C++ (GRU, RNN, an LSTM with projections or of packed
sequences), as one op per layer.

torch's decompositions of them round otherwise than eager's cells, which work in place, and are a thousand
nodes for a sentence. Here one op runs eager's own layer, and its backward op runs that layer again under
autograd and differentiates it: exact by construction. What eager keeps meanwhile is counted for it.

Shortcomings: a layer is run twice, also where memory is plenty; CPU only; under autocast a layer that is
called several times casts its weights each time, so that their gradients can differ in the last bits.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import fx

from lowtide.torchside import hooks
from lowtide.torchside.calls import Call, call_of, signature, storage_key
from lowtide.torchside.ops.recurrent import eager_runs_whole

Tensors = list[torch.Tensor]

aten = torch.ops.aten

KINDS = {
    "gru": (aten.gru.input, aten.gru.data),
    "rnn_tanh": (aten.rnn_tanh.input, aten.rnn_tanh.data),
    "rnn_relu": (aten.rnn_relu.input, aten.rnn_relu.data),
    "lstm": (aten.lstm.input, aten.lstm.data),
}
"""Eager's ops of each kind: for padded and for packed sequences."""

MEASURED_STEPS = (2, 4)
"""Steps of the two short runs that tell what eager keeps per step."""


@torch.library.custom_op("lowtide::recurrent_cells", mutates_args=())
def recurrent_cells(  # noqa: PLR0917 - an op has no keywords
    kind: str,
    value: torch.Tensor,
    batch_sizes: torch.Tensor | None,
    hidden: list[torch.Tensor],
    weights: list[torch.Tensor],
    has_biases: bool,
    bidirectional: bool,
    autocast: torch.dtype | None,
) -> list[torch.Tensor]:
    """One layer: its result, its last states, and an empty tensor in place of all that eager keeps.

    `value` has time first; `autocast` is the type that autocast computes in, None where it is off.
    """
    with torch.no_grad(), _casting(autocast, once=False):
        results = _layer(kind, value, batch_sizes, hidden, weights, has_biases, bidirectional)
    return [*results, value.new_empty(0)]


@torch.library.custom_op("lowtide::recurrent_cells_backward", mutates_args=())
def recurrent_cells_backward(  # noqa: PLR0917 - an op has no keywords
    kind: str,
    grads: list[torch.Tensor | None],
    earlier: list[torch.Tensor | None],
    wanted: list[bool],
    value: torch.Tensor,
    batch_sizes: torch.Tensor | None,
    hidden: list[torch.Tensor],
    weights: list[torch.Tensor],
    has_biases: bool,
    bidirectional: bool,
    autocast: torch.dtype | None,
    kept: torch.Tensor,
) -> list[torch.Tensor]:
    """Those gradients of `(value, *hidden, *weights)` that are `wanted`, in this order.

    `earlier` has, for each of these, the sum of gradients that autograd had before, which eager adds to
    one by one; it may be empty.
    """
    states = len(hidden)
    with hooks.recording():
        inputs = [
            tensor.detach().requires_grad_(needed)
            for tensor, needed in zip([value, *hidden, *weights], wanted, strict=True)
        ]
        with _casting(autocast, once=True):
            results = _layer(
                kind,
                inputs[0],
                batch_sizes,
                inputs[1 : 1 + states],
                inputs[1 + states :],
                has_biases,
                bidirectional,
            )
        leaves = [leaf for leaf, needed in zip(inputs, wanted, strict=True) if needed]
        given = [pair for pair in zip(results, grads, strict=True) if pair[1] is not None]
        # made last, so that autograd differentiates them first
        given += [
            (leaf.view_as(leaf), sum_so_far)
            for leaf, sum_so_far in zip(leaves, earlier, strict=False)
            if sum_so_far is not None
        ]
        del results, inputs
    outputs = [result for result, _ in given]
    return _apart(
        list(torch.autograd.grad(outputs, leaves, [grad for _, grad in given], materialize_grads=True))
    )


def _apart(gradients: Tensors) -> Tensors:
    """Each with a storage of its own, as an op has to give them."""
    seen: set[int] = set()
    for index, gradient in enumerate(gradients):
        if storage_key(gradient) in seen:
            gradients[index] = gradient.clone()
        seen.add(storage_key(gradients[index]))
    return gradients


def _casting(dtype: torch.dtype | None, *, once: bool) -> torch.autocast:
    return torch.autocast("cpu", dtype=dtype, enabled=dtype is not None, cache_enabled=once)


def _layer(  # noqa: PLR0917 - what an op of eager takes
    kind: str,
    value: torch.Tensor,
    batch_sizes: torch.Tensor | None,
    hidden: Tensors,
    weights: Tensors,
    has_biases: bool,
    bidirectional: bool,
) -> Tensors:
    """Eager's own layer: its result and its last states."""
    padded, packed = KINDS[kind]
    states = hidden if kind == "lstm" else hidden[0]
    options = (weights, has_biases, 1, 0.0, True, bidirectional)
    if batch_sizes is None:
        return list(padded(value, states, *options, False))
    return list(packed(value, batch_sizes, states, *options))


@recurrent_cells.register_fake
def _fake_cells(  # noqa: PLR0917 - an op has no keywords
    kind: str,
    value: torch.Tensor,
    batch_sizes: torch.Tensor | None,
    hidden: Tensors,
    weights: Tensors,
    has_biases: bool,
    bidirectional: bool,
    autocast: torch.dtype | None,
) -> Tensors:
    directions = 2 if bidirectional else 1
    dtypes = _result_types(kind, value, hidden, weights, has_biases=has_biases, autocast=autocast)
    output = value.new_empty((*value.shape[:-1], hidden[0].shape[2] * directions), dtype=dtypes[0])
    states = [torch.empty_like(state, dtype=dtype) for state, dtype in zip(hidden, dtypes[1:], strict=True)]
    return [output, *states, value.new_empty(0)]


def _result_types(
    kind: str,
    value: torch.Tensor,
    hidden: Tensors,
    weights: Tensors,
    *,
    has_biases: bool,
    autocast: torch.dtype | None,
) -> list[torch.dtype]:
    """The types of a layer's results, from a real one of one cell of width 1."""
    gates = {"gru": 3, "lstm": 4}.get(kind, 1)
    per_direction = 4 if has_biases else 2
    with hooks.real_tensors(), _casting(autocast, once=False):
        tiny = [
            torch.zeros((gates, 1) if weight.dim() == 2 else (gates,), dtype=weight.dtype)
            for weight in weights[:per_direction]
        ]
        states = [torch.zeros((1, 1, 1), dtype=state.dtype) for state in hidden]
        results = _layer(
            kind, torch.zeros((1, 1, 1), dtype=value.dtype), None, states, tiny, has_biases, False
        )
    return [result.dtype for result in results]


@recurrent_cells_backward.register_fake
def _fake_backward(  # noqa: PLR0917 - an op has no keywords
    kind: str,
    grads: list[torch.Tensor | None],
    earlier: list[torch.Tensor | None],
    wanted: list[bool],
    value: torch.Tensor,
    batch_sizes: torch.Tensor | None,
    hidden: Tensors,
    weights: Tensors,
    has_biases: bool,
    bidirectional: bool,
    autocast: torch.dtype | None,
    kept: torch.Tensor,
) -> Tensors:
    inputs = zip([value, *hidden, *weights], wanted, strict=True)
    return [torch.empty_like(tensor) for tensor, needed in inputs if needed]


def _remember(ctx: Any, inputs: tuple[Any, ...], output: Tensors) -> None:
    kind, value, batch_sizes, hidden, weights, *options = inputs
    ctx.set_materialize_grads(False)
    ctx.kind, ctx.options, ctx.states = kind, options, len(hidden)
    ctx.save_for_backward(value, batch_sizes, output[-1], *hidden, *weights)


def _differentiate(ctx: Any, grads: list[torch.Tensor | None]) -> tuple[Any, ...]:
    value, batch_sizes, kept, *rest = ctx.saved_tensors
    hidden, weights = rest[: ctx.states], rest[ctx.states :]
    _, needs_value, _, needs_hidden, needs_weights, *_ = ctx.needs_input_grad
    wanted = [needs_value, *needs_hidden, *needs_weights]
    if all(grad is None for grad in grads[:-1]) or not any(wanted):
        return (None,) * 8
    found = iter(
        recurrent_cells_backward(
            ctx.kind, list(grads[:-1]), [], wanted, value, batch_sizes, hidden, weights, *ctx.options, kept
        )
    )
    each = [next(found) if needed else None for needed in wanted]
    return None, each[0], None, each[1 : 1 + ctx.states], each[1 + ctx.states :], None, None, None


recurrent_cells.register_autograd(_differentiate, setup_context=_remember)

CELLS = torch.ops.lowtide.recurrent_cells.default
CELLS_BACKWARD = torch.ops.lowtide.recurrent_cells_backward.default


def cells_of(kind: str, torchs: Callable[..., Any]) -> Callable[..., Any]:
    """How to trace eager's op of `kind` for padded sequences; `torchs` is how torch does."""

    def trace(  # noqa: PLR0917 - torch calls it so
        value: torch.Tensor,
        hidden: Any,
        params: Any,
        has_biases: bool,
        num_layers: int,
        dropout: float,
        train: bool,
        bidirectional: bool,
        batch_first: bool,
    ) -> tuple[torch.Tensor, ...]:
        whole = kind == "lstm" and eager_runs_whole(value, hidden, [params])
        if whole or value.device.type != "cpu":
            options = (has_biases, num_layers, dropout, train, bidirectional, batch_first)
            results: tuple[torch.Tensor, ...] = torchs(value, hidden, params, *options)
            return results
        value = value.transpose(0, 1) if batch_first else value
        rate = dropout if train else 0.0
        output, *states = _layers(
            kind, value, None, hidden, params, has_biases, num_layers, rate, bidirectional
        )
        return output.transpose(0, 1) if batch_first else output, *states

    return trace


def packed_cells_of(kind: str, torchs: Callable[..., Any]) -> Callable[..., Any]:
    """The same for packed sequences."""

    def trace(  # noqa: PLR0917 - torch calls it so
        value: torch.Tensor,
        batch_sizes: torch.Tensor,
        hidden: Any,
        params: Any,
        has_biases: bool,
        num_layers: int,
        dropout: float,
        train: bool,
        bidirectional: bool,
    ) -> tuple[torch.Tensor, ...]:
        if value.device.type != "cpu":
            options = (has_biases, num_layers, dropout, train, bidirectional)
            results: tuple[torch.Tensor, ...] = torchs(value, batch_sizes, hidden, params, *options)
            return results
        rate = dropout if train else 0.0
        return _layers(kind, value, batch_sizes, hidden, params, has_biases, num_layers, rate, bidirectional)

    return trace


def ways_to_trace() -> dict[hooks.OpOverload[..., Any], Callable[[Callable[..., Any]], Callable[..., Any]]]:
    """For each of eager's ops, from torch's way to trace it to ours."""
    padded = {ops[0]: partial(cells_of, kind) for kind, ops in KINDS.items()}
    packed = {ops[1]: partial(packed_cells_of, kind) for kind, ops in KINDS.items()}
    return {**padded, **packed}


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
    autocast = torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else None
    ends: list[Tensors] = []
    for layer in range(num_layers):
        own = [state.narrow(0, layer * directions, directions) for state in states]
        weights = list(params[layer * per_layer : (layer + 1) * per_layer])
        value, *last, _ = recurrent_cells(
            kind, value, batch_sizes, own, weights, has_biases, bidirectional, autocast
        )
        ends.append(last)
        if dropout and layer < num_layers - 1:
            value = torch.dropout(value, dropout, train=True)
    joined = [each[0] if num_layers == 1 else torch.cat(each) for each in zip(*ends, strict=True)]
    return value, *joined


def add_in_eagers_order(graph: fx.Graph) -> None:
    """Let the backward of a layer add its gradients to the sum that was there before, one cell after the
    other as autograd does, where a weight or an input is used elsewhere as well; preserves all else."""
    for node in graph.find_nodes(op="call_function", target=CELLS_BACKWARD):
        earlier: list[fx.Node | None] = [None] * sum(node.args[3])
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
        value, batch_sizes, hidden = call.args[1:4]
        batch = int(hidden[0].shape[1])
        rows = int(value.shape[0]) if batch_sizes is not None else int(value.shape[0]) * batch
        few, more = (_kept_bytes(call, steps) for steps in MEASURED_STEPS)
        per_row = (more - few) / (batch * (MEASURED_STEPS[1] - MEASURED_STEPS[0]))
        _kept[name] = round(few + per_row * (rows - batch * MEASURED_STEPS[0]))
    return _kept[name]


def _kept_bytes(call: Call, steps: int) -> int:
    kind, value, _, hidden, weights, has_biases, bidirectional, autocast = call.args
    blocks: dict[int, int] = {}

    def note(tensor: torch.Tensor) -> torch.Tensor:
        blocks[storage_key(tensor)] = tensor.untyped_storage().nbytes()
        return tensor

    with hooks.real_tensors(), torch.enable_grad(), _casting(autocast, once=True):
        shape = (steps, hidden[0].shape[1], value.shape[-1])
        inputs = [torch.zeros(shape, dtype=value.dtype)]
        inputs += [torch.zeros(tensor.shape, dtype=tensor.dtype) for tensor in (*hidden, *weights)]
        for tensor in inputs:
            tensor.requires_grad_()
        with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
            states, parameters = inputs[1 : 1 + len(hidden)], inputs[1 + len(hidden) :]
            results = _layer(kind, inputs[0], None, states, parameters, has_biases, bidirectional)
        for tensor in (*inputs, *results):
            blocks.pop(storage_key(tensor), None)
    return sum(blocks.values())
