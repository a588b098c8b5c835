"""Executors: run the rewritten graphs op by op, or compiled by Inductor.

Inductor fuses and reorders ops, so its code keeps other bytes live than single ops. A dry run finds the peak.
Where the peak is above the budget, the step is planned again for a budget that is lower by the excess:

    solve(budget) -> compile -> dry run -> peak above the budget? -> solve(budget - excess) -> ...
"""

import logging
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, runtime_checkable

import torch
from torch import fx

from lowtide.analyze.backward_facts import overwrites
from lowtide.analyze.gradient_sums import specialised
from lowtide.errors import BudgetTooSmall, LowtideError
from lowtide.facts import Graph, Node, Region, Run, Solution, Step
from lowtide.facts.plan import EXECUTORS
from lowtide.ops.direct import direct_function, direct_parts
from lowtide.planning.planner import Planner
from lowtide.planning.schedules import scheduled_ranks, split_optimizer_step
from lowtide.planning.simulate import simulate, source_of
from lowtide.remat import rule_named
from lowtide.runtime.rewrite import rewrite
from lowtide.trace.segments import Segment
from lowtide.units import size_and_bytes

if TYPE_CHECKING:
    from lowtide.torch_compat.inductor import CompiledGraph

logger = logging.getLogger("lowtide")

COMPILED_GRAPHS = 64
"""The compiled graphs that are kept; an older graph is compiled again."""

ROUNDS = 6
"""The most solutions for Inductor's code before BudgetTooSmall."""

GRADIENT_COPIED = (
    "a gradient has other strides in memory than Inductor's code was compiled for (channels last, a "
    "transposed result), and is copied: the last bits of this step can differ from eager's. executor='eager' "
    "takes gradients as they are"
)

POSITION = "lowtide_position"
"""The key of a node's metadata for the position of its op in the graph."""

Key = TypeVar("Key")
Value = TypeVar("Value")


