"""A torch.compile backend that rewrites every captured graph by its plan and hands it to an executor."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import fx

from lowtide.capture.graphs import Origin, Segment, new_segment
from lowtide.capture.regions import without_tangents
from lowtide.capture.tangents import drop_zeros
from lowtide.errors import Unsupported
from lowtide.facts import Run
from lowtide.running.executor import EAGER_OPS, Executor, Function
from lowtide.running.rewrite import Rewritten, forward_only, rewrite
from lowtide.torchside import hooks


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
    call was given.
    """

    forwards: int = 0
    backwards: int = 0
    forwards_before: int = 0
    saved_bytes: int = 0
    is_whole: bool = False
    batch_bytes: int = 0

    def begin_call(self) -> None:
        self.forwards_before, self.saved_bytes = self.forwards, 0

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

        def partition(joint: fx.GraphModule, _args: Any, **kwargs: Any) -> Any:
            nonlocal rewritten, plan
            outputs = kwargs["num_fwd_outputs"]
            segment = new_segment(joint, origins, num_forward_outputs=outputs, casts_once=casts_once)
            plan = self.plan_graph(segment)
            rewritten = rewrite(without_tangents(segment, plan.missing), plan.schedule)
            self.num_graphs += 1
            self.graphs = [*self.graphs[1 - LISTED_GRAPHS :], (segment, plan, rewritten)]
            return rewritten.forward, rewritten.backward

        def forward(module: fx.GraphModule, args: Any) -> Callable[..., Any]:
            assert rewritten is not None
            run = executor(module, args, is_backward=False)
            return hooks.takes_list(_forward(run, progress, saved_bytes=rewritten.saved_bytes))

        def backward(_module: fx.GraphModule, args: Any) -> Callable[..., Any]:
            assert rewritten is not None and plan is not None
            run = Backward(rewritten, plan.missing, args, executor)

            def call(values: list[Any]) -> Any:
                progress.backwards += 1
                return run(values)

            return hooks.takes_list(call)

        def inference(module: fx.GraphModule, args: Any) -> Callable[..., Any]:
            alone = forward_only(new_segment(module, origins, num_forward_outputs=None))
            return hooks.takes_list(_forward(executor(alone, args, is_backward=False), progress))

        with hooks.quiet():
            return hooks.compile_graph(
                graph, inputs, partition=partition, forward=forward, backward=backward, inference=inference
            )


def _forward(run: Function, progress: Progress, *, saved_bytes: int = 0) -> Function:
    def call(args: list[Any]) -> Any:
        result = run(args)
        progress.forwards += 1
        progress.saved_bytes += saved_bytes
        return result

    return call


class Backward:
    """A graph's backward pass, for whichever of its outputs got a gradient this time."""

    def __init__(
        self,
        rewritten: Rewritten,
        planned_missing: frozenset[int],
        inputs: Sequence[Any],
        executor: Executor,
    ) -> None:
        self.rewritten = rewritten
        self.planned_missing = planned_missing
        self.inputs = tuple(inputs)
        self.executor = executor
        self._functions = {planned_missing: executor(rewritten.backward, inputs, is_backward=True)}

    def __call__(self, args: list[Any]) -> Any:
        tangents = self.rewritten.tangents
        given = args[self.rewritten.num_saved :]
        missing = frozenset(output for output, value in zip(tangents, given, strict=True) if value is None)
        del given
        if missing not in self._functions:
            self._functions[missing] = self._without(missing)
        return self._functions[missing](args)

    def _without(self, missing: frozenset[int]) -> Function:
        surprising = sorted(self.planned_missing - missing)
        if surprising:
            raise Unsupported(
                f"a gradient arrived for output {surprising[0]} of the model, but the plan was made for a "
                "loss that does not use it. Pass `loss=` the function that your loop really uses"
            )
        source = self.rewritten.backward
        graph = fx.Graph()
        graph.output(graph.graph_copy(source.graph, {}))
        module = hooks.graph_module(source, graph)
        inputs = module.graph.find_nodes(op="placeholder")[self.rewritten.num_saved :]
        by_output = dict(zip(self.rewritten.tangents, inputs, strict=True))
        drop_zeros(module, tangents=set(inputs), missing={by_output[output] for output in missing})
        return self.executor(module, self.inputs, is_backward=True)
