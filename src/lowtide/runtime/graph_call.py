"""Nodes of autograd between the model's tensors and a planned graph; they pass tensors on unchanged.

Each input of a graph may pass through nodes of autograd that do nothing in the forward pass and see its
gradient in the backward pass:

    weight ─ autocast cache ─ gradient terms (ops/gradient_terms) ─ gradient handover ─ graph

**Autocast cache.** Eager casts a weight once in a block of autocast. Where a block has several calls before a
backward pass, eager adds up their gradients in the dtype of the one cast; graphs, each of which casts for
itself, would add them up in the weight's own dtype. So the node of a later call reads the node of the
call before: autograd adds the two gradients there, and the node rounds the sum as eager does.

**Gradient handover.** A graph's backward pass is one node of autograd, whose gradients all arrive at its end.
DistributedDataParallel, which sends each bucket as soon as it is full, would wait until then. So inputs pass
through a chain of gates. The graph's own node runs up to the first gradients and returns. Each gate runs the
graph on to the gradients of its own inputs and returns them. Sums and hooks are autograd's.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple, Protocol

import torch
from torch import fx

from lowtide.ops.direct import hand_over
from lowtide.torch_compat import aot_autograd, autograd_engine
from lowtide.torch_compat.dtensor import whole_of
from lowtide.torch_compat.gradient_edges import has_run, inside_planned_graph, will_cast
from lowtide.trace.segments import Segment, results_of

Groups = tuple[tuple[int, ...], ...]
"""Inputs of a graph in the order of their gradients; the gradients of one group are final together."""


class GradientGates(NamedTuple):
    """The inputs of each gate, and the inputs that get no gradient under any loss."""

    groups: Groups
    without_gradient: tuple[int, ...]
    num_inputs: int


class Gates(Protocol):
    """The gradients that each part of a backward pass returns, the first part by the graph's own node."""

    @property
    def groups(self) -> tuple[tuple[Any, ...], ...]: ...

    @property
    def num_inputs(self) -> int: ...


class Chain:
    """The shared state of one call's gates: the rest of a backward pass that has begun."""

    def __init__(self, gates: Gates) -> None:
        self.gates = gates
        self._rest: Iterator[None] | None = None
        self._box: list[Any] = []
        self._group = 0
        self._autocast = False

    def begin(self, parts: Callable[[list[Any]], Iterator[None]], args: list[Any]) -> list[Any]:
        """The gradients that the graph's own node returns; all others are missing so far."""
        args.append(self._box)
        self._group, self._rest = 0, parts(args)
        self._autocast = autograd_engine.autocast_is_on()
        results: list[Any] = [None] * self.gates.num_inputs
        for index, gradient in zip(self.gates.groups[0], self._advance(), strict=True):
            results[index] = gradient
        return results

    def next_gradients(self) -> list[Any] | None:
        """The gradients of the next gate; None where the graph's own node has returned all."""
        if self._rest is None:
            return None
        with autograd_engine.autocast_off() if not self._autocast else nullcontext():
            return self._advance()

    def _advance(self) -> list[Any]:
        assert self._rest is not None
        with inside_planned_graph():
            next(self._rest)
            self._group += 1
            if self._group == len(self.gates.groups):
                next(self._rest, None)  # run the ops after the last gradients
                self._rest = None
        gradients = self._box[:]
        self._box.clear()
        return gradients


class _Gate(torch.autograd.Function):
    """Passes its inputs on, after a token that orders the gates."""

    @staticmethod
    def forward(ctx: Any, chain: Chain, _token: torch.Tensor | None, *values: torch.Tensor) -> Any:
        ctx.chain = chain
        ctx.set_materialize_grads(False)
        return (values[0].new_empty(0), *values)

    @staticmethod
    def backward(ctx: Any, token: Any, *given: Any) -> Any:
        gradients = ctx.chain.next_gradients()
        if gradients is not None:
            # autograd copies a gradient that is still referenced here
            given = tuple(_sum(gradients.pop(0), other) for other in given)
        return (None, token, *given)


def _sum(gradient: torch.Tensor | None, given: torch.Tensor | None) -> torch.Tensor | None:
    """`given` comes from readers of an input beside the graph."""
    if gradient is None or given is None:
        return gradient if given is None else given
    return gradient + given


def gates_of(segment: Segment, backward: fx.GraphModule, *, num_inputs: int) -> GradientGates | None:
    """The gates of a graph by its `backward`; None where all gradients are final at once."""
    possible = segment.gradients
    grads = results_of(backward)
    changed = set(segment.mutated_inputs.values())
    if len(grads) != num_inputs or any(possible[index] is not None for index in changed):
        return None
    groups = _in_eagers_order(segment, [index for index, grad in enumerate(grads) if grad is not None])
    if len(groups) < 2:
        return None
    never = tuple(index for index, grad in enumerate(possible) if grad is None)
    return GradientGates(groups, never, num_inputs)


def _in_eagers_order(segment: Segment, inputs: list[int]) -> Groups:
    """Group inputs as autograd finishes their gradients: op by op from the end. The gradient of an input is
    final after the first op that reads the input; inputs of one op are one group."""
    primals = segment.joint.graph.find_nodes(op="placeholder")
    ops = segment.forward_ops
    first: dict[fx.Node, tuple[int, int]] = {}
    for position, node in enumerate(ops):
        if node.target is not torch.ops.aten.detach.default:
            for place, source in enumerate(node.all_input_nodes):
                first.setdefault(source, (-position, place))
    groups: dict[int, list[int]] = {}
    for index in sorted(inputs, key=lambda index: (first.get(primals[index], (-len(ops), 0)), index)):
        groups.setdefault(first.get(primals[index], (-len(ops), 0))[0], []).append(index)
    return tuple(map(tuple, groups.values()))


