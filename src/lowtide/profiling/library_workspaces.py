"""Workspaces that libraries keep on an accelerator from their first op on, measured there.

cuBLAS and cuBLASLt have a workspace for each thread and stream that multiplies matrices. torch's allocator
hands it out at the first product and never gets it back. A step has two such threads:

    thread of the caller     forward pass, loss, optimizer       workspace
    autograd's own thread    backward pass, recompute            workspace

So one call of each kind of op runs in the thread that runs it in a step. The bytes that are live afterwards,
without any result, are what the libraries keep. They stay, and the step finds them there.

Where both threads had run such ops before, neither keeps more: the same calls in a new thread, on a new
stream, show the size. That leaves a third workspace in this process, which counts too.

Shortcoming: bytes that a library takes from the driver, past torch's allocator, are not seen.
"""

import logging
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from lowtide.facts import Kind, Region, Run, Step, Storage
from lowtide.ops.calls import Call, storages_bytes
from lowtide.ops.schema import is_view, talks_to_others
from lowtide.planning.decisions import LIBRARY_WORKSPACES
from lowtide.profiling.devices import Accelerator, Device, in_new_thread
from lowtide.profiling.op_costs import as_a_step_runs
from lowtide.profiling.op_trials import in_one_line
from lowtide.profiling.samples import make_sample
from lowtide.profiling.work import shrink, work_of

_log = logging.getLogger(__name__)

_SAMPLE_BYTES = 16 << 20
"""The largest inputs and outputs of a call that runs here."""

_LEAST_BYTES = 64 << 10
"""A workspace is larger; a table that an op caches for the device is smaller."""

FULL = "the device was too full to measure the workspaces that libraries keep: the peak can be higher by them"


Left = list[tuple[Call, int]]
"""Calls whose first run left bytes live, and how many."""


@dataclass(slots=True)
class _Kept:
    """What libraries keep in this process on one device, as far as it was measured, for each thread."""

    caller: Left = field(default_factory=list)
    autograd: Left = field(default_factory=list)
    apart: Left = field(default_factory=list)

    @property
    def nbytes(self) -> int:
        return sum(nbytes for left in (self.caller, self.autograd, self.apart) for _, nbytes in left)


_KEPT: dict[tuple[str, int], _Kept] = {}
"""By type and index of the device."""


def with_library_workspaces(
    step: Step, calls: Mapping[Run, Call], more: Iterable[Call], device: Device
) -> Step:
    """The step with the bytes that libraries keep on its device, measured with its own ops.

    `more`: ops of uncaptured code, which run in both threads. A step on the CPU is returned as it is: its
    libraries free their memory.
    """
    if not isinstance(device, Accelerator):
        return step
    nbytes, note = measured_bytes(*_by_thread(step, calls, list(more)), device)
    storages = step.storages
    if nbytes:
        kept = Storage(id=len(storages), nbytes=nbytes, kind=Kind.OTHER, name=LIBRARY_WORKSPACES, static=True)
        storages = (*storages, kept)
    return replace(step, storages=storages, notes=(*step.notes, note) if note else step.notes)


def _by_thread(step: Step, calls: Mapping[Run, Call], more: list[Call]) -> tuple[list[Call], list[Call]]:
    """One call of each kind for the caller's thread, and for autograd's."""
    caller, autograd = list(more), list(more)
    for run, call in calls.items():
        node = step.nodes[run.rank]
        backward = node.region is Region.BACKWARD
        if run.is_first and not backward:
            caller.append(call)
        if backward or not run.is_first or node.recompute is not None:
            autograd.append(call)
    return _one_of_each(caller), _one_of_each(autograd)


def _one_of_each(calls: Iterable[Call]) -> list[Call]:
    """The smallest call of each op, types and numbers of dimensions, since libraries choose by these; a chunk
    of it where it is large."""
    smallest: dict[Any, tuple[int, Call]] = {}
    for call in calls:
        if call.target is operator.getitem or talks_to_others(call.target) or is_view(call):
            continue
        tensors = call.tensors
        kind = (call.target, tuple((tensor.dtype, tensor.dim()) for tensor in tensors))
        nbytes = storages_bytes(tensors)
        if kind not in smallest or nbytes < smallest[kind][0]:
            smallest[kind] = (nbytes, call)
    parts = (_part(call) for _, call in smallest.values())
    return [part for part in parts if part is not None]


