"""A torch.compile backend that rewrites every captured graph by its plan and hands it to an executor."""

from collections.abc import Callable, Hashable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

from torch import fx

from lowtide.analyze.gradient_sums import casts_of, specialised, sums_in_casts, sums_inside, sums_of
from lowtide.facts import GraphRun, Kind
from lowtide.offload import Store, number_of
from lowtide.ops.gradient_terms import with_gradient_terms
from lowtide.optim.step_in_backward import Updates, taking_updates
from lowtide.runtime.autocast_cache import SharedCasts, joined
from lowtide.runtime.backward import Backward, FirstCalls
from lowtide.runtime.executor import EAGER_OPS, Executor, ExecutorInParts, Function
from lowtide.runtime.gradient_handover import GradientGates, gated, gates_of
from lowtide.runtime.loop_observer import KeptGraphs, LiveLoss, LiveOutputs, LoopWatch
from lowtide.runtime.rewrite import Rewritten, forward_only, rewrite
from lowtide.torch_compat import aot_autograd, ddp, dynamo
from lowtide.torch_compat.aot_autograd import Orders
from lowtide.trace.graph_key import key_of
from lowtide.trace.segments import Origin, Segment, TracedGraph, has_gradients, new_segment


@dataclass(frozen=True, slots=True)
class GraphPlan:
    """How one captured graph runs: its schedule and releases, for the outputs `missing` that get no gradient,
    with the gradients of its inputs `apart` as terms of a sum."""

    schedule: tuple[GraphRun, ...]
    missing: frozenset[int]
    apart: frozenset[int] = frozenset()
    releases: tuple[tuple[int, int], ...] = ()


@dataclass(slots=True)
class Progress:
    """How often graphs have run forward and backward, and what of the current call has run.

    Of what ran in this call, `saved_bytes` are held for the backward pass. While a graph is compiled:
    `is_whole` tells that it reaches to the end of the function that torch traces, `batch_bytes` what the
    call was given. `watch` is on between the forward and the backward pass of a step that is new. What was
    seen then: `held` is what the loop made, and `used`, by graph, are outputs that got a gradient though no
    plan counts on it. `outputs` are what the model returned in a loop that is to hold nothing of it but the
    loss. `casts` are the weights of autocast's current block, `summed` a weight whose gradient is a sum
    that a graph makes, `summed_in_cast` one whose terms cannot leave the
    graph; `is_called_again`: several calls come before a backward pass, and plans do not know it.
    """

    forwards: int = 0
    backwards: int = 0
    forwards_before: int = 0
    saved_bytes: int = 0
    is_whole: bool = False
    batch_bytes: int = 0
    watch: LoopWatch | None = None
    held: LiveLoss | None = None
    used: dict[str, set[int]] = field(default_factory=dict)
    outputs: LiveOutputs = field(default_factory=LiveOutputs)
    kept: KeptGraphs = field(default_factory=KeptGraphs)
    casts: SharedCasts = field(default_factory=SharedCasts)
    summed: str = ""
    summed_in_cast: str = ""
    is_called_again: bool = False

    def begin_call(self) -> None:
        self.forwards_before, self.saved_bytes = self.forwards, 0

    def begin_backward(self, gradients: Sequence[Any]) -> None:
        self.backwards += 1
        self.kept.look(self.saved_bytes)
        if self.watch is not None:
            peak_bytes, live_bytes, _ = self.watch.end()
            arrived = sum(value.nbytes for value in gradients if value is not None)
            self.watch = None
            self.held = LiveLoss(peak_bytes, max(0, live_bytes - arrived), self.batch_bytes)

    @property
    def graphs_in_call(self) -> int:
        return self.forwards - self.forwards_before


LISTED_GRAPHS = 4

REMEMBERED_GRAPHS = 8
"""torch traces the same graph again soon, or not at all"""

PlanGraph = Callable[[Segment], GraphPlan]


