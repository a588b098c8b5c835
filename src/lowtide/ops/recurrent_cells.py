"""Recurrent layers that eager computes cell by cell in C++ (GRU, RNN, an LSTM with projections or of packed
sequences), or where autograd is off, as one op per layer; and the single cell of a GRU.

torch's decompositions round differently from eager's cells, which work in place, and have a thousand nodes
for a sentence. Here one op runs eager's own layer. Its backward op recomputes that layer under autograd and
differentiates it: exact by construction. The bytes that eager keeps live meanwhile count for eager only.

Shortcomings: a layer always runs twice, even where memory is plenty. CPU only. Under autocast, a layer that
is called several times casts its weights each time, so that their gradients can differ in the last bits.
"""

from typing import Any

import torch

from lowtide.torch_compat import dispatch
from lowtide.torch_compat.dispatch import storage_key

Tensors = list[torch.Tensor]

aten = torch.ops.aten

KINDS = {
    "gru": (aten.gru.input, aten.gru.data),
    "rnn_tanh": (aten.rnn_tanh.input, aten.rnn_tanh.data),
    "rnn_relu": (aten.rnn_relu.input, aten.rnn_relu.data),
    "lstm": (aten.lstm.input, aten.lstm.data),
}
"""Eager's ops of each kind: for padded and for packed sequences."""

GRU_CELL = "gru_cell"
"""The kind of a single cell: one result, no time dimension."""


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
    records: bool,
) -> list[torch.Tensor]:
    """One layer: its result, its last states, and an empty tensor for the bytes that eager keeps live.

    `value` has time first; `autocast` is autocast's dtype, None where autocast is off. `records`: whether
    autograd is on where the model calls the layer. An LSTM's kernels round differently where it is off.
    """
    with torch.set_grad_enabled(records), dispatch.below_autograd(), casting(autocast, once=False):
        results = run_layer(kind, value, batch_sizes, hidden, weights, has_biases, bidirectional)
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
    """The `wanted` gradients of `(value, *hidden, *weights)`, in this order.

    `earlier`, if not empty, has for each of them the sum of gradients so far. Eager adds each cell's gradient
    to this sum.
    """
    states = len(hidden)
    with dispatch.recording():
        inputs = [
            tensor.detach().requires_grad_(needed)
            for tensor, needed in zip([value, *hidden, *weights], wanted, strict=True)
        ]
        with casting(autocast, once=True):
            results = run_layer(
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
    return separate_storages(
        list(torch.autograd.grad(outputs, leaves, [grad for _, grad in given], materialize_grads=True))
    )


def separate_storages(gradients: Tensors) -> Tensors:
    """The gradients, each in its own storage, as an op must return them."""
    seen: set[int] = set()
    for index, gradient in enumerate(gradients):
        if storage_key(gradient) in seen:
            gradients[index] = gradient.clone()
        seen.add(storage_key(gradients[index]))
    return gradients


def casting(dtype: torch.dtype | None, *, once: bool) -> torch.autocast:
    return torch.autocast("cpu", dtype=dtype, enabled=dtype is not None, cache_enabled=once)


def run_layer(  # noqa: PLR0917 - what an op of eager takes
    kind: str,
    value: torch.Tensor,
    batch_sizes: torch.Tensor | None,
    hidden: Tensors,
    weights: Tensors,
    has_biases: bool,
    bidirectional: bool,
) -> Tensors:
    """Eager's own layer: its result and its last states."""
    if kind == GRU_CELL:
        return [aten.gru_cell(value, hidden[0], *weights)]
    padded, packed = KINDS[kind]
    states = hidden if kind == "lstm" else hidden[0]
    options = (weights, has_biases, 1, 0.0, True, bidirectional)
    if batch_sizes is None:
        return list(padded(value, states, *options, False))
    return list(packed(value, batch_sizes, states, *options))


@recurrent_cells.register_fake
def _fake_cells(
    kind: str, value: torch.Tensor, sizes: Any, hidden: Tensors, weights: Tensors, *options: Any
) -> Tensors:
    has_biases, bidirectional, autocast, _records = options
    directions = 2 if bidirectional else 1
    dtypes = _result_types(
        kind, value, hidden, weights, packed=sizes is not None, has_biases=has_biases, autocast=autocast
    )
    if kind == GRU_CELL:
        return [torch.empty_like(hidden[0], dtype=dtypes[0]), value.new_empty(0)]
    output = value.new_empty((*value.shape[:-1], hidden[0].shape[2] * directions), dtype=dtypes[0])
    states = [torch.empty_like(state, dtype=dtype) for state, dtype in zip(hidden, dtypes[1:], strict=True)]
    return [output, *states, value.new_empty(0)]


def _result_types(
    kind: str,
    value: torch.Tensor,
    hidden: Tensors,
    weights: Tensors,
    *,
    packed: bool,
    has_biases: bool,
    autocast: torch.dtype | None,
) -> list[torch.dtype]:
    """The dtypes of a layer's results, from a real layer of one cell of width 1."""
    gates = {"gru": 3, GRU_CELL: 3, "lstm": 4}.get(kind, 1)
    per_direction = 4 if has_biases else 2
    with dispatch.real_tensors(), casting(autocast, once=False):
        tiny = [
            torch.zeros((gates, 1) if weight.dim() == 2 else (gates,), dtype=weight.dtype)
            for weight in weights[:per_direction]
        ]
        states = [torch.zeros((1,) * state.dim(), dtype=state.dtype) for state in hidden]
        sample = torch.zeros((1,) * value.dim(), dtype=value.dtype)
        sizes = torch.ones(1, dtype=torch.int64) if packed else None
        results = run_layer(kind, sample, sizes, states, tiny, has_biases, False)
    return [result.dtype for result in results]


@recurrent_cells_backward.register_fake
def _fake_backward(_kind: str, _grads: Any, _earlier: Any, wanted: list[bool], *rest: Any) -> Tensors:
    value, _sizes, hidden, weights = rest[:4]
    inputs = zip([value, *hidden, *weights], wanted, strict=True)
    return [torch.empty_like(tensor) for tensor, needed in inputs if needed]


def _remember(ctx: Any, inputs: tuple[Any, ...], output: Tensors) -> None:
    kind, value, batch_sizes, hidden, weights, *options, _records = inputs
    ctx.set_materialize_grads(False)
    ctx.kind, ctx.options, ctx.states = kind, options, len(hidden)
    ctx.save_for_backward(value, batch_sizes, output[-1], *hidden, *weights)


def _differentiate(ctx: Any, grads: list[torch.Tensor | None]) -> tuple[Any, ...]:
    value, batch_sizes, kept, *rest = ctx.saved_tensors
    hidden, weights = rest[: ctx.states], rest[ctx.states :]
    _, needs_value, _, needs_hidden, needs_weights, *_ = ctx.needs_input_grad
    wanted = [needs_value, *needs_hidden, *needs_weights]
    if all(grad is None for grad in grads[:-1]) or not any(wanted):
        return (None,) * 9
    found = iter(
        recurrent_cells_backward(
            ctx.kind, list(grads[:-1]), [], wanted, value, batch_sizes, hidden, weights, *ctx.options, kept
        )
    )
    each = [next(found) if needed else None for needed in wanted]
    return None, each[0], None, each[1 : 1 + ctx.states], each[1 + ctx.states :], None, None, None, None


recurrent_cells.register_autograd(_differentiate, setup_context=_remember)

CELLS = torch.ops.lowtide.recurrent_cells.default
CELLS_BACKWARD = torch.ops.lowtide.recurrent_cells_backward.default
