"""A torch.compile backend that rewrites every captured graph by its plan and hands it to an executor."""

from collections.abc import Callable, Hashable, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, Self

from torch import fx

from lowtide.analyze.gradient_sums import casts_of, specialised, sums_in_casts, sums_of
from lowtide.analyze.rounded_graphs import rounded
from lowtide.facts import Graph, GraphRun, Kind
from lowtide.offload.offload_store import OffloadStore, store_number
from lowtide.ops.gradient_terms import with_gradient_terms
from lowtide.optim.step_in_backward import StepInBackward, taking_updates
from lowtide.runtime.backward import Backward, FirstCalls, refuse_transforms
from lowtide.runtime.continued_sums import ScheduledSums, sums_inside, with_receivers
from lowtide.runtime.executor import EAGER_OPS, Executor, ExecutorInParts, Function, RecentlyUsed
from lowtide.runtime.fetches import with_fetches
from lowtide.runtime.graph_call import (
    AutocastCache,
    GradientGates,
    gates_of,
    with_autocast_cache,
    with_handover,
)
from lowtide.runtime.loop_messages import CAST_OUTSIDE, VIEW_USED, WEIGHTS_CHANGED
from lowtide.runtime.observer import LoopObserver
from lowtide.runtime.rewrite import Rewritten, forward_only, rewrite
from lowtide.runtime.shared_gradients import SharedGates, shared_gates_of, with_shared_gates
from lowtide.torch_compat import aot_autograd, ddp, dynamo
from lowtide.torch_compat.autograd_engine import refuse_double_backward
from lowtide.torch_compat.dtensor import Borders
from lowtide.trace.identity import Origin, key_of
from lowtide.trace.segments import GraphFunctions, Segment, TracedGraph, new_segment, results_of


@dataclass(frozen=True, slots=True)
class GraphSchedule:
    """The schedule and releases of one captured graph. Its outputs `missing` get no gradient; the gradients
    of its inputs `apart` leave as terms of a sum, those of `handed_over` as soon as they are made. `fetches`:
    see `facts.Graph`. `rounds`: what of it runs with other bits
    than eager's, for a loop that may read the outputs `returned`."""

    schedule: tuple[GraphRun, ...]
    missing: frozenset[int]
    apart: frozenset[int] = frozenset()
    releases: tuple[tuple[int, int], ...] = ()
    handed_over: frozenset[int] = frozenset()
    fetches: tuple[tuple[int, int, int], ...] = ()
    rounds: tuple[str, ...] = ()
    returned: frozenset[int] = frozenset()

    @classmethod
    def of(cls, graph: Graph) -> Self:
        return cls(
            graph.schedule,
            frozenset(graph.missing),
            frozenset(graph.apart),
            graph.releases,
            frozenset(graph.handed_over),
            graph.fetches,
            graph.rounds,
            frozenset(graph.returned),
        )


LISTED_GRAPHS = 4

REMEMBERED_GRAPHS = 8
"""torch traces the same graph again soon, or not at all"""

ScheduleGraph = Callable[[Segment, bool], tuple[GraphSchedule, ...]]
"""(segment, whether the segment reaches the end of the traced function) -> its schedules, by its runs in one
call; the last one is for further runs."""