class Backend:
    """Rewrites each graph by the plan that `plan_graph` gives for it.

    `graphs` lists the last ones of `num_graphs` that were compiled, in order, for tests and reports.
    """

    def __init__(
        self,
        plan_graph: PlanGraph,
        *,
        origins: Callable[[fx.GraphModule], list[Origin]],
        executor: Executor = EAGER_OPS,
        updates: Updates | None = None,
        store: Store | None = None,
        orders: Orders | None = None,
    ) -> None:
        self.orders = {} if orders is None else orders
        self.plan_graph = plan_graph
        self.store = store
        self.updates = updates
        self.origins = origins
        self.executor = executor
        self.takes_numbers = executor.takes_numbers
        self.graphs: list[tuple[Segment, GraphPlan, Rewritten]] = []
        self.num_graphs = 0
        self.progress = Progress()
        self._compiled: dict[Hashable, Callable[..., Any]] = {}

    def __call__(self, graph: fx.GraphModule, inputs: Sequence[Any], **_: Any) -> Callable[..., Any]:
        key = key_of(graph)
        if key is not None and key in self._compiled:
            return self._compiled[key]
        self.progress.is_whole = dynamo.reaches_the_end(graph)
        origins = self.origins(graph)
        casts_once = dynamo.casts_weights_once(graph)
        planned: _PlannedGraph | None = None

        def partition(joint: fx.GraphModule, _args: Any, **kwargs: Any) -> Any:
            nonlocal planned
            outputs = kwargs["num_fwd_outputs"]
            segment = new_segment(joint, origins, num_forward_outputs=outputs, casts_once=casts_once)
            planned = self._planned(segment)
            self._list(planned)
            return planned.rewritten.forward, aot_autograd.backward_stub(joint, planned.gradients)

        # torch keeps these functions longer than the model lives: they must not know `self`
        executor, progress = self.executor, self.progress

        def forward(_module: fx.GraphModule, args: Any) -> Callable[..., Any]:
            assert planned is not None
            return aot_autograd.takes_list(planned.forward(args))

        def backward(_module: fx.GraphModule, _args: Any) -> Callable[..., Any]:
            assert planned is not None
            return aot_autograd.takes_list(planned.backward())

        def inference(module: fx.GraphModule, args: Any) -> Callable[..., Any]:
            alone = forward_only(new_segment(module, origins, num_forward_outputs=None))
            return aot_autograd.takes_list(_forward(executor(alone, args, is_backward=False), progress))

        with dynamo.quiet():
            compiled = aot_autograd.compile_graph(
                graph,
                inputs,
                partition=partition,
                forward=forward,
                backward=backward,
                inference=inference,
                orders=self.orders,
            )
        if planned is not None:
            compiled = planned.called_by_dynamo(compiled)
        if key is not None and not aot_autograd.is_guarded_by_aot():
            self._remember(key, compiled)
        return compiled

    def forget(self) -> None:
        """Compile anew whatever comes."""
        self._compiled.clear()

    def _remember(self, key: Hashable, compiled: Callable[..., Any]) -> None:
        if len(self._compiled) >= REMEMBERED_GRAPHS:
            self._compiled.pop(next(iter(self._compiled)))
        self._compiled[key] = compiled

    def adopt(self, graph: TracedGraph) -> bool:
        """Let a graph that is compiled already run by its plan, if that asks for the gradients that torch
        knows of."""
        planned = self._planned(graph.segment)
        rewritten = planned.rewritten
        if planned.gradients != graph.gradients or rewritten.num_unchecked or rewritten.num_numbers:
            return False
        graph.forward = planned.forward(graph.inputs)
        graph.backward = planned.backward
        graph.compiled = planned.called_by_dynamo(graph.compiled)
        if graph.key is not None:
            self._remember(graph.key, graph.compiled)
        self._list(planned)
        return True

    def _planned(self, segment: Segment) -> "_PlannedGraph":
        plan = self.plan_graph(segment)
        store = 0 if self.store is None else number_of(self.store)
        return _PlannedGraph(segment, plan, self.executor, self.progress, updates=self.updates, store=store)

    def _list(self, planned: "_PlannedGraph") -> None:
        self.num_graphs += 1
        last = self.graphs[1 - LISTED_GRAPHS :]
        self.graphs = [*last, (planned.segment, planned.plan, planned.rewritten)]


