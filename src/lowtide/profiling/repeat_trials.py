"""Try ops of other libraries before a plan may run them again.

Each different call of such an op runs a few times on the same random inputs, and once more on equal inputs
elsewhere in memory, from the bits of which nothing may differ. Refused is an op that

- gives other bits the next time: it draws, counts, or adds in any order
- changes its inputs or a random state (of torch, Python, numpy)
- returns memory of its inputs, or the same memory twice
- cannot run alone on random inputs, or is too large to be tried within the memory limit

Shortcomings: an op that differs rarely, or only for certain values, may pass; so may one with a state that no
result shows.
"""

import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy
import torch

from lowtide.analyze.captured_step import Captured
from lowtide.facts import Node, Region, Run, Step
from lowtide.generators import random_state, with_generators
from lowtide.ops.calls import Call, signature
from lowtide.ops.repeatable_ops import full_name, functionalized, is_named, statement_of
from lowtide.profiling.devices import outside_profiler
from lowtide.profiling.op_costs import as_a_step_runs
from lowtide.profiling.op_trials import in_one_line
from lowtide.profiling.samples import make_sample
from lowtide.profiling.work import shrink, work_of
from lowtide.remat.recompute import UNKNOWN, Recompute, is_foreign, reason_unrepeatable
from lowtide.torch_compat.dispatch import OpOverload, iter_tensors, real_tensors, storage_key
from lowtide.units import format_size

TIMES = 3
"""How often an op runs on the same inputs; with two threads, two runs are often equal by luck."""
_COPIES = 4
"""Inputs twice and results twice are live during a trial: of how many times the limit a call may take."""

OTHER_BITS = "gives another result when it runs again on the same inputs"
DRAWS = "draws random numbers"
WRITES = "changes its inputs, of which its schema does not tell"
SAME_MEMORY = "returns the same memory each time"
INPUT_MEMORY = "returns memory of its inputs"
NOT_ALONE = "cannot be tried alone: {error}"
TOO_LARGE = "is too large to be tried within a memory limit of {limit}"
ABSENT = "cannot be tried on a GPU that is not there"

REFUSED = "'{op}' is not run again by any plan: it {reason}"
UNNAMED = (
    "results of custom ops are kept ({ops}), and so is what leads to them: lowtide.repeatable('{first}') "
    "lets plans run an op again that gives the same result each time"
)

_verdicts: dict[tuple[Any, str], str] = {}


def with_tried_ops(
    step: Step, captured: Captured, calls: Mapping[Run, Call], *, memory_limit_bytes: int
) -> Step:
    """The step without recomputes of ops that failed their trial; notes say which, and why.

    The names that the user stated for ops of the step are in its `repeatable`.
    """
    reasons: dict[int, str] = {}
    for rank, op in _foreign(captured).items():
        if is_named(op) and step.nodes[rank].remat(Recompute.name) is not None:
            reasons[rank] = _reason(calls[Run(rank)], memory_limit_bytes)
    return _with_reasons(step, captured, reasons)


def with_untried_ops(step: Step, captured: Captured) -> Step:
    """The step for an absent GPU, on which no op of another library can be tried."""
    foreign = _foreign(captured)
    return _with_reasons(step, captured, {r: ABSENT for r, op in foreign.items() if is_named(op)})


