"""Fill a captured step with the time and workspace of every op: measured, or scaled from known costs.

`measure_costs` times every distinct op of a step. `estimate_costs` takes a step of another batch shape and
scales the costs of the first one (`KnownCosts`).
"""

import operator
from collections.abc import Callable, Iterable, Mapping
from copy import copy
from dataclasses import replace
from math import log
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from lowtide.analyze.captured_step import Captured, with_costs, with_values
from lowtide.analyze.formulas import Shares, by_shares, shares_of, with_formula_bytes
from lowtide.facts import LAST_OUTPUTS, Region, Run, Step
from lowtide.ops.calls import Call, OpCost, signature
from lowtide.ops.recurrent import real_result_bytes, untracked_bytes
from lowtide.planning.allocator import cut_by_allocator
from lowtide.planning.log_lines import baseline_line, cost_line
from lowtide.profiling.cache import CostCache
from lowtide.profiling.devices import Device, device_for
from lowtide.profiling.formula_costs import measure_formulas
from lowtide.profiling.library_workspaces import with_library_workspaces
from lowtide.profiling.op_costs import cost_by_bytes, measure_calls, measure_workspaces, short_limit_now
from lowtide.profiling.op_trials import device_of
from lowtide.profiling.real_strides import real_values
from lowtide.profiling.repeat_trials import with_tried_ops
from lowtide.profiling.samples import make_sample
from lowtide.profiling.work import Work, work_making
from lowtide.stage_log import stage
from lowtide.torch_compat.dispatch import map_leaves, real_tensors
from lowtide.trace.compile_settings import one_at_a_time

MEMORY_LIMIT_BYTES = 1 << 30

_STRIDES_SHARE = 16
"""Part of the memory limit for the inputs and outputs of an op whose workspace is not known yet."""

Made = tuple[int, ...]
"""Bytes of each storage that a call makes."""
Kind = tuple[Any, tuple[tuple[torch.dtype, str], ...]]
"""An op, and dtype and device type of its tensors: other kernels have another workspace."""
Shapes = tuple[tuple[int, ...], ...]


class KnownCosts:
    """Costs of measured calls, and from them costs of other calls of the same ops.

    `runs`: the call of every run of the step that the costs were measured for. `formulas`: what is known
    about eager's formulas of gradients.
    """

    formulas: Shares = MappingProxyType({})

    def __init__(
        self, measured: Iterable[tuple[Call, OpCost, Made]], *, runs: Mapping[Run, Call] | None = None
    ) -> None:
        self.runs: Mapping[Run, Call] = runs or {}
        self._costs: dict[str, tuple[OpCost, Made]] = {}
        self._calls: dict[Kind, list[tuple[Call, OpCost, Made]]] = {}
        self._works: dict[Kind, list[tuple[str, Shapes, Work, OpCost]]] = {}
        self.add(measured)

    def add(self, measured: Iterable[tuple[Call, OpCost, Made]]) -> None:
        for call, cost, made in measured:
            name, kind = signature(call), kind_of(call)
            if name not in self._costs:
                self._calls.setdefault(kind, []).append((call, cost, made))
                self._works.pop(kind, None)
            self._costs[name] = cost, made

    def without_runs(self) -> "KnownCosts":
        """The same costs without the calls of the step: a plan outlives its step."""
        other = copy(self)
        other.runs = {}
        return other

    def measured_cost(self, call: Call) -> OpCost | None:
        """The cost of a call that was itself measured."""
        return self._costs.get(signature(call), (None,))[0]

    def has_like(self, call: Call) -> bool:
        """Whether the op of a call was measured with tensors of the same types."""
        return call.target is operator.getitem or kind_of(call) in self._calls

    def cost_of(self, call: Call, name: str, made: Made) -> OpCost:
        """The cost of a call whose signature is `name` and that makes storages of these bytes.

        A call that was not measured is scaled from the measured call of the same op and types with most sizes
        in common, such as the same call at another batch size; among equals, from the nearest in bytes. A
        call without such a like is costed by its bytes. Both are `estimated`.
        """
        if name in self._costs:
            return self._costs[name][0]
        if call.target is operator.getitem:
            return OpCost(0.0, 0, estimated=False)
        kind = kind_of(call)
        if kind not in self._calls:
            return cost_by_bytes(call)
        work, constants, shapes = work_making(call, made), _constants(call), _shapes(call)
        works = self._works_of(kind)
        # example: which gradients a convolution computes changes its workspace more than its size does
        alike = [each for each in works if each[0] == constants] or works
        _, _, near, cost = min(
            alike,
            key=lambda each: (
                -_num_common(each[1], shapes),
                abs(log((each[2].nbytes + 1) / (work.nbytes + 1))),
            ),
        )
        return _scaled(cost, near, work)

    def cost_of_run(self, run: Run, call: Call, name: str, made: Made) -> OpCost:
        """As `cost_of`, for a step with the same runs at another size: scaled from the same run, if that has
        the same op and types."""
        same = self.runs.get(run)
        if name in self._costs or same is None or kind_of(same) != kind_of(call):
            return self.cost_of(call, name, made)
        cost, same_made = self._costs[signature(same)]
        return _scaled(cost, work_making(same, same_made), work_making(call, made))

    def _works_of(self, kind: Kind) -> list[tuple[str, Shapes, Work, OpCost]]:
        if kind not in self._works:
            self._works[kind] = [
                (_constants(call), _shapes(call), work_making(call, made), cost)
                for call, cost, made in self._calls[kind]
            ]
        return self._works[kind]


