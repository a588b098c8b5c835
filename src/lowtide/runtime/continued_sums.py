"""Backward graphs whose sums of gradients continue those of later uses of an input.

Eager adds the gradients of a tensor one by one, from the last use to the first. Where the user's loop uses an
input of a graph after the graph (a penalty on weights, a skip around a block, another call), the graph gets
the gradient of these uses (see `torch_compat/gradient_edges`) and begins its sum with it:

    second ─┐                               so far ─ add ─┐
            add ─> gradient     ==>         second ──┘    add ─> gradient
    first ──┘                               first ────────┘
"""

import operator
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import fx

from lowtide.facts import GraphRun
from lowtide.offload.fetched_weight import fetched
from lowtide.ops.gradient_terms import is_own_sum
from lowtide.ops.recurrent_cells import CELLS_BACKWARD
from lowtide.remat import rule_named
from lowtide.runtime.rewrite import Rewritten, rewrite
from lowtide.torch_compat import aot_autograd
from lowtide.torch_compat.gradient_edges import Receiver, has_run, receivers_after, total, will_receive
from lowtide.trace.segments import Segment, edited

aten = torch.ops.aten


class _ReadInput(torch.autograd.Function):
    """Passes an input on to its graph; its `receiver` gets the gradients of later uses."""

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, place: int, view_is_used: Callable[[], None]) -> torch.Tensor:
        ctx.set_materialize_grads(False)
        will_receive(ctx, Receiver(place, value, view_is_used))
        return value

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor | None) -> Any:
        has_run(ctx)
        so_far = ctx.receiver.take()  # left where the graph did not run: only a view of the input is used
        if so_far is not None:
            gradient = so_far if gradient is None else total(so_far, gradient)
        return gradient, None, None


def with_receivers(
    function: Callable[..., Any], places: Mapping[int, Callable[[], None]]
) -> Callable[..., Any]:
    """The compiled graph `function`, whose inputs `places` pass through receivers. The functions in `places`
    are called where the loss uses a view of the input that the graph returns."""

    def call(*args: Any) -> Any:
        values = list(args)
        del args
        for place, view_is_used in places.items() if torch.is_grad_enabled() else ():
            values[place] = _ReadInput.apply(values[place], place, view_is_used)  # type: ignore[no-untyped-call]
        return function(*values)

    return call


Continued = tuple[tuple[int, bool], ...]
"""Inputs whose sum of gradients continues that of later uses, and whether the latter is sparse."""


def received(nodes: Sequence[Any]) -> tuple[Continued, list[torch.Tensor]]:
    """The gradients that later uses gave to the inputs of a graph; `nodes` come after the graph in the
    backward pass."""
    found: dict[int, torch.Tensor] = {}
    for receiver in receivers_after(nodes, lambda node: hasattr(node, "chain")):
        if (so_far := receiver.take()) is not None:
            found[receiver.place] = so_far
    continued = tuple((place, found[place].is_sparse) for place in sorted(found))
    return continued, [found[place] for place, _ in continued]


def sums_inside(segment: Segment, apart: Collection[int]) -> tuple[int, ...]:
    """Places of the inputs whose gradients the graph itself adds up, without inputs that it changes."""
    grads = segment.gradients
    if not segment.differentiable or len(grads) != len(segment.origins):
        return ()
    left_out = {*apart, *segment.mutated_inputs.values()}
    return tuple(
        place
        for place, grad in enumerate(grads)
        if grad is not None
        and place not in left_out
        and (is_own_sum(grad) or _is_of_cells(grad, segment.primals[place]))
    )


@dataclass(frozen=True, slots=True)
class ScheduledSums:
    """A graph and its schedule, from which backward graphs with continued sums are made."""

    segment: Segment
    schedule: tuple[GraphRun, ...]
    rewritten: Rewritten
    in_place: bool

    def backward(self, continued: Continued) -> fx.GraphModule:
        """The backward graph whose last inputs are the gradients so far of the inputs `continued`."""
        segment = edited(self.segment, lambda joint: _continue_sums(joint, self.segment, continued))
        schedule = _rescheduled(self.segment, segment, self.schedule)
        new = rewrite(segment, schedule, in_place=self.in_place)
        assert new.num_saved == self.rewritten.num_saved, "a continued sum reads what the forward pass saved"
        return _with_inputs(new.backward, [place for place, _ in continued])


def so_far(place: int) -> torch.Tensor:
    """An op of graphs before they are rewritten: the gradient of later uses of the input `place`."""
    raise NotImplementedError(f"the gradient of input {place} is an input of the rewritten graph")


def _is_of_cells(grad: fx.Node, primal: fx.Node) -> bool:
    """Whether a layer of cells, one op, sums the gradients of an input that it reads itself."""
    if grad.target is not operator.getitem:
        return False
    cells, index = _cells(grad)
    if cells.target is not CELLS_BACKWARD:
        return False
    arguments: Any = cells.args
    wanted, value, _sizes, hidden, weights = arguments[3:8]
    inputs = zip([value, *hidden, *weights], wanted, strict=True)
    read = [source for source, is_wanted in inputs if is_wanted]
    weight = read[index]
    return weight is primal or (weight.target is fetched and weight.args[0] is primal)