class Backend:
    """Rewrites each graph by the schedule that `schedule_graph` gives; tells `observer` when graphs run.

    `graphs` are the last of the `num_graphs` compiled ones, in order, for tests and reports.
    """

    def __init__(
        self,
        schedule_graph: ScheduleGraph,
        *,
        origins: Callable[[fx.GraphModule], list[Origin]],
        executor: Executor = EAGER_OPS,
        updates: StepInBackward | None = None,
        store: OffloadStore | None = None,
        observer: LoopObserver | None = None,
    ) -> None:
        self.observer = observer or LoopObserver()
        self.schedule_graph = schedule_graph
        self.store = store
        self.updates = updates
        self.origins = origins
        self.executor = executor
        self.takes_numbers = executor.takes_numbers
        self.graphs: list[tuple[Segment, GraphSchedule, Rewritten]] = []
        self.num_graphs = 0
        # no reference to `self`: torch and a profile keep graphs and their casts longer than the model
        self.autocast_cache = AutocastCache(partial(self.observer.say, WEIGHTS_CHANGED))
        self._compiled: RecentlyUsed[Hashable, Callable[..., Any]] = RecentlyUsed(REMEMBERED_GRAPHS)

    def __call__(self, graph: fx.GraphModule, inputs: Sequence[Any], **_: Any) -> Callable[..., Any]:
        key = key_of(graph)
        known: Callable[..., Any] | None = None if key is None else self._compiled.get(key)
        if known is not None:
            return known
        origins = self.origins(graph)
        first = self._compile(graph, inputs, origins)
        compiled = first.function
        runs = () if first.planned is None else first.planned.runs
        if first.planned is not None and len(set(runs)) > 1:
            forms = {first.planned.schedule: compiled}
            for schedule in dict.fromkeys(runs[1:]):
                if schedule not in forms:
                    form = self._compile(graph, inputs, origins, runs=(schedule,), borders=first.borders)
                    forms[schedule] = form.function
            compiled = _by_runs(
                [forms[schedule] for schedule in runs], self.observer, first.planned.segment.fingerprint
            )
        if key is not None and not aot_autograd.is_guarded_by_aot():
            self._compiled[key] = compiled
        return compiled

    def _compile(
        self,
        graph: fx.GraphModule,
        inputs: Sequence[Any],
        origins: list[Origin],
        *,
        runs: tuple[GraphSchedule, ...] = (),
        borders: Borders | None = None,
    ) -> "_CompiledGraph":
        """Compile a graph by the first of its `runs`, by default of those that are planned. `borders`: of a
        graph that is compiled once more."""
        is_whole, casts_once = dynamo.reaches_the_end(graph), dynamo.casts_weights_once(graph)
        planned: _ScheduledGraph | None = None

        def partition(joint: fx.GraphModule, _args: Any, **kwargs: Any) -> Any:
            nonlocal planned
            outputs = kwargs["num_fwd_outputs"]
            segment = new_segment(joint, origins, num_forward_outputs=outputs, casts_once=casts_once)
            planned = self._scheduled(segment, runs or self.schedule_graph(segment, is_whole))
            self._list(planned)
            return planned.rewritten.forward, aot_autograd.backward_stub(joint, planned.gradients)

        # torch keeps these functions longer than the model: they must not refer to `self`
        executor, observer = self.executor, self.observer

        def forward(_module: fx.GraphModule, args: Any) -> Callable[..., Any]:
            assert planned is not None
            return aot_autograd.takes_list(planned.forward(args))

        def backward(_module: fx.GraphModule, _args: Any) -> Callable[..., Any]:
            assert planned is not None
            return aot_autograd.takes_list(planned.backward())

        def inference(module: fx.GraphModule, args: Any) -> Callable[..., Any]:
            alone = forward_only(new_segment(module, origins, num_forward_outputs=None))
            return aot_autograd.takes_list(_forward(executor(alone, args, is_backward=False), observer))

        with dynamo.quiet():
            compiled, borders = aot_autograd.compile_graph(
                graph,
                inputs,
                partition=partition,
                forward=forward,
                backward=backward,
                inference=inference,
                orders=self.observer.orders,
                borders=borders,
            )
        if planned is not None:
            compiled = planned.called_by_dynamo(compiled)
        return _CompiledGraph(borders.around(compiled), planned, borders)

    def forget(self) -> None:
        """Compile all graphs anew."""
        self._compiled.clear()

    def adopt(self, graph: TracedGraph) -> bool:
        """Bind a graph that torch compiled at capture to its plan; False where the plan needs other gradients
        than torch compiled, and the graph stays unbound.

        torch calls the graph's `binding` (a `GraphBinding`), which is bound here and nowhere else.
        """
        planned = self._scheduled(graph.segment, self.schedule_graph(graph.segment, False))
        rewritten = planned.rewritten
        gradients = graph.segment.has_gradients
        if planned.gradients != gradients or rewritten.num_unchecked or rewritten.num_numbers:
            return False
        functions = GraphFunctions(planned.forward(graph.inputs), planned.backward)
        graph.binding.bind(functions, around=planned.called_by_dynamo)
        if graph.key is not None:
            self._compiled[graph.key] = graph.binding.run
        self._list(planned)
        return True

    def _scheduled(self, segment: Segment, runs: tuple[GraphSchedule, ...]) -> "_ScheduledGraph":
        return _ScheduledGraph(
            segment,
            runs,
            self.executor,
            self.observer,
            casts=self.autocast_cache,
            updates=self.updates,
            store=0 if self.store is None else store_number(self.store),
        )

    def _list(self, planned: "_ScheduledGraph") -> None:
        self.num_graphs += 1
        last = self.graphs[1 - LISTED_GRAPHS :]
        self.graphs = [*last, (planned.segment, planned.schedule, planned.rewritten)]