def _readers(grad: fx.Node) -> list[fx.Node]:
    return [user for user in grad.users if user.op != "output"]


def with_handover(function: Callable[..., Any], gates: GradientGates) -> Callable[..., Any]:
    """Call `function`, a compiled graph, with its inputs behind gates."""

    def call(*args: Any) -> Any:
        chain, token, values = Chain(gates), None, list(args)
        # in reverse: autograd runs the last gate first
        for group in reversed(gates.groups[1:]):
            token, *passed = _Gate.apply(chain, token, *(args[index] for index in group))  # type: ignore[no-untyped-call]
            for index, value in zip(group, passed, strict=True):
                values[index] = value
        for index in gates.without_gradient:
            if isinstance(values[index], torch.Tensor):
                values[index] = values[index].detach()
        return function(*values)

    return call


def waiting_chain(gates: Sequence[Gates]) -> Chain | None:
    """The chain of gates that runs the rest of the backward pass that begins now.

    None where there is none, and where another backward pass may follow and needs all gradients again.
    """
    if autograd_engine.graph_is_kept():
        return None
    nodes = [
        node for node in autograd_engine.nodes_after_this() if isinstance(getattr(node, "chain", None), Chain)
    ]
    own = [node for node in nodes if any(node.chain.gates is each for each in gates)]
    # an input may have gates of an earlier call
    return max(own, key=autograd_engine.creation_order).chain if own else None


def with_handovers(backward: fx.GraphModule, groups: Groups) -> fx.GraphModule:
    """A copy of a backward graph that hands over each group of gradients as soon as it is final. Its last
    input is the box for the gradients."""
    graph = fx.Graph()
    new: dict[fx.Node, fx.Node] = {}
    results = graph.graph_copy(backward.graph, new)
    assert isinstance(results, (list, tuple))
    position = {node: index for index, node in enumerate(graph.nodes)}
    inputs = graph.find_nodes(op="placeholder")
    with graph.inserting_after(inputs[-1]) if inputs else graph.inserting_before():
        box = graph.placeholder("box")
    position[box], last = len(inputs) - 1, box
    for group in groups:
        gradients = [results[index] for index in group]
        made = [node for node in gradients if isinstance(node, fx.Node)]
        read = [reader for node in made for reader in _readers(node) if reader in position]
        latest = max([last, *made, *read], key=position.__getitem__)
        with graph.inserting_after(latest):
            last = graph.call_function(hand_over, (box, *gradients))
        position[last] = position[latest]
    graph.output([])
    return aot_autograd.graph_module(backward, graph)


class _CachedCast:
    """The version of a weight that a call read, and whether the node of a later call reads this node."""

    def __init__(self, version: int) -> None:
        self.version = version
        self.is_followed = False


class _AutocastNode(torch.autograd.Function):
    """Passes a weight on; rounds its gradient to `dtype` where that is the sum of several calls."""

    @staticmethod
    def forward(
        ctx: Any,
        weight: torch.Tensor,
        cast: _CachedCast,
        dtype: torch.dtype,
        cast_is_shared: Callable[[], None],
    ) -> torch.Tensor:
        ctx.set_materialize_grads(False)
        ctx.cast, ctx.dtype = cast, dtype
        will_cast(ctx, cast_is_shared)
        return weight

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor | None) -> Any:
        has_run(ctx)
        if gradient is not None and ctx.cast.is_followed:
            gradient = gradient.to(ctx.dtype).to(gradient.dtype)
        return gradient, None, None, None


class AutocastCache:
    """The weights that graphs have read since the current block of autocast began.

    `weight_changed` is called where a weight changed since: eager's cache would use the old cast.
    """

    def __init__(self, weight_changed: Callable[[], None]) -> None:
        self._weight_changed = weight_changed
        self._block: Any = None
        self._casts: dict[int, tuple[_CachedCast, torch.Tensor]] = {}

    def begin(self, device: torch.device) -> None:
        """Forget the weights of a block that has ended."""
        block = autograd_engine.autocast_block(device)
        if block is None or block is not self._block:
            self.forget()
        self._block = block

    def forget(self) -> None:
        """Refer to no weights of earlier calls."""
        self._casts.clear()
        self._block = None

    def passed(
        self, weight: torch.Tensor, dtype: torch.dtype, cast_is_shared: Callable[[], None]
    ) -> torch.Tensor:
        """`weight` behind a node, for a graph that casts it to `dtype`. `cast_is_shared` is called where the
        loop casts it as well."""
        cast, source = _CachedCast(autograd_engine.version_of(weight)), weight
        key = id(whole_of(weight))
        if key in self._casts:
            before, read_before = self._casts[key]
            if before.version == cast.version:
                before.is_followed, source = True, read_before
            else:
                self._weight_changed()
        passed: torch.Tensor = _AutocastNode.apply(source, cast, dtype, cast_is_shared)  # type: ignore[no-untyped-call]
        if self._block is not None:
            self._casts[key] = cast, passed
        return passed


def with_autocast_cache(
    function: Callable[..., Any],
    casts: Mapping[int, torch.dtype],
    cache: AutocastCache,
    are_shared: Mapping[int, Callable[[], None]],
) -> Callable[..., Any]:
    """Call `function`, a compiled graph, with the weights that it `casts` (to which dtype, by place) passed
    through nodes of the cache. Functions of `are_shared` are called where the loop casts a weight as well."""

    def call(*args: Any) -> Any:
        values = list(args)
        del args
        if torch.is_grad_enabled():
            cache.begin(values[next(iter(casts))].device)
            for place, dtype in casts.items():
                values[place] = cache.passed(values[place], dtype, are_shared[place])
        return function(*values)

    return call