def _part(call: Call) -> Call | None:
    try:
        part = shrink(call, work_of(call), limit_bytes=_SAMPLE_BYTES)
    except Exception as error:
        _log.debug("kept workspaces of %s are unknown: %s", call.target, in_one_line(error))
        return None
    return None if part is None else part.call


def measured_bytes(caller: Sequence[Call], autograd: Sequence[Call], device: Accelerator) -> tuple[int, str]:
    """The bytes that libraries keep in this process after these calls, and a note where that is uncertain."""
    place = (device.torch_device.type, device.index)
    kept = _KEPT.setdefault(place, _Kept())
    if device.live_bytes() < kept.nbytes:  # they were freed since
        kept = _KEPT[place] = _Kept()
    full: list[Call] = []

    def here(calls: Iterable[Call]) -> Left:
        return _left_by(calls, device, full)

    def in_backward(calls: Iterable[Call]) -> Left:
        return _in_backward(lambda: here(calls), device)

    with as_a_step_runs((*caller, *autograd)):
        kept.caller = _more(kept.caller, caller, here)
        kept.autograd = _more(kept.autograd, autograd, in_backward)
        if _only_tables(kept.caller) and _only_tables(kept.autograd):
            kept.apart = _on_new_stream(lambda: here((*caller, *autograd)), device)
            kept.caller = kept.caller + kept.apart if caller else []
            kept.autograd = kept.autograd + kept.apart if autograd else []
        elif _only_tables(kept.caller):  # it has multiplied before, as in a capture with a real forward pass
            kept.caller = kept.autograd
    return kept.nbytes, FULL if full else ""


def _only_tables(left: Left) -> bool:
    """Whether the bytes that a thread keeps are too few for a workspace."""
    return sum(nbytes for _, nbytes in left) < _LEAST_BYTES


def _more(known: Left, calls: Iterable[Call], run: Callable[[Iterable[Call]], Left]) -> Left:
    """What one thread keeps after these calls. Calls of before that leave bytes once more show that what they
    left was freed since."""
    again = run([call for call, _ in known])
    return (again or known) + run(calls)


def _left_by(calls: Iterable[Call], device: Accelerator, full: list[Call]) -> Left:
    """Run calls on random inputs, without their results; `full` gets those that need more memory than there
    is."""
    left = []
    for call in calls:
        before = device.live_bytes()
        try:
            _run(call)
        except torch.OutOfMemoryError:
            full.append(call)
        except Exception as error:  # the profile of ops tells of those that cannot run alone
            _log.debug("kept workspaces of %s are unknown: %s", call.target, in_one_line(error))
        nbytes = device.live_bytes() - before
        if nbytes > 0:
            left.append((call, nbytes))
    return left


def _run(call: Call) -> None:
    args, kwargs = make_sample(call)
    call.target(*args, **kwargs)


class _Within(torch.autograd.Function):
    """The identity, whose backward pass calls a function."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, run: Callable[[], None]) -> Tensor:
        ctx.run = run
        return value.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        ctx.run()
        return gradients[0], None


def _in_backward(run: Callable[[], Left], device: Accelerator) -> Left:
    """`run()` in the thread in which autograd runs backward passes of the device."""
    left: Left = []
    with torch.enable_grad():
        # without elements: autograd's thread frees its tensors only after this one has gone on
        start = torch.empty(0, device=device.torch_device, requires_grad=True)
        result = _Within.apply(start, lambda: left.extend(run()))  # type: ignore[no-untyped-call]
    torch.autograd.grad(result, start, torch.empty_like(start))
    return left


def _on_new_stream(run: Callable[[], Left], device: Accelerator) -> Left:
    """`run()` in a new thread and on a new stream: libraries may keep workspaces for either."""

    def in_thread() -> Left:
        with torch.Stream(device=device.torch_device), torch.no_grad():
            return run()

    left = in_new_thread(in_thread)
    torch.accelerator.synchronize(device.index)
    return left
