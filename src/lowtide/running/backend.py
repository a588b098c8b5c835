"""A torch.compile backend that rewrites every captured graph by its plan and hands it to an executor."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import fx

from lowtide.capture.graphs import Origin, Segment, new_segment
from lowtide.capture.regions import without_tangents
from lowtide.facts import Run
from lowtide.running.backward import Backward, FirstCalls
from lowtide.running.executor import EAGER_OPS, Executor, ExecutorInParts, Function
from lowtide.running.handover import Gates, gated, gates_of
from lowtide.running.loop_watch import Held, LoopWatch
from lowtide.running.rewrite import Rewritten, forward_only, rewrite
from lowtide.torchside import ddp, hooks


@dataclass(frozen=True, slots=True)
class GraphPlan:
    """How one captured graph runs: its schedule, for the outputs `missing` that get no gradient."""

    schedule: tuple[Run, ...]
    missing: frozenset[int]


@dataclass(slots=True)
class Progress:
    """How often graphs have run forward and backward, and what of the current call has run.

    Of what ran in this call, `saved_bytes` are held for the backward pass. While a graph is compiled:
    `is_whole` tells that it reaches to the end of the function that torch traces, `batch_bytes` what the
    call was given. `watch` is on between the forward and the backward pass of a step that is new. What was
    seen then: `held` is what the loop made, and `used`, by graph, are outputs that got a gradient though no
    plan counts on it.
    """

    forwards: int = 0
    backwards: int = 0
    forwards_before: int = 0
    saved_bytes: int = 0
    is_whole: bool = False
    batch_bytes: int = 0
    watch: LoopWatch | None = None
    held: Held | None = None
    used: dict[str, set[int]] = field(default_factory=dict)

    def begin_call(self) -> None:
        self.forwards_before, self.saved_bytes = self.forwards, 0

    def begin_backward(self, gradients: Sequence[Any]) -> None:
        self.backwards += 1
        if self.watch is not None:
            peak_bytes, live_bytes, _ = self.watch.end()
            arrived = sum(value.nbytes for value in gradients if value is not None)
            self.watch = None
            self.held = Held(peak_bytes, max(0, live_bytes - arrived), self.batch_bytes)

    @property
    def graphs_in_call(self) -> int:
        return self.forwards - self.forwards_before


LISTED_GRAPHS = 4

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
    ) -> None:
        self.plan_graph = plan_graph
        self.origins = origins
        self.executor = executor
        self.graphs: list[tuple[Segment, GraphPlan, Rewritten]] = []
        self.num_graphs = 0
        self.progress = Progress()

    def __call__(self, graph: fx.GraphModule, inputs: Sequence[Any], **_: Any) -> Callable[..., Any]:
        # torch keeps these functions longer than the model lives: they must not know `self`
        executor, progress = self.executor, self.progress
        progress.is_whole = hooks.reaches_the_end(graph)
        origins = self.origins(graph)
        casts_once = hooks.casts_weights_once(graph)
        rewritten: Rewritten | None = None
        plan: GraphPlan | None = None
        first_calls: FirstCalls | None = None
        gates: Gates | None = None
        fingerprint = ""

        def partition(joint: fx.GraphModule, _args: Any, **kwargs: Any) -> Any:
            nonlocal rewritten, plan, first_calls, gates, fingerprint
            outputs = kwargs["num_fwd_outputs"]
            segment = new_segment(joint, origins, num_forward_outputs=outputs, casts_once=casts_once)
            plan = self.plan_graph(segment)
            rewritten = rewrite(without_tangents(segment, plan.missing), plan.schedule)
            if isinstance(executor, ExecutorInParts):
                gates = gates_of(segment, rewritten.backward, num_inputs=len(origins))
            first_calls = FirstCalls(segment)
            if not plan.missing:
                first_calls.are_as_planned()
            self.num_graphs += 1
            fingerprint = segment.fingerprint
            self.graphs = [*self.graphs[1 - LISTED_GRAPHS :], (segment, plan, rewritten)]
            return rewritten.forward, rewritten.backward

        def forward(module: fx.GraphModule, args: Any) -> Callable[..., Any]:
            assert rewritten is not None
            run = executor(module, args, is_backward=False)
            return hooks.takes_list(
                _forward(run, progress, saved_bytes=rewritten.saved_bytes, first_calls=first_calls)
            )

        def backward(_module: fx.GraphModule, args: Any) -> Callable[..., Any]:
            assert rewritten is not None and plan is not None and first_calls is not None
            used = progress.used.setdefault(fingerprint, set())
            run = Backward(
                rewritten, plan.missing, args, executor, first_calls=first_calls, used=used, gates=gates
            )
            num_saved = rewritten.num_saved

            def call(values: list[Any]) -> Any:
                progress.begin_backward(values[num_saved:] if progress.watch is not None else ())
                return run(values)

            return hooks.takes_list(call)

        def inference(module: fx.GraphModule, args: Any) -> Callable[..., Any]:
            alone = forward_only(new_segment(module, origins, num_forward_outputs=None))
            return hooks.takes_list(_forward(executor(alone, args, is_backward=False), progress))

        with hooks.quiet():
            function = hooks.compile_graph(
                graph, inputs, partition=partition, forward=forward, backward=backward, inference=inference
            )
        return function if gates is None else _gated_in_ddp(function, gates)


def _gated_in_ddp(function: Callable[..., Any], gates: Gates) -> Callable[..., Any]:
    """Where gradients are sent to other processes as they come, let them come early."""
    behind_gates = gated(function, gates)

    def call(*args: Any) -> Any:
        return (behind_gates if ddp.active() is not None else function)(*args)

    return call


def _forward(
    run: Function, progress: Progress, *, saved_bytes: int = 0, first_calls: FirstCalls | None = None
) -> Function:
    def call(args: list[Any]) -> Any:
        if first_calls is not None and first_calls.segment is not None:
            first_calls.note(args)
        result = run(args)
        progress.forwards += 1
        progress.saved_bytes += saved_bytes
        return result

    return call