class _PlannedGraph:
    """The functions that run a graph by its plan."""

    def __init__(
        self,
        segment: Segment,
        plan: GraphPlan,
        executor: Executor,
        progress: Progress,
        *,
        updates: Updates | None,
        store: int,
    ) -> None:
        self.segment = segment
        self.plan = plan
        self.executor = executor
        self.progress = progress
        self.updates_number = updates.number if updates is not None else 0
        wanted = specialised(segment, missing=plan.missing, apart=plan.apart)
        self.rewritten = rewrite(
            wanted,
            plan.schedule,
            releases=plan.releases,
            updates=updates,
            store=store,
            in_place=executor.in_place,
        )
        sums = sums_of(segment)
        self.fans = {place: sums.get(place, 1) for place in sorted(plan.apart)}
        # sums that leave in one, unless the model is called again before the backward pass
        self.sums = () if updates is not None or not executor.in_place else sums_inside(segment, plan.apart)
        self.fans |= {place: sums[place] for place in self.sums}
        self.casts = casts_of(segment)
        for place in sums_inside(segment, plan.apart):
            progress.summed = progress.summed or segment.origins[place].name
        progress.summed_in_cast = progress.summed_in_cast or sums_in_casts(segment)
        self.gradients = has_gradients(self.rewritten.backward, 0)
        self.gates: GradientGates | None = None
        if isinstance(executor, ExecutorInParts):
            self.gates = gates_of(segment, self.rewritten.backward, num_inputs=len(segment.origins))
        self.first_calls = FirstCalls(segment)
        if not plan.missing:
            self.first_calls.are_as_planned()

    def called_by_dynamo(self, compiled: Callable[..., Any]) -> Callable[..., Any]:
        """What torch has compiled, with gates before it where they are of use, fans before those, and joints
        before all."""
        behind_gates = compiled if self.gates is None else _gated_in_ddp(compiled, self.gates)
        behind_fans = with_gradient_terms(behind_gates, self.fans) if self.fans else behind_gates
        return joined(behind_fans, self.casts, self.progress.casts) if self.casts else behind_fans

    def forward(self, inputs: Sequence[Any]) -> Function:
        run = self.executor(self.rewritten.forward, inputs, is_backward=False)
        return _forward(
            run, self.progress, saved_bytes=self.rewritten.saved_bytes, first_calls=self.first_calls
        )

    def backward(self) -> Function:
        progress, num_saved, updates_number = self.progress, self.rewritten.num_saved, self.updates_number
        inputs = [node.meta["val"] for node in self.rewritten.backward.graph.find_nodes(op="placeholder")]
        used = progress.used.setdefault(self.segment.fingerprint, set())
        run = Backward(
            self.rewritten,
            self.plan.missing,
            self.plan.apart,
            inputs,
            self.executor,
            first_calls=self.first_calls,
            used=used,
            gates=self.gates,
            sums=self.sums,
            skips_parameters=any(
                origin.kind is Kind.PARAMETER and not has_gradient
                for origin, has_gradient in zip(self.segment.origins, self.gradients, strict=False)
            ),
        )

        def call(values: list[Any]) -> Any:
            progress.begin_backward(values[num_saved:] if progress.watch is not None else ())
            with taking_updates(updates_number) if updates_number else nullcontext():
                result = run(values, is_called_again=progress.is_called_again)
            progress.outputs.warn()
            return result

        return call


def _gated_in_ddp(function: Callable[..., Any], gates: GradientGates) -> Callable[..., Any]:
    """Where gradients are sent to other processes as they come, let them come early."""
    behind_gates = gated(function, gates)

    def call(*args: Any) -> Any:
        return (behind_gates if ddp.active() is not None else function)(*args)

    return call


def _forward(
    run: Function, progress: Progress, *, saved_bytes: int = 0, first_calls: FirstCalls | None = None
) -> Function:
    def call(args: list[Any]) -> Any:
        start = first_calls.start_of(args) if first_calls is not None else None
        result = run(args)
        if first_calls is not None:
            first_calls.note(start)
        progress.forwards += 1
        progress.saved_bytes += saved_bytes
        return result

    return call
