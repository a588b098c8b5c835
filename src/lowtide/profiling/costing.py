"""Fill a captured step with the measured time and inner memory of every op."""

from collections.abc import Callable, Mapping
from dataclasses import replace

import torch

from lowtide.analyze.captured_step import Captured, with_costs, with_values
from lowtide.facts import Run, Step
from lowtide.ops.calls import Call, OpCost, signature
from lowtide.ops.recurrent import real_result_bytes, untracked_bytes
from lowtide.planning.allocator import cut_by_allocator
from lowtide.profiling.cache import CostCache
from lowtide.profiling.devices import device_for
from lowtide.profiling.op_costs import measure_calls, memory_of_calls
from lowtide.profiling.real_strides import real_values
from lowtide.profiling.samples import make_sample
from lowtide.profiling.scaled_costs import Known
from lowtide.profiling.time_limit import hurry_now
from lowtide.torch_compat.dispatch import real_tensors
from lowtide.trace.compile_settings import one_at_a_time

__all__ = ["MEMORY_LIMIT_BYTES", "Known", "estimate_costs", "measure_costs", "measure_insides"]

MEMORY_LIMIT_BYTES = 1 << 30

# Of the memory limit for the inputs and outputs of an op whose memory inside is not known yet.
_LAYOUT_SHARE = 16


@one_at_a_time
def measure_costs(
    captured: Captured,
    *,
    memory_limit_bytes: int = MEMORY_LIMIT_BYTES,
    use_cache: bool = True,
    progress: Callable[[int, int], None] | None = None,
) -> tuple[Step, Known]:
    """Time every distinct op alone, on real tensors; never holds more than `memory_limit_bytes`.

    The step's notes tell of a machine that was too busy for it.
    """
    device = device_for(_where(captured))
    cache = CostCache(device) if use_cache else None
    nodes = [place.node for _, place in sorted(captured.graph_nodes.items())]
    with real_tensors():
        values = real_values(
            nodes, device=device.torch_device, limit_bytes=memory_limit_bytes // _LAYOUT_SHARE, cache=cache
        )
        calls = (with_values(captured, values) if values else captured).calls
        hurry = hurry_now()
        if hurry is not None and hurry.like is not None:
            costs, note = _scaled(captured, calls, hurry.like, least_bytes=hurry.least_bytes), ""
        else:
            measured = measure_calls(
                list(calls.values()),
                memory_limit_bytes=memory_limit_bytes,
                cache=cache,
                progress=progress,
            )
            costs, note = dict(zip(calls, measured.costs, strict=True)), measured.note
        made = ((call, costs[run], _made(captured.step, run)) for run, call in calls.items())
        known = Known(made, runs=calls)
        step = _with_outside(_fill(captured, calls, costs), captured)
        notes = (*step.notes, note) if note else step.notes
        return replace(step, notes=notes, copy_bytes_per_second=device.copy_bytes_per_second()), known


@one_at_a_time
def measure_insides(
    calls: Mapping[str, tuple[Call, int]], *, memory_limit_bytes: int = MEMORY_LIMIT_BYTES
) -> dict[str, int]:
    """Bytes that calls hold inside, by the same names; one run each, and no time is taken. Each comes with
    what it should hold. Those that cannot be run are left out."""
    with real_tensors():
        found = memory_of_calls(calls, memory_limit_bytes=memory_limit_bytes)
    return {name: memory.workspace_bytes for name, memory in found.items()}


def estimate_costs(captured: Captured, known: Known) -> Step:
    """Costs from ops that were measured before, scaled where the shape is new.

    Only an op whose like was never measured, or only with tensors of other types, is measured.
    """
    costs = _scaled(captured, captured.calls, known)
    return _with_outside(_fill(captured, captured.calls, costs), captured)


def _scaled(
    captured: Captured, calls: Mapping[Run, Call], known: Known, *, least_bytes: int | None = None
) -> dict[Run, OpCost]:
    """Costs from ops that were measured before. With `least_bytes`, what should hold so much inside is asked
    what it does, since that need not be in proportion."""
    _measure_new(captured, calls, known)
    by_name: dict[str, OpCost] = {}
    large: dict[str, tuple[Call, int]] = {}
    names = {run: signature(call) for run, call in calls.items()}
    cost_of = known.cost_of_run if _same_ops(known.runs, calls) else _by_call(known)
    for run, name in names.items():
        if name not in by_name:
            cost = by_name[name] = cost_of(run, calls[run], name, _made(captured.step, run))
            if least_bytes is not None and cost.estimated and cost.workspace_bytes >= least_bytes:
                large[name] = (calls[run], cost.workspace_bytes)
    for name, nbytes in measure_insides(large).items():
        by_name[name] = replace(by_name[name], workspace_bytes=nbytes)
    return {run: by_name[name] for run, name in names.items()}