def _scaled(cost: OpCost, near: Work, work: Work) -> OpCost:
    ratio = work.nbytes / near.nbytes if near.nbytes else 1.0
    return OpCost(
        cost.seconds * work.ratio_to(near),
        # some kernels need the same workspace at any batch size
        round(cost.workspace_bytes * max(1.0, ratio)),
        estimated=True,
        hidden_bytes=tuple(round(nbytes * ratio) for nbytes in cost.hidden_bytes),
    )


def kind_of(call: Call) -> Kind:
    return call.target, tuple((tensor.dtype, tensor.device.type) for tensor in call.tensors)


def _constants(call: Call) -> str:
    """The arguments of a call besides tensors."""
    return str(map_leaves(lambda leaf: None if isinstance(leaf, Tensor) else leaf, (call.args, call.kwargs)))


def _shapes(call: Call) -> Shapes:
    return tuple(tuple(tensor.shape) for tensor in call.tensors)


def _num_common(one: Shapes, other: Shapes) -> int:
    """The number of dimensions of equal size; tensors of different ranks have none in common."""
    pairs = ((a, b) for a, b in zip(one, other, strict=False) if len(a) == len(b))
    return sum(x == y for a, b in pairs for x, y in zip(a, b, strict=True))


@stage(
    "profile",
    given=lambda captured, **_: f"{len(set(map(signature, captured.calls.values())))} different calls",
    made=lambda result: baseline_line(result[0]),
    details=lambda result: map(cost_line, result[0].nodes),
)
@one_at_a_time
def measure_costs(
    captured: Captured,
    *,
    memory_limit_bytes: int = MEMORY_LIMIT_BYTES,
    use_cache: bool = True,
    progress: Callable[[int, int], None] | None = None,
) -> tuple[Step, KnownCosts]:
    """Time every distinct op alone, on real tensors, with at most `memory_limit_bytes` live.

    The step's notes tell of a machine that was too busy for that.
    """
    device = _device_of(captured)
    captured = _with_library_workspaces(captured, device)  # first of all: see there
    cache = CostCache(device) if use_cache else None
    nodes = [place.node for _, place in sorted(captured.graph_nodes.items())]
    with real_tensors():
        strides_limit = device.within_free(memory_limit_bytes) // _STRIDES_SHARE
        values = real_values(nodes, device=device.torch_device, limit_bytes=strides_limit, cache=cache)
        calls = (with_values(captured, values) if values else captured).calls
        limit = short_limit_now()
        if limit is not None and limit.known is not None:
            costs = _scaled_costs(captured, calls, limit.known, least_bytes=limit.least_bytes)
            notes: tuple[str, ...] = ()
        else:
            measured = measure_calls(
                list(calls.values()),
                memory_limit_bytes=memory_limit_bytes,
                cache=cache,
                progress=progress,
            )
            costs, notes = dict(zip(calls, measured.costs, strict=True)), measured.notes
        made = ((call, costs[run], _made(captured.step, run)) for run, call in calls.items())
        known = KnownCosts(made, runs=calls)
        step = _filled(captured, calls, costs)
        sizes = {each.signature: step.bytes_of(each.results) for each in captured.formulas}
        formulas = measure_formulas(
            captured.formulas, sizes, memory_limit_bytes=memory_limit_bytes, cache=cache
        )
        known.formulas = shares_of(step, captured.formulas, formulas)
        step = with_formula_bytes(step, captured.formulas, formulas)
        step = with_tried_ops(step, captured, calls, memory_limit_bytes=memory_limit_bytes)
        speed = device.copy_bytes_per_second()
        if device.caches_blocks:
            torch.accelerator.empty_cache()  # a step must not find its memory cut for these ops
        return replace(step, notes=(*step.notes, *notes), copy_bytes_per_second=speed), known


