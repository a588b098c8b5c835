"""What the ops of a step hold inside at a size that nobody captured: measured, on calls made on paper.

Kernels choose their way by the size of what they get, so that the bytes inside do not lie on a line, and are
measured at the size itself: one run of each op that holds much. Shapes do lie on a line, or on a parabola.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from fractions import Fraction
from math import ceil
from typing import Any

import torch
from torch import Tensor

from lowtide.experiments.between import weights
from lowtide.facts import Action, Run, Step
from lowtide.profiling.known import Known
from lowtide.torchside.calls import Call, map_leaves, signature, storage_key
from lowtide.torchside.hooks import FakeTensorMode

Measure = Callable[[Mapping[str, Call]], dict[str, int]]


class _NoLine(Exception):
    """A call that the others do not tell."""


def with_insides(
    step: Step, size: int, captured: Mapping[int, Known], *, least_bytes: int, measure: Measure
) -> Step | None:
    """`step`, made on paper for `size`, with what its ops hold inside measured, where that is `least_bytes`
    on paper or more; None where paper does not tell the calls. `captured`: what is known at the sizes that it
    was made from. `measure` says what calls hold inside.
    """
    sizes = sorted(captured)
    lines: dict[Run, tuple[str, int]] = {}
    calls: dict[str, Call] = {}
    shares = weights(size, sizes)
    by_texts: dict[tuple[str, ...], tuple[str, int] | None] = {}
    for run in captured[sizes[0]].runs:
        alike = [captured[one].runs.get(run) for one in sizes]
        if None in alike:
            return None
        given = [call for call in alike if call is not None]
        texts = tuple(signature(call) for call in given)
        if texts not in by_texts:
            costs = [captured[one].measured_cost(call) for one, call in zip(sizes, given, strict=True)]
            told = [0 if cost is None else cost.workspace_bytes for cost in costs]
            line = ceil(sum(share * nbytes for share, nbytes in zip(shares, told, strict=True)))
            by_texts[texts] = None
            if max(line, *told) >= least_bytes and len(set(texts)) > 1:
                try:
                    call = call_at(size, dict(zip(sizes, given, strict=True)))
                except _NoLine:
                    return None
                by_texts[texts] = (signature(call), line)
                calls[signature(call)] = call
        found = by_texts[texts]
        if found is not None:
            lines[run] = found
    measured = measure(calls)
    more = {run: measured[name] - line for run, (name, line) in lines.items() if name in measured}
    return _with_more_inside(step, more, captured[sizes[0]].runs)


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


def _leaves(call: Call) -> list[Any]:
    found: list[Any] = []
    map_leaves(found.append, (call.args, call.kwargs))
    return found


def _with_more_inside(step: Step, more: Mapping[Run, int], calls: Mapping[Run, Call]) -> Step:
    """The step whose runs hold so many bytes more inside; a recipe without a call of its own, as its node."""

    def more_of(run: Run, own: int) -> int:
        return more.get(run, 0) if run in calls else own

    nodes = list(step.nodes)
    for rank in sorted({run.node for run in more}):
        node = nodes[rank]
        own = more.get(Run(rank), 0)
        recipes = tuple(
            recipe
            if recipe.action is Action.OFFLOAD
            else replace(
                recipe, workspace_bytes=recipe.workspace_bytes + more_of(Run(rank, recipe.method), own)
            )
            for recipe in node.recipes
        )
        nodes[rank] = replace(node, workspace_bytes=node.workspace_bytes + own, recipes=recipes)
    return replace(step, nodes=tuple(nodes))
