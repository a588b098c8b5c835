"""Recurrent layers on accelerators: eager's own op for all layers at once, and autograd's own backward.

Eager calls cuDNN, MIOpen or fused cells there. torch traces decompositions, which round differently. Some
libraries keep reserved bytes for their backward and draw dropout masks from a state of their own. So here one
op runs eager's layers while autograd records, and keeps the recorded graph. The backward op runs that graph:

    value, hidden, weights ─ recurrent_stack ─┬─ output, states
                                              └─ handle ── recurrent_stack_backward(grads, .., handle)

The storage of the handle owns the recorded graph: both are freed together. The graph refers to inputs and
output by place, not by tensor, so that a plan can free and recompute these. All other tensors that autograd
saved belong to the handle (`bytes_behind`).

Shortcomings: layers with dropout between them run once. Weights that are not parameters stay live with the
handle.
"""

import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx
from torch.autograd.graph import GradientEdge, get_gradient_edge, saved_tensors_hooks

from lowtide.ops.calls import Call
from lowtide.ops.recurrent_cells import GRU_CELL, separate_storages
from lowtide.ops.recurrent_probe import TinyLayers, casting, result_layouts, run_stack
from lowtide.torch_compat import dispatch
from lowtide.torch_compat.autograd_engine import graph_is_kept
from lowtide.torch_compat.dispatch import FakeTensor, storage_key

HANDLE_BYTES = 8

DRAWN_ONCE = "the dropout between its layers is drawn once"
"""Why a stack with dropout is never recomputed."""


Layout = tuple[tuple[int, ...], tuple[int, ...], int]
"""Sizes, strides and storage offset."""


@dataclass(eq=False)
class _SavedTensor:
    """A tensor that autograd saved: itself, or the `place` of the given tensor whose storage it shares."""

    tensor: Tensor | None
    layout: Layout
    place: int | None = None


@dataclass
class _Given:
    """The tensors to which a graph refers by place, while its backward runs."""

    tensors: list[Tensor] = field(default_factory=list)

    def unpack(self, saved: _SavedTensor) -> Tensor:
        if saved.place is None:
            assert saved.tensor is not None
            return saved.tensor
        return self.tensors[saved.place].as_strided(*saved.layout)


class _Graph(bytearray):
    """A recorded graph, as the memory of its handle."""

    results: list[GradientEdge]
    inputs: list[GradientEdge | None]
    given: _Given
    nbytes: int


_graphs: weakref.WeakValueDictionary[int, _Graph] = weakref.WeakValueDictionary()
"""Graphs by the address of their handle's memory."""


def bytes_behind(tensor: Tensor) -> int:
    """Bytes of a storage, with those that a handle keeps live beside it."""
    nbytes = tensor.untyped_storage().nbytes()
    if isinstance(tensor, FakeTensor) or tensor.device.type != "cpu" or nbytes != HANDLE_BYTES:
        return nbytes
    graph = _graphs.get(tensor.untyped_storage().data_ptr())
    return nbytes + (graph.nbytes if graph is not None else 0)


