"""Run a planned model inside the user's own training loop.

The model stays the same object of the same class. Its call is routed through torch.compile with a
backend that rewrites every captured graph by its plan; without gradients, or in eval mode, the
model's own code runs as if lowtide were not there.
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx, nn

from lowtide.capture.regions import without_tangents
from lowtide.capture.tangents import drop_zeros
from lowtide.capture.trace import Origin, Segment, call_model, describe_inputs, name_tensors, new_segment
from lowtide.errors import LowtideError, Unsupported
from lowtide.facts import Kind
from lowtide.facts.sizes import format_size
from lowtide.running.rewrite import Rewritten, forward_only, rewrite
from lowtide.torchside import hooks
from lowtide.torchside.batch import tensors_in
from lowtide.torchside.first_calls import make_first_calls

logger = logging.getLogger("lowtide")


@dataclass(frozen=True, slots=True)
class GraphPlan:
    """How one captured graph runs: its schedule, for the outputs `missing` that get no gradient."""

    schedule: tuple[int, ...]
    missing: frozenset[int]


PlanGraph = Callable[[Segment], GraphPlan]


class Backend:
    """A torch.compile backend that rewrites each graph by the plan that `plan_graph` gives for it.

    `graphs` lists what was compiled, in order, for tests and reports; `ran` gets an entry for every run
    of a forward pass, and is for its reader to empty.
    """

    def __init__(self, plan_graph: PlanGraph, *, origins: Callable[[fx.GraphModule], list[Origin]]) -> None:
        self.plan_graph = plan_graph
        self.origins = origins
        self.graphs: list[tuple[Segment, GraphPlan, Rewritten]] = []
        self.ran: list[None] = []

    def __call__(self, graph: fx.GraphModule, inputs: Sequence[Any], **_: Any) -> Callable[..., Any]:
        origins = self.origins(graph)
        rewritten: Rewritten | None = None
        plan: GraphPlan | None = None

        def partition(joint: fx.GraphModule, _args: Any, **kwargs: Any) -> Any:
            nonlocal rewritten, plan
            segment = new_segment(joint, origins, num_forward_outputs=kwargs["num_fwd_outputs"])
            plan = self.plan_graph(segment)
            rewritten = rewrite(without_tangents(segment, plan.missing), plan.schedule)
            self.graphs.append((segment, plan, rewritten))
            return rewritten.forward, rewritten.backward

        def forward(module: fx.GraphModule, _args: Any) -> Callable[..., Any]:
            return hooks.takes_list(_function(module, ran=self.ran))

        def backward(_module: fx.GraphModule, _args: Any) -> Callable[..., Any]:
            assert rewritten is not None and plan is not None
            return hooks.takes_list(Backward(rewritten, plan.missing))

        def inference(module: fx.GraphModule, _args: Any) -> Callable[..., Any]:
            alone = new_segment(module, origins, num_forward_outputs=None)
            return hooks.takes_list(_function(forward_only(alone), ran=self.ran))

        with hooks.quiet():
            return hooks.compile_graph(
                graph, inputs, partition=partition, forward=forward, backward=backward, inference=inference
            )


class Backward:
    """A graph's backward pass, for whichever of its outputs got a gradient this time."""

    def __init__(self, rewritten: Rewritten, planned_missing: frozenset[int]) -> None:
        self.rewritten = rewritten
        self.planned_missing = planned_missing
        self._functions = {planned_missing: _function(rewritten.backward)}

    def __call__(self, args: list[Any]) -> Any:
        tangents = self.rewritten.tangents
        given = args[self.rewritten.num_saved :]
        missing = frozenset(output for output, value in zip(tangents, given, strict=True) if value is None)
        del given
        if missing not in self._functions:
            self._functions[missing] = self._without(missing)
        return self._functions[missing](args)

    def _without(self, missing: frozenset[int]) -> Callable[..., Any]:
        surprising = sorted(self.planned_missing - missing)
        if surprising:
            raise Unsupported(
                f"a gradient arrived for output {surprising[0]} of the model, but the plan was made for a "
                "loss that does not use it. Pass `loss=` the function that your loop really uses"
            )
        source = self.rewritten.backward
        graph = fx.Graph()
        graph.output(graph.graph_copy(source.graph, {}))
        module = fx.GraphModule(source, graph)
        inputs = module.graph.find_nodes(op="placeholder")[self.rewritten.num_saved :]
        by_output = dict(zip(self.rewritten.tangents, inputs, strict=True))
        drop_zeros(module, tangents=set(inputs), missing={by_output[output] for output in missing})
        module.graph = hooks.boxed(module.graph)
        module.recompile()
        return _function(module)