def _cells(grad: fx.Node) -> Any:
    """The op of a layer of cells, and the number of its gradient `grad`."""
    return grad.args


def _continue_sums(joint: fx.GraphModule, segment: Segment, continued: Continued) -> None:
    """A pass: begin the gradients of these inputs with `so_far`, in place. Preserves all else."""
    graph = joint.graph
    results = list(graph.output_node().args[0])  # type: ignore[arg-type]
    primals = graph.find_nodes(op="placeholder")
    names = {node.name for node in segment.backward_ops}
    first = next(node for node in graph.nodes if node.name in names)
    for place, is_sparse in continued:
        number = segment.num_forward_outputs + place
        with graph.inserting_before(first):
            start = graph.call_function(so_far, (place,))
        start.meta = {"val": primals[place].meta["val"], "partitioner_tag": "is_backward"}
        results[number] = _begun(graph, results[number], start, primals[place], is_sparse=is_sparse)
    graph.output_node().args = (results,)


def _begun(graph: fx.Graph, grad: fx.Node, start: fx.Node, primal: fx.Node, *, is_sparse: bool) -> fx.Node:
    """The gradient `grad` of the input `primal`, with `start` added to the first of its terms. torch adds a
    sparse gradient only on the right."""
    reader: fx.Node | None = None
    term: Any = grad
    begin: Callable[[fx.Node], Any] = lambda _: None  # noqa: E731 - replaced where `grad` is a sum
    while term is not None:
        if is_own_sum(term):
            reader, begin, term = term, partial(term.update_arg, 0), term.args[0]
        elif _is_of_cells(term, primal):
            reader, index = _cells(term)
            earlier = _earlier(reader)
            begin, term = partial(_begin_cells, reader, earlier, index), earlier[index]
        else:
            break
    if term is None:
        begin(start)
        return grad
    with graph.inserting_before(reader or graph.output_node()):
        begun = graph.call_function(aten.add.Tensor, (term, start) if is_sparse else (start, term))
    begun.meta = {
        "val": aten.add.Tensor(start.meta["val"], term.meta["val"]),
        "partitioner_tag": "is_backward",
        "autograd_backward": True,
    }
    begin(begun)
    return begun if reader is None else grad


def _earlier(cells: Any) -> list[fx.Node | None]:
    """The sums that a layer of cells adds its gradients to."""
    return list(cells.args[2]) or [None] * sum(cells.args[3])


def _begin_cells(cells: fx.Node, earlier: list[fx.Node | None], index: int, start: fx.Node) -> None:
    """Let a layer of cells, one op, add its gradient number `index` to `start`."""
    earlier[index] = start
    cells.update_arg(2, earlier)


def _rescheduled(old: Segment, new: Segment, schedule: Sequence[GraphRun]) -> tuple[GraphRun, ...]:
    """The schedule of the graph `old` for `new`, which has further ops of backward."""
    ops = [*old.forward_ops, *old.backward_ops]
    renewed = [*new.forward_ops, *new.backward_ops]
    position = {node: place for place, node in enumerate(renewed)}
    by_name = {node.name: node for node in renewed}
    backward = set(new.backward_ops)
    made: set[fx.Node] = set()
    runs: list[GraphRun] = []

    def run(node: fx.Node, rule: str = "") -> None:
        for source in _reads(node, rule):
            if source in backward and source not in made:
                run(source)
        made.add(node)
        runs.append(GraphRun(position[node], rule))

    for place, rule in schedule:
        run(by_name[ops[place].name], rule)
    for grad in new.gradients:
        if grad in backward and grad not in made:
            run(grad)
    return tuple(runs)


def _reads(node: fx.Node, rule: str) -> Iterator[fx.Node]:
    if not rule:
        yield from node.all_input_nodes
        return
    found: list[fx.Node] = []
    chosen = rule_named(rule)
    call = chosen.call(node, chosen.kept(node))
    fx.node.map_arg((call.args, call.kwargs), found.append)
    yield from found


def _with_inputs(module: fx.GraphModule, places: Collection[int]) -> fx.GraphModule:
    """A backward graph with an input for the gradient so far of each of `places`, after the others."""
    graph = module.graph
    ops: Mapping[int, fx.Node] = {
        node.args[0]: node for node in graph.find_nodes(op="call_function", target=so_far)
    }
    last = graph.find_nodes(op="placeholder")[-1]
    for place in sorted(places):
        with graph.inserting_after(last):
            last = graph.placeholder(f"so_far_{place}")
        last.meta = dict(ops[place].meta)
        ops[place].replace_all_uses_with(last)
        graph.erase_node(ops[place])
    return aot_autograd.graph_module(module, graph)
