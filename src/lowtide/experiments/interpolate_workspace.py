"""What the ops of a step hold inside at a size that nobody captured: measured, on calls made on paper.

Kernels choose their way by the size of what they get, so that the bytes inside do not lie on a line, and are
measured at the size itself: one run of each op that holds much. Shapes do lie on a line, or on a parabola.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from fractions import Fraction
from functools import cached_property
from math import ceil
from typing import Any

import torch
from torch import Tensor

from lowtide.experiments.interpolate_step import weights
from lowtide.facts import Action, Run, Step
from lowtide.ops.calls import Call, signature
from lowtide.profiling.costing import KnownCosts
from lowtide.torch_compat.dispatch import FakeTensorMode, map_leaves, storage_key

Texts = tuple[str, ...]
"""The signatures of one run's call at the captured sizes."""
Measure = Callable[[Mapping[str, tuple[Call, int]]], dict[str, int]]


class _NoLine(Exception):
    """A call that the others do not tell."""


class Insides:
    """What is known of the ops at captured sizes, and which of them hold inside what a line through these
    says.

    `least_bytes`: ops that should hold less are not asked. `measure` says what calls hold inside; it gets
    what is on the line with each.
    """

    def __init__(self, captured: Mapping[int, KnownCosts], *, least_bytes: int, measure: Measure) -> None:
        self.captured, self.least_bytes, self.measure = dict(sorted(captured.items())), least_bytes, measure
        self._straight: set[Texts] = set()

    def fill(self, step: Step, size: int) -> Step | None:
        """`step`, made on paper for `size` from the captured ones, with what its ops hold inside measured;
        None where paper does not tell the calls. What was on the line at a size before is not asked again.
        """
        texts_of = self._texts
        if texts_of is None:
            return None
        found: dict[Texts, tuple[str, int]] = {}
        calls: dict[str, tuple[Call, int]] = {}
        for texts, run in {texts: run for run, texts in texts_of.items()}.items():
            if texts in self._straight or len(set(texts)) == 1:
                continue
            alike = {one: known.runs[run] for one, known in self.captured.items()}
            line = self._line(size, alike)
            if line is None:
                continue
            try:
                call = call_at(size, alike)
            except _NoLine:
                return None
            found[texts] = (signature(call), line)
            calls[signature(call)] = (call, max(0, line))
        measured = self.measure(calls)
        more = {texts: measured[name] - line for texts, (name, line) in found.items() if name in measured}
        self._straight |= {texts for texts, nbytes in more.items() if abs(nbytes) < self.least_bytes}
        return _with_more_inside(step, {run: more.get(texts, 0) for run, texts in texts_of.items()})

    @cached_property
    def _texts(self) -> dict[Run, Texts] | None:
        """Of the runs that all sizes have; None where a size lacks ops that another one has. What brings
        values back may differ."""
        first, *others = (known.runs for known in self.captured.values())
        if any(_first_runs(first) != _first_runs(runs) for runs in others):
            return None
        return {
            run: tuple(signature(known.runs[run]) for known in self.captured.values())
            for run in first
            if all(run in runs for runs in others)
        }

    def _line(self, size: int, alike: Mapping[int, Call]) -> int | None:
        """Bytes inside on the line through the captured sizes; None where they are few, there and next to
        it."""
        costs = [self.captured[one].measured_cost(call) for one, call in alike.items()]
        told = [0 if cost is None else cost.workspace_bytes for cost in costs]
        shares = weights(size, list(alike))
        line = ceil(sum(share * nbytes for share, nbytes in zip(shares, told, strict=True)))
        near = min(zip(alike, told, strict=True), key=lambda each: (abs(each[0] - size), each[0]))[1]
        return line if max(line, near) >= self.least_bytes else None


def call_at(size: int, calls: Mapping[int, Call]) -> Call:
    """The call at `size` from those of other sizes; raises `_NoLine` where they are no line."""
    sizes = sorted(calls)
    shares = weights(size, sizes)
    storages: dict[int, Tensor] = {}

    def number(values: Sequence[int]) -> int:
        if len(set(values)) == 1:
            return values[0]
        value = sum((share * one for share, one in zip(shares, values, strict=True)), Fraction(0))
        if value.denominator != 1 or value < 0:
            raise _NoLine
        return int(value)

    def tensor(same: Sequence[Tensor]) -> Tensor:
        first = same[0]
        if any(one.dtype != first.dtype or one.dim() != first.dim() or one.is_conj() for one in same):
            raise _NoLine
        key = storage_key(first)
        if key not in storages:
            nbytes = number([one.untyped_storage().nbytes() for one in same])
            storages[key] = torch.empty(nbytes, dtype=torch.uint8, device=first.device)
        shape = [number([int(one.shape[dim]) for one in same]) for dim in range(first.dim())]
        stride = [number([int(one.stride(dim)) for one in same]) for dim in range(first.dim())]
        offset = number([int(one.storage_offset()) for one in same])
        return storages[key].view(first.dtype).as_strided(shape, stride, offset)

    def leaf(same: Sequence[Any]) -> Any:
        if all(isinstance(one, Tensor) for one in same):
            return tensor(same)
        if all(type(one) is int for one in same):
            return number(same)
        if any(repr(one) != repr(same[0]) for one in same):
            raise _NoLine
        return same[0]

    leaves = [_leaves(calls[one]) for one in sizes]
    if len({len(each) for each in leaves}) > 1 or len({calls[one].target for one in sizes}) > 1:
        raise _NoLine
    with FakeTensorMode(), torch.no_grad():
        left = iter([leaf(same) for same in zip(*leaves, strict=True)])
    first = calls[sizes[0]]
    args, kwargs = map_leaves(lambda _: next(left), (first.args, first.kwargs))
    return Call(first.target, args, kwargs)


def _first_runs(runs: Mapping[Run, Call]) -> set[Run]:
    return {run for run in runs if run.is_first}


def _leaves(call: Call) -> list[Any]:
    found: list[Any] = []
    map_leaves(found.append, (call.args, call.kwargs))
    return found


def _with_more_inside(step: Step, more: Mapping[Run, int]) -> Step:
    """The step whose runs hold so many bytes more inside; a remat without a call of its own, as its node."""
    nodes = list(step.nodes)
    for rank in sorted({run.rank for run, nbytes in more.items() if nbytes}):
        node = nodes[rank]
        own = more.get(Run(rank), 0)
        remats = tuple(
            remat
            if remat.action is Action.OFFLOAD
            else replace(remat, workspace_bytes=remat.workspace_bytes + more.get(Run(rank, remat.rule), own))
            for remat in node.remats
        )
        nodes[rank] = replace(node, workspace_bytes=node.workspace_bytes + own, remats=remats)
    return replace(step, nodes=tuple(nodes))
