"""`torch.compile(model, backend="lowtide", dynamic=False, options={"budget": "8GiB"})`: the same engine.

A compiler backend sees one graph and neither the optimizer nor what surrounds the model. Its budget
covers the graph's own step: parameters, inputs, gradients, activations. Give the optimizer's state
and whatever else is live as `reserve`, or use `lowtide.checkpoint`, which sees the whole step.

Where a script takes only the name of a backend, the environment variable LOWTIDE_BUDGET gives the budget.
"""

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx, nn

from lowtide.errors import LowtideError, Unsupported
from lowtide.facts import Kind, Reserve
from lowtide.facts.plan import EXECUTORS
from lowtide.facts.sizes import is_auto, parse_size, split_reserved, step_budget
from lowtide.planning.registry import planner_names
from lowtide.planning.repeated_graphs import planner_for
from lowtide.runtime.backend import Backend, GraphSchedule
from lowtide.runtime.executor import InductorOps, executor_named, solve_compiled
from lowtide.runtime.incomplete_steps import StepContext, step_of
from lowtide.torch_compat import dynamo
from lowtide.trace.identity import Origin
from lowtide.trace.segments import Segment

OPTIONS = {
    "budget": "bytes, a size ('8GiB') or a share of the graph's own peak ('60%'); else LOWTIDE_BUDGET",
    "planner": f"one of {', '.join(planner_names())}",
    "executor": f"one of {', '.join(EXECUTORS)}",
    "reserve": "bytes live besides the graph: optimizer state, other models",
}


def lowtide(
    graph: fx.GraphModule, inputs: Sequence[Any], *, options: Mapping[str, Any] | None = None
) -> Callable[..., Any]:
    """Compile one graph so that its step fits into `options["budget"]`."""
    if any(_is_symbolic(value) for value in inputs):
        if not torch.is_grad_enabled():
            return graph.forward  # evaluation of any shape: there is nothing to plan
        raise Unsupported(
            "a plan is for one shape, and torch.compile asks for one of any shape: "
            'say torch.compile(..., backend="lowtide", dynamic=False), or, where the script cannot be '
            "changed, set TORCH_DYNAMO_AUTOMATIC_DYNAMIC_SHAPES=0 in the environment"
        )
    chosen = dict(options or {})
    unknown = sorted(set(chosen) - set(OPTIONS))
    if unknown:
        known = "; ".join(f"{name}: {meaning}" for name, meaning in OPTIONS.items())
        raise LowtideError(f"there is no option '{unknown[0]}' of the lowtide backend. Known: {known}")
    wanted = chosen.get("budget", os.environ.get("LOWTIDE_BUDGET", ""))
    if wanted == "":
        raise LowtideError(
            "the lowtide backend needs a budget: set LOWTIDE_BUDGET=8GiB in the environment, or say "
            'torch.compile(..., backend="lowtide", options={"budget": "8GiB"})'
        )
    if is_auto(wanted):
        raise LowtideError(
            "the budget 'auto' is for a whole training step, and a backend sees one graph: write a size, "
            "such as 8GiB, or use lowtide.checkpoint(model, batch, budget='auto')"
        )
    if split_reserved(wanted)[1]:
        raise LowtideError(
            f"the budget {wanted!r} is of reserved bytes, which depend on the whole training step, and a "
            "backend sees one graph: leave 'reserved' out, or use lowtide.checkpoint(model, batch, ...)"
        )
    reserve = parse_size(chosen["reserve"]) if "reserve" in chosen else 0
    planner = str(chosen.get("planner", "auto"))
    executor = executor_named(str(chosen.get("executor", "eager")))

    def schedule_graph(segment: Segment, _is_whole: bool) -> tuple[GraphSchedule, ...]:
        context = StepContext(model=nn.Module(), reserve=Reserve(optimizer_state_bytes=reserve))
        step = step_of(segment, context, like=None)
        step_planner = planner_for(step)
        budget = step_budget(wanted, whole=step_planner.eager_peak_bytes)
        if isinstance(executor, InductorOps):
            solution = solve_compiled(step_planner, segment, executor, budget_bytes=budget, planner=planner)
        else:
            solution = step_planner.solve(budget_bytes=budget, planner=planner)
        (planned,) = solution.graphs
        return (GraphSchedule.of(planned),)

    return Backend(schedule_graph, origins=_origins, executor=executor)(graph, inputs)


def _is_symbolic(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return any(isinstance(extent, torch.SymInt) for extent in value.shape)
    return isinstance(value, torch.SymInt | torch.SymFloat)


def _origins(graph: fx.GraphModule) -> list[Origin]:
    names = [str(node.target) for node in graph.graph.find_nodes(op="placeholder")]
    origins = []
    for name, example in zip(names, dynamo.graph_inputs(graph), strict=True):
        if example is not None and example.grad_fn is not None:
            raise Unsupported(
                "this model breaks into several graphs, and a backend plans each alone, so no budget can be "
                "promised: use lowtide.checkpoint(model, batch, budget=...), which plans all of them together"
            )
        kind = Kind.PARAMETER if isinstance(example, nn.Parameter) else Kind.INPUT
        origins.append(Origin(kind, name, 0 if example is None else id(example)))
    return origins