def reason_not_repeatable(call: Call, *, memory_limit_bytes: int) -> str:
    """Why no plan may run this call again; empty if nothing speaks against it."""
    work = work_of(call)
    if _COPIES * work.nbytes > memory_limit_bytes:
        part = shrink(call, work, limit_bytes=memory_limit_bytes // _COPIES)
        if part is None:
            return TOO_LARGE.format(limit=format_size(memory_limit_bytes))
        call = part.call
    try:
        with as_a_step_runs([call]), _python_states_kept():
            return _tried(call)
    except Exception as error:  # a custom op may raise anything
        return NOT_ALONE.format(error=in_one_line(error))


def same_results(one: Any, other: Any) -> bool:
    """Whether results are equal to the last bit, NaN in the same places included."""
    first, second = list(iter_tensors(one)), list(iter_tensors(other))
    return len(first) == len(second) and all(
        a.shape == b.shape and a.dtype == b.dtype and _equal(a, b) for a, b in zip(first, second, strict=True)
    )


def _equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    return torch.equal(one, other) or bool(((one == other) | (one.isnan() & other.isnan())).all())


def _tried(call: Call) -> str:
    args, kwargs = make_sample(call)
    given = list(iter_tensors((args, kwargs)))
    before, states = [tensor.clone() for tensor in given], _states(call)
    first = call.target(*args, **kwargs)
    for number in range(TIMES):
        if _states(call) != states:
            return DRAWS
        if not same_results(given, before):
            return WRITES
        if _share(first, given):
            return INPUT_MEMORY
        if number == TIMES - 1:  # as in a step, where the inputs of the second run may be elsewhere
            del before
            args, kwargs = make_sample(call)
            before = given = list(iter_tensors((args, kwargs)))
        again = call.target(*args, **kwargs)
        if _states(call) != states:
            return DRAWS
        if _share(first, list(iter_tensors(again))):
            return SAME_MEMORY
        if not same_results(first, again):
            return OTHER_BITS
    return ""


def _share(result: Any, others: list[torch.Tensor]) -> bool:
    taken = {storage_key(tensor) for tensor in others}
    return any(storage_key(tensor) in taken for tensor in iter_tensors(result))


def _states(call: Call) -> list[Any]:
    """All random states that an op might move, in a form that can be compared."""
    devices = with_generators(tensor.device for tensor in call.tensors)
    numbers: Any = numpy.random.get_state()
    kind, keys, *rest = numbers
    return [
        *(bytes(random_state(device).numpy()) for device in devices),
        random.getstate(),
        (kind, bytes(keys), *rest),
    ]


@contextmanager
def _python_states_kept() -> Iterator[None]:
    python, numbers = random.getstate(), numpy.random.get_state()
    try:
        yield
    finally:
        random.setstate(python)
        numpy.random.set_state(numbers)


def _reason(call: Call, memory_limit_bytes: int) -> str:
    key = (call.target, signature(call))
    if key not in _verdicts:
        with real_tensors():
            _verdicts[key] = outside_profiler(
                lambda: reason_not_repeatable(call, memory_limit_bytes=memory_limit_bytes)
            )
    return _verdicts[key]


def _foreign(captured: Captured) -> dict[int, OpOverload[..., Any]]:
    """The ops of other libraries by their rank, in order, those inside of a functional form included."""
    found = {}
    for rank, place in sorted(captured.graph_nodes.items()):
        if place.node.op != "call_function":
            continue
        op = functionalized(place.node.target, place.node.args) or place.node.target
        if isinstance(op, OpOverload) and is_foreign(op):
            found[rank] = op
    return found


def _with_reasons(step: Step, captured: Captured, reasons: Mapping[int, str]) -> Step:
    nodes = list(step.nodes)
    for rank, reason in reasons.items():
        if reason:
            nodes[rank] = _kept(nodes[rank], reason)
    forward = {r: op for r, op in _foreign(captured).items() if nodes[r].region is Region.FORWARD}
    refused = {
        full_name(op): reasons.get(rank) or reason_unrepeatable(captured.graph_nodes[rank].node)
        for rank, op in reversed(forward.items())
        if is_named(op)
    }
    notes = [REFUSED.format(op=op, reason=why) for op, why in sorted(refused.items()) if why]
    unnamed = sorted({full_name(op) for rank, op in forward.items() if nodes[rank].fixed == UNKNOWN})
    if unnamed:
        notes.append(UNNAMED.format(ops=", ".join(unnamed), first=unnamed[0]))
    names = {statement_of(op) for op in forward.values()} - {""}
    return replace(step, nodes=tuple(nodes), notes=(*step.notes, *notes), repeatable=tuple(sorted(names)))


def _kept(node: Node, reason: str) -> Node:
    """The node without its recompute."""
    remats = tuple(remat for remat in node.remats if remat.rule != Recompute.name)
    return replace(node, remats=remats, fixed=reason)