class RecentlyUsed(OrderedDict[Key, Value]):
    """A dict of the `size` entries that were set or read last."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.size = size

    def get(self, key: Key, default: Any = None) -> Any:
        if key in self:
            self.move_to_end(key)
        return super().get(key, default)

    def __setitem__(self, key: Key, value: Value) -> None:
        super().__setitem__(key, value)
        self.move_to_end(key)
        if len(self) > self.size:
            self.popitem(last=False)


Function = Callable[[list[Any]], Any]
"""A graph as a function: it takes its inputs as one list and empties the list, so that each input is freed at
its last use."""


class Executor(Protocol):
    """Turns a graph into a function. The graph says what to run, save and free: an executor must not save,
    recompute or reorder.

    `inputs` are fake tensors with the strides that the function will get; None for a missing gradient.
    """

    @property
    def name(self) -> str: ...

    @property
    def in_place(self) -> bool:
        """Whether ops of its graphs may overwrite an input at its last read."""

    @property
    def takes_numbers(self) -> bool:
        """Whether inputs of its graphs may be numbers of Python."""

    def __call__(self, module: fx.GraphModule, inputs: Sequence[Any], *, is_backward: bool) -> Function: ...


Parts = Callable[[list[Any]], Iterator[None]]
"""Like a `Function`, run from one call of `hand_over` in the graph to the next."""


@runtime_checkable
class ExecutorInParts(Executor, Protocol):
    """An executor that can pause inside of a graph, so that gradients leave as soon as they are final."""

    def in_parts(self, module: fx.GraphModule, inputs: Sequence[Any]) -> Parts: ...


class EagerOps:
    """Runs the ops one by one, equal to eager PyTorch to the last bit."""

    name = "eager"
    in_place = True
    takes_numbers = True

    def __call__(self, module: fx.GraphModule, inputs: Sequence[Any], *, is_backward: bool) -> Function:
        return direct_function(module)

    def in_parts(self, module: fx.GraphModule, inputs: Sequence[Any]) -> Parts:
        return direct_parts(module)


EAGER_OPS = EagerOps()


class InductorOps:
    """Runs graphs as Inductor compiles them, and keeps the `COMPILED_GRAPHS` that were used last.

    A rematerialized value has the bits that it had: reductions run as eager runs them, and only elementwise
    ops are fused, which gives each element the same bits in any kernel.
    """

    name = "inductor"
    in_place = False
    takes_numbers = False

    def __init__(self) -> None:
        self._compiled: RecentlyUsed[Hashable, tuple[CompiledGraph, list[Any]]]
        self._compiled = RecentlyUsed(COMPILED_GRAPHS)
        self._has_said_copied = False

    def __call__(self, module: fx.GraphModule, inputs: Sequence[Any], *, is_backward: bool) -> Function:
        compiled = self.compiled(module, inputs, is_backward=is_backward)
        compiled.build_kernels()
        return self._with_planned_strides(compiled, inputs) if is_backward else compiled

    def _with_planned_strides(self, compiled: Function, inputs: Sequence[Any]) -> Function:
        """Copy gradients that have other strides than the code was compiled for."""
        planned: list[Any] = [getattr(value, "stride", tuple)() for value in inputs]

        def run(values: list[Any]) -> Any:
            for place, strides in enumerate(planned):
                value = values[place]
                if isinstance(value, torch.Tensor) and value.stride() != strides:
                    values[place] = value.new_empty_strided(value.shape, strides).copy_(value)
                    if not self._has_said_copied:
                        logger.warning(GRADIENT_COPIED)
                    self._has_said_copied = True
            value = None
            return compiled(values)

        return run

    def compiled(
        self, module: fx.GraphModule, inputs: Sequence[Any], *, is_backward: bool
    ) -> "CompiledGraph":
        """The code of Inductor for a graph; the kernels are built before the first run."""
        from lowtide.torch_compat.inductor import CompiledGraph

        constants = [getattr(module, str(node.target)) for node in module.graph.find_nodes(op="get_attr")]
        text = f"{module.graph}{[_layout(value) for value in inputs]}"
        key = text, is_backward, tuple(map(id, constants))
        found: tuple[CompiledGraph, list[Any]] | None = self._compiled.get(key)
        if found is None:
            compiled = CompiledGraph(module, inputs, is_backward=is_backward)
            found = self._compiled[key] = compiled, constants  # live, so that no other gets this id
        return found[0]


def _layout(value: Any) -> str:
    stride = value.stride() if hasattr(value, "stride") else ""
    return f"{getattr(value, 'dtype', '')}{getattr(value, 'shape', value)}{stride}"


def executor_named(name: str) -> Executor:
    """The executor that plans and options call `name`."""
    if name not in EXECUTORS:
        raise LowtideError(f"there is no executor '{name}': choose one of {', '.join(EXECUTORS)}")
    if name == EAGER_OPS.name:
        return EAGER_OPS
    from lowtide.torch_compat.inductor import compiler_name, has_compiler

    if not has_compiler():
        raise LowtideError(
            f"executor 'inductor' needs a C++ compiler, and '{compiler_name()}' cannot be run: install g++, "
            "or let the variable CXX be the path of another one, or choose 'eager'"
        )
    return InductorOps()


def solve_compiled(
    step_planner: Planner, segment: Segment, executor: InductorOps, *, budget_bytes: int, planner: str
) -> Solution:
    """The solution of a step of one graph whose peak is at most `budget_bytes` as Inductor's code runs it.

    BudgetTooSmall where none of `ROUNDS` solutions fits; its `floor_bytes` are a budget that can be met.
    """
    found = nearest_compiled(step_planner, segment, executor, budget_bytes=budget_bytes, planner=planner)
    if found.peak_bytes <= budget_bytes:
        return found
    floor_bytes = 0
    while found.peak_bytes > floor_bytes:  # the search for that budget may find another solution
        floor_bytes = found.peak_bytes
        found = nearest_compiled(step_planner, segment, executor, budget_bytes=floor_bytes, planner=planner)
    raise BudgetTooSmall(
        budget_bytes=budget_bytes,
        floor_bytes=floor_bytes,
        node=found.peak_node,
        hint=f"Inductor's code keeps that much live; executor 'eager' reaches "
        f"{size_and_bytes(step_planner.floor_bytes)}.",
        remedy="",
    )


def nearest_compiled(
    step_planner: Planner, segment: Segment, executor: InductorOps, *, budget_bytes: int, planner: str
) -> Solution:
    """The first solution that fits as Inductor's code runs it, or the lowest one tried. Each solution is
    lower than the one before, and the last is the planner's lowest."""
    step_planner = _compiled_planner(step_planner)
    wanted_bytes = budget_bytes
    tried: list[Solution] = []
    is_last = False
    while not is_last:
        is_last = len(tried) == ROUNDS - 1
        try:
            solution = step_planner.solve(budget_bytes=0 if is_last else wanted_bytes, planner=planner)
        except BudgetTooSmall as error:
            solution = step_planner.solve(budget_bytes=error.floor_bytes, planner=planner)
            is_last = True
        one_by_one_bytes = solution.peak_bytes
        peak_bytes = compiled_peak(step_planner.step, solution, segment, executor)
        solution = replace(solution, budget_bytes=budget_bytes, peak_bytes=peak_bytes, executor=executor.name)
        if peak_bytes <= budget_bytes:
            return solution
        tried.append(solution)
        wanted_bytes = one_by_one_bytes - (peak_bytes - budget_bytes)
    return min(tried, key=lambda solution: solution.peak_bytes)