def _same_ops(runs: Mapping[Run, Call], others: Mapping[Run, Call]) -> bool:
    """Whether two steps run the same ops first, in whatever ways they may run some again."""
    ops, other_ops = (
        {run.rank: call.target for run, call in calls.items() if run.is_first} for calls in (runs, others)
    )
    return ops == other_ops


def _by_call(known: Known) -> Callable[[Run, Call, str, tuple[int, ...]], OpCost]:
    return lambda _, call, name, made: known.cost_of(call, name, made)


def _measure_new(captured: Captured, calls: Mapping[Run, Call], known: Known) -> None:
    new: dict[str, tuple[Run, Call]] = {}
    for run, call in calls.items():
        if not known.has_like(call):
            new.setdefault(signature(call), (run, call))
    if new:
        _measure(captured, list(new.values()), known)


@one_at_a_time
def _measure(captured: Captured, new: list[tuple[Run, Call]], known: Known) -> None:
    with real_tensors():
        measured = measure_calls(
            [call for _, call in new],
            memory_limit_bytes=MEMORY_LIMIT_BYTES,
            cache=CostCache(device_for(_where(captured))),
        )
    known.add(
        (call, cost, _made(captured.step, run)) for (run, call), cost in zip(new, measured.costs, strict=True)
    )


def _where(captured: Captured) -> torch.device:
    """The device of the step's tensors, which need not be the current one of its kind."""
    kind = torch.device(captured.step.device).type
    tensors = (tensor for call in captured.calls.values() for tensor in call.tensors)
    found = next((tensor.device for tensor in tensors if tensor.device.type == kind), None)
    return torch.device(captured.step.device) if found is None else found


def _made(step: Step, run: Run) -> tuple[int, ...]:
    """Bytes of each block that a run makes."""
    node = step.nodes[run.rank]
    remat = node.remat(run.rule)
    makes = node.makes if remat is None else remat.makes
    return tuple(step.storages[storage].nbytes for storage in makes)


def _fill(captured: Captured, calls: Mapping[Run, Call], costs: Mapping[Run, OpCost]) -> Step:
    plain = {run: (cost.seconds, cost.workspace_bytes, cost.estimated) for run, cost in costs.items()}
    step = _with_real_sizes(with_costs(captured.step, plain), calls, costs)
    return cut_by_allocator(step) if torch.device(step.device).type == "cuda" else step


def _with_outside(step: Step, captured: Captured) -> Step:
    """Add what ops of code between the graphs hold inside."""
    calls = {signature(call): call for found in captured.uncaptured_calls.values() for call, _ in found}
    if not calls:
        return step
    inside = measure_insides({name: (call, 0) for name, call in calls.items()})
    nodes = list(step.nodes)
    for rank, found in captured.uncaptured_calls.items():
        most = max(held + inside.get(signature(call), 0) for call, held in found)
        nodes[rank] = replace(nodes[rank], workspace_bytes=max(nodes[rank].workspace_bytes, most))
    return replace(step, nodes=tuple(nodes))


def _with_real_sizes(step: Step, calls: Mapping[Run, Call], costs: Mapping[Run, OpCost]) -> Step:
    """Correct what fake tensors get wrong: sizes of results, and bytes inside the backward of opaque ones."""
    storages, nodes = list(step.storages), list(step.nodes)
    for run, call in calls.items():
        if not run.is_first:
            continue
        rank, hidden = run.rank, costs[run].hidden_bytes
        if len(hidden) == len(nodes[rank].makes):
            for storage, more in zip(nodes[rank].makes, hidden, strict=True):
                storages[storage] = replace(storages[storage], nbytes=storages[storage].nbytes + more)
        sizes = real_result_bytes(call, make_sample)
        if sizes is not None:
            for storage, nbytes in zip(nodes[rank].makes, sizes, strict=True):
                storages[storage] = replace(storages[storage], nbytes=nbytes)
        more = untracked_bytes(call)
        if more:
            nodes[rank] = replace(nodes[rank], workspace_bytes=nodes[rank].workspace_bytes + more)
    return replace(step, storages=tuple(storages), nodes=tuple(nodes))