class _Enter(torch.autograd.Function):
    """A tensor as an input of a recorded graph that does not keep the tensor live, as a leaf would."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, tensor: Tensor) -> Tensor:
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return None, None


@torch.library.custom_op("lowtide::recurrent_stack", mutates_args=())
def recurrent_stack(  # noqa: PLR0917 - an op has no keywords
    kind: str,
    value: Tensor,
    batch_sizes: Tensor | None,
    hidden: list[Tensor],
    weights: list[Tensor],
    needs: list[bool],
    has_biases: bool,
    num_layers: int,
    dropout: float,
    train: bool,
    bidirectional: bool,
    batch_first: bool,
    autocast: torch.dtype | None,
) -> list[Tensor]:
    """All layers: the result, the last states, and the handle of the recorded graph.

    `needs` says which of `(value, *hidden, *weights)` need gradients; `autocast` is autocast's dtype, None
    where autocast is off.
    """
    options = (has_biases, num_layers, dropout, train, bidirectional, batch_first)
    given = [value, *hidden, *weights]
    graph = _Graph(HANDLE_BYTES)
    graph.given, graph.results, graph.nbytes = _Given(), [], 0
    with dispatch.recording():
        entered = _entered(given, needs, states=len(hidden))
        graph.inputs = [get_gradient_edge(t) if t.requires_grad else None for t in entered]
        saved: list[weakref.ref[_SavedTensor]] = []

        def pack(tensor: Tensor) -> _SavedTensor:
            layout = (tuple(tensor.shape), tensor.stride(), int(tensor.storage_offset()))
            made = _SavedTensor(tensor.detach(), layout)
            saved.append(weakref.ref(made))
            return made

        states = entered[1 : 1 + len(hidden)]
        with casting(value.device, autocast), saved_tensors_hooks(pack, graph.given.unpack):
            results = run_stack(kind, entered[0], batch_sizes, states, entered[1 + len(hidden) :], options)
        del entered, states
        if results[0].requires_grad:
            graph.results = [get_gradient_edge(result) for result in results]
    graph.nbytes = _refer_by_place([*given, results[0]], [ref() for ref in saved])
    handle = torch.frombuffer(graph, dtype=torch.uint8)
    _graphs[handle.untyped_storage().data_ptr()] = graph
    return [*separate_storages([result.detach() for result in results]), handle]


def _entered(given: Sequence[Tensor], needs: Sequence[bool], *, states: int) -> list[Tensor]:
    """The tensors as autograd sees them. Weights are leaves, of which autocast caches its casts."""
    anchor = torch.empty(0, requires_grad=True)
    entered = []
    for place, (tensor, needed) in enumerate(zip(given, needs, strict=True)):
        if not needed:
            entered.append(tensor.detach())
        elif place > states:
            entered.append(tensor.detach().requires_grad_())
        else:
            entered.append(_Enter.apply(anchor, tensor.detach()))  # type: ignore[no-untyped-call]
    return entered


def _refer_by_place(given: Sequence[Tensor], saved: Sequence[_SavedTensor | None]) -> int:
    """Let saved tensors that share a storage with a given one refer to its place; bytes of the others."""
    places = {storage_key(tensor): place for place, tensor in enumerate(given)}
    own: dict[int, int] = {}
    for each in saved:
        if each is None or each.tensor is None:
            continue
        key = storage_key(each.tensor)
        if key in places:
            each.place, each.tensor = places[key], None
        else:
            own[key] = each.tensor.untyped_storage().nbytes()
    return sum(own.values())


@torch.library.custom_op("lowtide::recurrent_stack_backward", mutates_args=())
def recurrent_stack_backward(  # noqa: PLR0917 - an op has no keywords
    kind: str,
    grads: list[Tensor | None],
    earlier: list[Tensor | None],
    wanted: list[bool],
    value: Tensor,
    batch_sizes: Tensor | None,
    hidden: list[Tensor],
    weights: list[Tensor],
    needs: list[bool],
    has_biases: bool,
    num_layers: int,
    dropout: float,
    train: bool,
    bidirectional: bool,
    batch_first: bool,
    autocast: torch.dtype | None,
    output: Tensor,
    handle: Tensor,
) -> list[Tensor]:
    """The `wanted` gradients of `(value, *hidden, *weights)`, in this order.

    `earlier`, if not empty, has for each of them the sum of gradients so far, to which autograd adds.
    """
    graph = _graphs[handle.untyped_storage().data_ptr()]
    given = [value, *hidden, *weights]
    places = [place for place, needed in enumerate(wanted) if needed]
    inputs = [graph.inputs[place] for place in places]
    roots = [pair for pair in zip(graph.results, grads, strict=True) if pair[1] is not None]
    # autograd hands the sums out first
    roots += [pair for pair in zip(inputs, earlier, strict=False) if pair[1] is not None]  # type: ignore[misc]
    graph.given.tensors = [*given, output]
    try:
        # in this thread: autograd's own would free its tensors some time later
        with torch.autograd.set_multithreading_enabled(False):
            found = torch.autograd.grad(
                [edge for edge, _ in roots],
                inputs,  # type: ignore[arg-type]
                [grad for _, grad in roots],
                retain_graph=graph_is_kept(),
                allow_unused=True,
            )
    finally:
        graph.given.tensors = []
    filled = zip(found, places, strict=True)
    gradients = [torch.zeros_like(given[place]) if grad is None else grad for grad, place in filled]
    keys = {storage_key(tensor) for tensor in (*given, *(grad for _, grad in roots if grad is not None))}
    return separate_storages([grad.clone() if storage_key(grad) in keys else grad for grad in gradients])


@recurrent_stack.register_fake
def _fake_stack(  # noqa: PLR0917
    kind: str,
    value: Tensor,
    batch_sizes: Tensor | None,
    hidden: list[Tensor],
    weights: list[Tensor],
    needs: list[bool],
    *options: Any,
) -> list[Tensor]:
    has_biases, num_layers, _dropout, train, bidirectional, batch_first, autocast = options
    handle = torch.empty(HANDLE_BYTES, dtype=torch.uint8, device="cpu")
    tiny = TinyLayers(
        kind=kind,
        device=str(value.device),
        dtypes=tuple(tensor.dtype for tensor in (value, *hidden, *weights)),
        has_biases=has_biases,
        num_layers=num_layers,
        train=train,
        bidirectional=bidirectional,
        batch_first=batch_first,
        packed=batch_sizes is not None,
        projects=len(hidden) > 1 and hidden[0].shape[-1] != hidden[1].shape[-1],
        autocast=autocast,
    )
    probed = result_layouts(tiny)
    if kind == GRU_CELL:
        return [torch.empty_like(hidden[0], dtype=probed[0][0]), handle]
    width = hidden[0].shape[-1] * (2 if bidirectional else 1)
    shapes = [(*value.shape[:-1], width), *(state.shape for state in hidden)]
    results = [
        value.new_empty([shape[dim] for dim in order], dtype=dtype).permute(_inverse(order))
        for shape, (dtype, order) in zip(shapes, probed, strict=True)
    ]
    return [*results, handle]


def _inverse(order: Sequence[int]) -> list[int]:
    return [order.index(dim) for dim in range(len(order))]


@recurrent_stack_backward.register_fake
def _fake_backward(
    _kind: str, _grads: Any, _earlier: Any, wanted: list[bool], value: Tensor, *rest: Any
) -> list[Tensor]:
    _sizes, hidden, weights = rest[:3]
    inputs = zip([value, *hidden, *weights], wanted, strict=True)
    return [torch.empty_like(tensor) for tensor, needed in inputs if needed]


def _remember(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    kind, value, batch_sizes, hidden, weights, *options = inputs
    ctx.set_materialize_grads(False)
    ctx.kind, ctx.options, ctx.states = kind, options, len(hidden)
    ctx.save_for_backward(value, batch_sizes, output[0], output[-1], *hidden, *weights)


def _differentiate(ctx: Any, grads: list[Tensor | None]) -> tuple[Any, ...]:
    value, batch_sizes, output, handle, *rest = ctx.saved_tensors
    hidden, weights = rest[: ctx.states], rest[ctx.states :]
    _, needs_value, _, needs_hidden, needs_weights, *others = ctx.needs_input_grad
    wanted = [needs_value, *needs_hidden, *needs_weights]
    if all(grad is None for grad in grads[:-1]) or not any(wanted):
        return None, None, None, None, None, *(None for _ in others)
    inputs = (value, batch_sizes, hidden, weights, *ctx.options)
    found = iter(recurrent_stack_backward(ctx.kind, list(grads[:-1]), [], wanted, *inputs, output, handle))
    each = [next(found) if needed else None for needed in wanted]
    states = each[1 : 1 + ctx.states]
    return None, each[0], None, states, each[1 + ctx.states :], *(None for _ in others)


recurrent_stack.register_autograd(_differentiate, setup_context=_remember)

STACK = torch.ops.lowtide.recurrent_stack.default
STACK_BACKWARD = torch.ops.lowtide.recurrent_stack_backward.default


def draws_dropout(node: fx.Node) -> bool:
    """Whether recurrent layers draw dropout masks between them."""
    if node.target is not STACK:
        return False
    num_layers, dropout, train = node.args[7:10]
    return bool(train and dropout and num_layers != 1)


def with_recorded_graph(call: Call, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """The sample of a backward op with a graph to run; other samples unchanged."""
    if call.target is not STACK_BACKWARD or isinstance(args[4], FakeTensor):
        return args
    output, *_, handle = STACK(args[0], *args[4:-2])
    return (*args[:-2], output, handle)