@one_at_a_time
def workspace_bytes(
    calls: Mapping[str, tuple[Call, int]], *, memory_limit_bytes: int = MEMORY_LIMIT_BYTES
) -> dict[str, int]:
    """Workspaces of calls, by the same names; one run each, without timing.

    Each call comes with the workspace that it should have. Calls that cannot be run are left out.
    """
    with real_tensors():
        found = measure_workspaces(calls, memory_limit_bytes=memory_limit_bytes)
    return {name: memory.workspace_bytes for name, memory in found.items()}


def estimate_costs(captured: Captured, known: KnownCosts) -> Step:
    """Costs scaled from known costs.

    An op is measured only if it was never measured with tensors of these types.
    """
    captured = _with_library_workspaces(captured, _device_of(captured))
    step = _filled(captured, captured.calls, _scaled_costs(captured, captured.calls, known))
    step = with_formula_bytes(step, captured.formulas, by_shares(step, captured.formulas, known.formulas))
    return with_tried_ops(step, captured, captured.calls, memory_limit_bytes=MEMORY_LIMIT_BYTES)


@one_at_a_time
def _with_library_workspaces(captured: Captured, device: Device) -> Captured:
    """Add the bytes that libraries keep, which only the first run of an op in a thread shows."""
    uncaptured = [call for found in captured.uncaptured_calls.values() for call, _ in found]
    with real_tensors():
        step = with_library_workspaces(captured.step, captured.calls, uncaptured, device)
    return replace(captured, step=step)


def _scaled_costs(
    captured: Captured, calls: Mapping[Run, Call], known: KnownCosts, *, least_bytes: int | None = None
) -> dict[Run, OpCost]:
    """Costs scaled from known costs. With `least_bytes`, workspaces that should be at least as large are
    measured: workspaces need not be in proportion."""
    _measure_new(captured, calls, known)
    by_name: dict[str, OpCost] = {}
    large: dict[str, tuple[Call, int]] = {}
    names = {run: signature(call) for run, call in calls.items()}
    by_run = _first_targets(known.runs) == _first_targets(calls)
    for run, name in names.items():
        if name not in by_name:
            call, made = calls[run], _made(captured.step, run)
            cost = known.cost_of_run(run, call, name, made) if by_run else known.cost_of(call, name, made)
            by_name[name] = cost
            if least_bytes is not None and cost.estimated and cost.workspace_bytes >= least_bytes:
                large[name] = (call, cost.workspace_bytes)
    for name, nbytes in workspace_bytes(large).items():
        by_name[name] = replace(by_name[name], workspace_bytes=nbytes)
    return {run: by_name[name] for run, name in names.items()}