class _ScheduledGraph:
    """The functions that run a graph by the first schedule of its `runs`."""

    def __init__(
        self,
        segment: Segment,
        runs: tuple[GraphSchedule, ...],
        executor: Executor,
        observer: LoopObserver,
        *,
        casts: AutocastCache,
        updates: StepInBackward | None,
        store: int,
    ) -> None:
        self.segment, self.runs = segment, runs
        self.schedule = schedule = runs[0]
        self.executor = executor
        self.observer = observer
        self.autocast_cache = casts
        self.updates_number = updates.number if updates is not None else 0
        wanted = specialised(segment, missing=schedule.missing, apart=schedule.apart)
        if schedule.rounds:
            wanted, *_ = rounded(wanted, returned=schedule.returned)
        planned = with_fetches(wanted, schedule.schedule, schedule.releases, schedule.fetches)
        wanted, self.positions = planned.segment, planned.schedule
        self.rewritten = rewrite(
            wanted,
            planned.schedule,
            releases=planned.releases,
            updates=updates,
            store=store,
            in_place=executor.in_place,
            begins=planned.begins,
        )
        sums = sums_of(segment)
        self.num_terms = {place: sums.get(place, 1) for place in sorted(schedule.apart)}
        self.sums = tuple(
            place for place in sums_inside(segment, schedule.apart) if wanted.gradients[place] is not None
        )
        self.continues_sums = bool(self.sums) and updates is None and executor.in_place
        self.wanted = wanted
        # steps in backward have no other call whose gradients could be added in the dtype of a cast
        self.casts = casts_of(segment) if updates is None else {}
        if not self.continues_sums:
            for place in self.sums:
                observer.summed_weight = observer.summed_weight or segment.origins[place].name
        observer.summed_in_cast = observer.summed_in_cast or sums_in_casts(segment)
        self.gradients = tuple(grad is not None for grad in results_of(self.rewritten.backward))
        self.gates: GradientGates | None = None
        self.shared: SharedGates | None = None
        if isinstance(executor, ExecutorInParts):
            self.gates = gates_of(segment, self.rewritten.backward, num_inputs=len(segment.origins))
            if schedule.handed_over and updates is None:
                self.shared = shared_gates_of(
                    self.rewritten.backward, schedule.handed_over, num_terms=self.num_terms
                )
        self.first_calls = FirstCalls(segment)
        if not schedule.missing:
            self.first_calls.are_as_planned()

    def called_by_dynamo(self, compiled: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap the compiled graph, inside out: gradient handover, gradient terms, autocast
        cache."""
        in_ddp, compiled = compiled, self._with_shared_gates(compiled)
        if self.gates is not None:
            in_ddp = with_handover(in_ddp, self.gates)
            in_ddp = with_gradient_terms(in_ddp, self.num_terms) if self.num_terms else in_ddp
            compiled = _handover_in_ddp(in_ddp, compiled)
        if self.continues_sums:
            compiled = with_receivers(compiled, self._sayings(VIEW_USED, self.sums))
        if self.casts:
            told = self._sayings(CAST_OUTSIDE, self.casts)
            compiled = with_autocast_cache(compiled, self.casts, self.autocast_cache, told)
        return compiled

    def _with_shared_gates(self, compiled: Callable[..., Any]) -> Callable[..., Any]:
        """The compiled graph, whose gradients of shared inputs leave as soon as they are made."""
        if self.shared is None:
            return with_gradient_terms(compiled, self.num_terms) if self.num_terms else compiled
        rest = {p: number for p, number in self.num_terms.items() if p not in self.schedule.handed_over}
        compiled = with_shared_gates(compiled, self.shared)
        return with_gradient_terms(compiled, rest) if rest else compiled

    def _sayings(self, text: str, places: Iterable[int]) -> dict[int, Callable[[], None]]:
        """Warnings about inputs of the graph, by place."""
        return {place: partial(self.observer.say, text, self.segment.origins[place].name) for place in places}

    def forward(self, inputs: Sequence[Any]) -> Function:
        run = self.executor(self.rewritten.forward, inputs, is_backward=False)
        return _forward(
            run,
            self.observer,
            fingerprint=self.segment.fingerprint,
            saved_bytes=self.rewritten.saved_bytes,
            first_calls=self.first_calls,
        )

    def backward(self) -> Function:
        observer, num_saved, updates_number = self.observer, self.rewritten.num_saved, self.updates_number
        inputs = [node.meta["val"] for node in self.rewritten.backward.graph.find_nodes(op="placeholder")]
        run = Backward(
            self.rewritten,
            self.schedule.missing,
            self.schedule.apart,
            inputs,
            self.executor,
            first_calls=self.first_calls,
            used=partial(observer.output_used, self.segment.fingerprint),
            gates=self.gates,
            shared=self.shared,
            sums=ScheduledSums(self.wanted, self.positions, self.rewritten, self.executor.in_place)
            if self.continues_sums
            else None,
            skips_parameters=any(
                origin.kind is Kind.PARAMETER and not has_gradient
                for origin, has_gradient in zip(self.segment.origins, self.gradients, strict=False)
            ),
        )

        def call(values: list[Any]) -> Any:
            refuse_transforms(values[num_saved:])
            refuse_double_backward()
            observer.backward_begins(lambda: values[num_saved:])
            with taking_updates(updates_number) if updates_number else nullcontext():
                result = run(values)
            observer.backward_ends()
            return result

        return call


class _CompiledGraph(NamedTuple):
    """A graph as Dynamo calls it; `planned` is None without gradients."""

    function: Callable[..., Any]
    planned: _ScheduledGraph | None
    borders: Borders


def _by_runs(
    functions: Sequence[Callable[..., Any]], observer: LoopObserver, fingerprint: str
) -> Callable[..., Any]:
    """One graph by several schedules: each run in a call has a function of its own, further ones the last."""

    def call(*args: Any) -> Any:
        run = observer.fingerprints.count(fingerprint)
        return functions[min(run, len(functions) - 1)](*args)

    return call


def _handover_in_ddp(in_ddp: Callable[..., Any], alone: Callable[..., Any]) -> Callable[..., Any]:
    """Hand gradients over early where DistributedDataParallel sends them."""

    def call(*args: Any) -> Any:
        return (in_ddp if ddp.active() is not None else alone)(*args)

    return call


def _forward(
    run: Function,
    observer: LoopObserver,
    *,
    fingerprint: str = "",
    saved_bytes: int = 0,
    first_calls: FirstCalls | None = None,
) -> Function:
    def call(args: list[Any]) -> Any:
        start = first_calls.start_of(args) if first_calls is not None else None
        result = run(args)
        if first_calls is not None:
            first_calls.note(start)
        observer.graph_ran(saved_bytes, fingerprint=fingerprint, results=result)
        return result

    return call