def _compiled_planner(step_planner: Planner) -> Planner:
    """A planner without remat rules whose ops run as in eager: compiled ops beside them round differently."""
    nodes = tuple(
        replace(node, remats=tuple(r for r in node.remats if not rule_named(r.rule).as_eager_only))
        for node in step_planner.step.nodes
    )
    return (
        step_planner if nodes == step_planner.step.nodes else Planner(replace(step_planner.step, nodes=nodes))
    )


def compiled_peak(step: Step, solution: Solution, segment: Segment, executor: InductorOps) -> int:
    """The peak of a step whose only graph of the model runs as Inductor's code."""
    number = next(number for number, graph in enumerate(step.graphs) if graph.in_model)
    rises = _rises(step, number, solution.graphs[number], segment, executor)
    timeline = simulate(step, solution.schedule.runs)
    chunk_bytes = solution.optimizer_chunk_bytes
    peak_bytes = (
        0 if solution.step_in_backward else split_optimizer_step(step, timeline, chunk_bytes).peak_bytes
    )
    begun: set[Region] = set()
    for position, run in enumerate(timeline.runs):
        region = _region(step, run)
        node, live_bytes = step.nodes[run.rank], int(timeline.live_bytes[position])
        if region not in rises or node.segment != number or node.op == "placeholder":
            peak_bytes = max(peak_bytes, live_bytes)
        elif region not in begun:
            begun.add(region)
            source = source_of(step, run)
            made = sum(step.storages[i].nbytes for i in source.makes if not step.storages[i].static)
            peak_bytes = max(peak_bytes, live_bytes - made - source.workspace_bytes + rises[region])
    return peak_bytes


def _rises(
    step: Step, number: int, graph: Graph, segment: Segment, executor: InductorOps
) -> dict[Region, int]:
    """The most bytes that each pass of a graph keeps live beyond those live when the pass begins."""
    from lowtide.torch_compat.inductor import Bytes, fake_copies, storage_bytes

    wanted = specialised(segment, missing=frozenset(graph.missing), apart=frozenset(graph.apart))
    ranks = scheduled_ranks(step)[number]
    ops = [*wanted.forward_ops, *wanted.backward_ops]
    for position, node in enumerate(ops):
        node.meta[POSITION] = position
    rewritten = rewrite(wanted, graph.schedule, in_place=False)

    ran = [ops[run.position] for run in graph.schedule if run.is_first]
    in_place = {node.meta[POSITION] for node in overwrites(wanted, ran)}

    kept = {node.name: node for node in step.nodes if node.on_demand}

    def costs(node: fx.Node) -> Bytes:
        position, rule = node.meta[POSITION], node.meta.get("lowtide_rule", "")
        source = source_of(step, Run(ranks[position], rule))
        if "lowtide_kept" in node.meta:
            source = kept[f"{step.nodes[ranks[position]].name}_{node.meta['lowtide_kept']}"]
        inside = source.workspace_bytes
        if isinstance(source, Node) and position in in_place:
            # the workspace assumes that the result overwrites an input; here it does not
            inside += sum(step.storages[storage].nbytes for storage in source.makes)
        return Bytes(tuple(step.storages[storage].nbytes for storage in source.makes), max(0, inside))

    inputs = [node.meta["val"] for node in rewritten.forward.graph.find_nodes(op="placeholder")]
    forward = executor.compiled(rewritten.forward, inputs, is_backward=False)
    read = [node.meta["val"] for node in rewritten.backward.graph.find_nodes(op="placeholder")]
    backward = executor.compiled(rewritten.backward, read, is_backward=True)
    given = fake_copies(inputs)
    results, forward_bytes = forward.dry_run(list(given), rewritten.forward, costs=costs)
    returned = [results[place] for place in graph.returned]
    planned = [node.meta["val"] for node in rewritten.forward.graph.output_node().all_input_nodes]
    more_bytes = storage_bytes(results, besides=given) - storage_bytes(planned, besides=inputs)
    saved = results[wanted.num_forward_outputs :]
    passed = [*saved, *fake_copies(read[len(saved) :])]
    del results, saved
    _, backward_bytes = backward.dry_run(passed, rewritten.backward, costs=costs)
    del returned
    return {Region.FORWARD: forward_bytes, Region.BACKWARD: backward_bytes + more_bytes}


def _region(step: Step, run: Run) -> Region:
    """The pass of a run; rematerializations are in the backward pass."""
    return step.nodes[run.rank].region if run.is_first else Region.BACKWARD