def _first_targets(calls: Mapping[Run, Call]) -> dict[int, Any]:
    """The op of each rank; steps may differ in their rematerializations."""
    return {run.rank: call.target for run, call in calls.items() if run.is_first}


@one_at_a_time
def _measure_new(captured: Captured, calls: Mapping[Run, Call], known: KnownCosts) -> None:
    new: dict[str, tuple[Run, Call]] = {}
    for run, call in calls.items():
        if not known.has_like(call):
            new.setdefault(signature(call), (run, call))
    if not new:
        return
    with real_tensors():
        measured = measure_calls(
            [call for _, call in new.values()],
            memory_limit_bytes=MEMORY_LIMIT_BYTES,
            cache=CostCache(_device_of(captured)),
        )
    known.add(
        (call, cost, _made(captured.step, run))
        for (run, call), cost in zip(new.values(), measured.costs, strict=True)
    )


def _device_of(captured: Captured) -> Device:
    """The device of the step, which need not be the current one of its kind."""
    return device_for(torch.device(captured.step.device))


def _made(step: Step, run: Run) -> Made:
    node = step.nodes[run.rank]
    remat = node.remat(run.rule)
    makes = node.makes if remat is None else remat.makes
    return tuple(step.storages[storage].nbytes for storage in makes)


def _filled(captured: Captured, calls: Mapping[Run, Call], costs: Mapping[Run, OpCost]) -> Step:
    """The step with these costs, real sizes, and the workspaces of uncaptured code.

    Calls on the CPU beside an accelerator take time, and no memory of the step's device.
    """
    device = _device_of(captured)
    own = {run: call for run, call in calls.items() if device_of(call) is device}
    by_run = {
        run: (cost.seconds, cost.workspace_bytes if run in own else 0, cost.estimated)
        for run, cost in costs.items()
    }
    step = _with_real_sizes(with_costs(captured.step, by_run), own, costs)
    if device.caches_blocks:
        step = cut_by_allocator(step)
    return _with_uncaptured(step, captured)


def _with_uncaptured(step: Step, captured: Captured) -> Step:
    """Add the workspaces of ops in uncaptured code."""
    calls = {signature(call): call for found in captured.uncaptured_calls.values() for call, _ in found}
    if not calls:
        return step
    inside = workspace_bytes({name: (call, 0) for name, call in calls.items()})
    nodes = list(step.nodes)
    for rank, found in captured.uncaptured_calls.items():
        most = max(live + inside.get(signature(call), 0) for call, live in found)
        nodes[rank] = replace(nodes[rank], workspace_bytes=max(nodes[rank].workspace_bytes, most))
    return replace(step, nodes=tuple(nodes))


def _with_real_sizes(step: Step, calls: Mapping[Run, Call], costs: Mapping[Run, OpCost]) -> Step:
    """Correct the errors of fake tensors: sizes of results, and workspaces of opaque backward ops."""
    storages, nodes = list(step.storages), list(step.nodes)
    in_last_outputs = 0
    for run, call in calls.items():
        if not run.is_first:
            continue
        makes, hidden = nodes[run.rank].makes, costs[run].hidden_bytes
        if len(hidden) == len(makes):
            for storage, more in zip(makes, hidden, strict=True):
                storages[storage] = replace(storages[storage], nbytes=storages[storage].nbytes + more)
                if storages[storage].pinned and nodes[run.rank].region is Region.FORWARD:
                    in_last_outputs += more
        sizes = real_result_bytes(call, make_sample)
        if sizes is not None:
            for storage, nbytes in zip(makes, sizes, strict=True):
                storages[storage] = replace(storages[storage], nbytes=nbytes)
        more = untracked_bytes(call)
        if more:
            workspace = nodes[run.rank].workspace_bytes + more
            nodes[run.rank] = replace(nodes[run.rank], workspace_bytes=workspace)
    for last in storages:
        if last.name == LAST_OUTPUTS:
            storages[last.id] = replace(last, nbytes=last.nbytes + in_last_outputs)
    return replace(step, storages=tuple(storages), nodes=tuple(nodes))