class Runner:
    """What a planned model calls instead of its own forward.

    `spare_bytes` are those of the budget that the plan leaves free; None where nobody gave a budget.
    """

    def __init__(self, model: nn.Module, plan_graph: PlanGraph, *, spare_bytes: int | None = None) -> None:
        self.model = model
        self.spare_bytes = spare_bytes
        self.backend = Backend(plan_graph, origins=self._origins)
        own = hooks.own_code(call_model)
        self.compiled = torch.compile(own, backend=hooks.weakly(self.backend), dynamic=False)
        self._batch: Any = ()
        self._warned: set[str] = set()
        # looked at in every step, and finding them anew takes ten times as long
        self._parameters = tuple(model.parameters())

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return call_model(self.model, args, kwargs)
        if not self.model.training:
            self._warn_of_eval_mode()
            return call_model(self.model, args, kwargs)
        self._warn_of_gradients()
        self._batch, breaks = (args, kwargs), hooks.graph_breaks()
        self.backend.ran.clear()
        try:
            with hooks.compiling(), hooks.unlogged(), hooks.user_errors():
                output = self.compiled(self.model, args, kwargs)
        finally:
            self._batch = ()
        if not self.backend.ran:
            why = next(iter(hooks.graph_breaks() - breaks), "it gives no reason")
            raise Unsupported(
                f"the model ran without its plan, since torch.compile gave up on its forward pass ({why}). "
                "Is its code the same as when it was planned? Plan it as it trains, or lowtide.remove(model)"
            )
        return output

    def _origins(self, graph: fx.GraphModule) -> list[Origin]:
        """Where a graph's inputs come from; `Kind.OTHER` is what the model itself made, in another graph."""
        origins = describe_inputs(graph, name_tensors(self.model, self._batch), stranger=Kind.INPUT)
        batch = {id(leaf) for leaf in tensors_in(self._batch)}
        return [
            replace(origin, kind=Kind.OTHER)
            if value is not None and value.grad_fn is not None and id(value) not in batch
            else origin
            for origin, value in zip(origins, hooks.graph_inputs(graph), strict=True)
        ]

    def _warn_of_eval_mode(self) -> None:
        if "eval" not in self._warned and any(p.requires_grad for p in self._parameters):
            self._warned.add("eval")
            logger.warning(
                "in eval mode the model runs without its plan: a backward pass through it is not within the "
                "budget. Use torch.no_grad() to evaluate"
            )

    def _warn_of_gradients(self) -> None:
        if self.spare_bytes is None or "gradients" in self._warned:
            return
        nbytes = sum(p.grad.nbytes for p in self._parameters if p.grad is not None)
        if nbytes > max(0, self.spare_bytes):
            self._warned.add("gradients")
            logger.warning(
                "%s of gradients are there before the forward pass, and the plan did not count on them: the "
                "peak is higher by as much. Set them to None first (zero_grad), or, to accumulate gradients, "
                "plan for a budget that is smaller by %d bytes",
                format_size(nbytes),
                nbytes,
            )


def install(model: nn.Module, plan_graph: PlanGraph, *, spare_bytes: int | None = None) -> Runner:
    """Route `model`'s calls through a plan, in place."""
    current = model._compiled_call_impl
    if current is not None and not isinstance(current, Runner):
        raise LowtideError("this model is already compiled by model.compile(): plan the plain model instead")
    make_first_calls()
    runner = Runner(model, plan_graph, spare_bytes=spare_bytes)
    model._compiled_call_impl = runner
    return runner


def remove(model: nn.Module) -> nn.Module:
    """Give the plain model back: the same object, without its plan."""
    if isinstance(model._compiled_call_impl, Runner):
        model._compiled_call_impl = None
    return model


def runner_of(model: nn.Module) -> Runner | None:
    """What runs a planned model; None for a plain one."""
    current = model._compiled_call_impl
    return current if isinstance(current, Runner) else None


def _function(module: fx.GraphModule, *, ran: list[None] | None = None) -> Callable[..., Any]:
    """A graph's code as a plain function that takes one list, without nn.Module's call around it."""
    run = module.forward

    def call(args: list[Any]) -> Any:
        if ran is not None:
            ran.append(None)
        return run(args)

    return call
