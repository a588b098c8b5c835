"""A step at a size that was not captured, interpolated from captured sizes with the same ops.

    captured 32, 64, 96  ->  bytes at 80: the polynomial through two of them (degree 1) or all (degree 2)
                             seconds at 80: the line through the nearest two
                             workspaces at 80: measured, on interpolated calls

Bytes are polynomials of a size where nothing is rounded: of degree 1 in the batch size, of degree 2 in the
length of sequences (attention) and in the height of images. Elsewhere this is an approximation. Workspaces
are not on such a line, since kernels choose their algorithm by the size of their inputs: `Workspaces` runs
each op that has a large one, once, on a call whose shapes are interpolated.
"""

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import replace
from fractions import Fraction
from functools import cached_property
from itertools import count
from math import ceil, lcm, log
from operator import mul
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lowtide.facts import Action, Kind, Node, Region, Remat, Run, Step, Storage
from lowtide.ops.calls import Call, signature
from lowtide.planning.simulate import Bytes
from lowtide.profiling.costing import KnownCosts
from lowtide.torch_compat.dispatch import FakeTensorMode, map_leaves, storage_key

LEAST_DISTANCE = Fraction(1, 10)
"""Captured sizes nearer to each other than this share are not interpolated: that would magnify rounding."""
MOST_GROWTH = 16
"""The largest factor from one size of `last_within` to the next."""
MOST_ABOVE = 0.75
"""The excess over a power that does not raise the degree: values without their padding seem to grow
faster."""

Form = tuple[object, ...]
"""The part that two steps must have in common to interpolate a third."""
Signatures = tuple[str, ...]
"""The signatures of one run's call at the captured sizes."""
MeasureWorkspaces = Callable[[Mapping[str, tuple[Call, int]]], dict[str, int]]


def form_of(step: Step) -> Form:
    """Ops and storages, without remats: small sizes lack the remats that pay only for large values."""
    nodes = ((node.op, node.reads, node.holds, node.makes, node.on_demand) for node in step.nodes)
    return (len(step.storages), *nodes)


def is_apart(size: int, others: Sequence[int]) -> bool:
    """Whether a size is far enough from all others to interpolate between it and them."""
    return all(abs(size - other) >= LEAST_DISTANCE * max(size, other) for other in others)


def sizes_alike(size: int, forms: Mapping[int, Hashable], *, degree: int) -> list[int]:
    """The sizes next to `size` that have one form, the nearest first; empty where no two have.

    At most as many as a polynomial of `degree` needs. The form of the nearest size is preferred, where it has
    as many; else any form that has.
    """
    alike: dict[Hashable, list[int]] = {}
    for other in sorted(forms, key=lambda other: (abs(other - size), other)):
        chosen = alike.setdefault(forms[other], [])
        if is_apart(other, chosen) and len(chosen) <= degree:
            chosen.append(other)
    enough = [[chosen for chosen in alike.values() if len(chosen) >= least] for least in (degree + 1, 2)]
    return next((chosen for found in enough for chosen in found), [])


def weights(size: int, sizes: Sequence[int]) -> list[Fraction]:
    """Weights of the values at `sizes` in the value at `size` of the polynomial through them (Lagrange)."""
    found = []
    for one in sizes:
        weight = Fraction(1)
        for other in sizes:
            if other != one:
                weight *= Fraction(size - other, one - other)
        found.append(weight)
    return found


def interpolate_seconds(size: int, sizes: Sequence[int]) -> Callable[[Sequence[float]], float]:
    """Seconds at `size` from those at `sizes`, the nearest first: on the line through the nearest two,
    whatever the degree, since they are noisy.

    Beyond both, the line is at most as steep as from the origin to the nearest one, so that it does not
    magnify noise.
    """
    near, far = sizes[:2]
    shares = [float(weight) for weight in weights(size, (near, far))]

    def seconds(values: Sequence[float]) -> float:
        on_line = shares[0] * values[0] + shares[1] * values[1]
        in_proportion = values[0] * size / near
        if size > max(near, far):
            return max(0.0, min(on_line, in_proportion))
        return max(on_line, in_proportion) if size < min(near, far) else max(0.0, on_line)

    return seconds


def interpolate_peak(size: int, chosen: Mapping[int, Sequence[int] | Bytes]) -> int:
    """The most bytes at `size`, from those at the same time points of the `chosen` sizes."""
    shares = np.array([float(weight) for weight in weights(size, list(chosen))])
    live = shares @ np.array([np.asarray(series, dtype=float) for series in chosen.values()])
    return ceil(float(live.max()) - 1e-3)  # rounding of floats that were ints


def interpolate_step(size: int, chosen: Mapping[int, Step]) -> Step:
    """The step at `size` from the `chosen` ones, the nearest first, which have the same form.

    Its remats are those of the nearest.
    """
    sizes = list(chosen)
    nearest = chosen[sizes[0]]
    steps = [with_remats_of(step, nearest, Fraction(other, sizes[0])) for other, step in chosen.items()]
    shares, seconds_at = weights(size, sizes), interpolate_seconds(size, sizes)
    denominator = lcm(*(share.denominator for share in shares))
    numerators = [int(share * denominator) for share in shares]

    def nbytes(same: Sequence[Any], field: str) -> int:
        values = [getattr(one, field) for one in same]
        if values.count(values[0]) == len(values):
            return int(values[0])
        total: int = sum(map(mul, numerators, values))
        return -(-total // denominator)

    def storage(same: Sequence[Storage]) -> Storage:
        extra = nbytes(same, "extra_eager_bytes")
        return replace(same[0], nbytes=max(0, nbytes(same, "nbytes")), extra_eager_bytes=extra)

    def remat(same: Sequence[Remat]) -> Remat:
        seconds = seconds_at([one.seconds for one in same])
        return replace(same[0], seconds=seconds, workspace_bytes=nbytes(same, "workspace_bytes"))

    def node(same: Sequence[Node]) -> Node:
        return replace(
            same[0],
            seconds=seconds_at([one.seconds for one in same]),
            workspace_bytes=nbytes(same, "workspace_bytes"),
            extra_eager_bytes=nbytes(same, "extra_eager_bytes"),
            remats=tuple(map(remat, zip(*(one.remats for one in same), strict=True))),
            estimated=True,
        )

    return replace(
        nearest,
        nodes=tuple(map(node, zip(*(step.nodes for step in steps), strict=True))),
        storages=tuple(map(storage, zip(*(step.storages for step in steps), strict=True))),
    )


def with_remats_of(step: Step, other: Step, ratio: Fraction) -> Step:
    """The step with the remats of another step of the same form, which is `1 / ratio` times as large. Remats
    that the step lacks are scaled."""
    pairs = list(zip(step.nodes, other.nodes, strict=True))
    if all([r.rule for r in node.remats] == [r.rule for r in there.remats] for node, there in pairs):
        return step
    nodes = []
    for node, there in pairs:
        own = {remat.rule: remat for remat in node.remats}
        # a run that overwrites an input saves the bytes of its result
        saved_bytes = _made_bytes(step, node) - _made_bytes(other, there)
        remats = tuple(own.get(r.rule) or _resized(r, ratio, saved_bytes=saved_bytes) for r in there.remats)
        nodes.append(replace(node, remats=remats))
    return replace(step, nodes=tuple(nodes))


def _made_bytes(step: Step, node: Node) -> int:
    return sum(step.storages[made].nbytes for made in node.makes)


def _resized(remat: Remat, ratio: Fraction, *, saved_bytes: int) -> Remat:
    """Seconds scale; a workspace does not shrink."""
    nbytes = remat.workspace_bytes
    nbytes = nbytes - saved_bytes if nbytes < 0 else ceil(nbytes * max(Fraction(1), ratio))
    return replace(remat, seconds=remat.seconds * float(ratio), workspace_bytes=nbytes)


def extrapolate_step(step: Step, ratio: Fraction) -> Step:
    """About the step at `ratio` times the size, from one step: parameters, their gradients and the
    optimizer's step do not change, all else grows, the batch too."""
    updates = [node for node in step.nodes if node.region is Region.OPTIMIZER]
    stay = {storage for node in updates for storage in node.makes}
    stay |= {
        one.id
        for one in step.storages
        if (one.static and one.kind is not Kind.INPUT) or (one.pinned and one.kind is Kind.GRADIENT)
    }
    storages = tuple(
        one if one.id in stay else replace(one, nbytes=ceil(one.nbytes * ratio)) for one in step.storages
    )
    nodes = tuple(
        node
        if node.region is Region.OPTIMIZER or not node.workspace_bytes
        else replace(node, workspace_bytes=ceil(node.workspace_bytes * ratio))
        for node in step.nodes
    )
    return replace(step, storages=storages, nodes=nodes)


def degree_shown(degree: int, steps: Mapping[int, Step], *, least_bytes: float) -> int:
    """`degree`, or the power by which values of `least_bytes` or more grow from one size to the other, if
    that is higher. The steps have the same form."""
    small, large = sorted(steps)
    pairs = zip(steps[small].storages, steps[large].storages, strict=True)
    growths = [
        there.nbytes / here.nbytes for here, there in pairs if here.nbytes and there.nbytes >= least_bytes
    ]
    shown = log(max([1.0, *growths])) / log(large / small)
    return round(shown) if shown > degree + MOST_ABOVE else degree


def last_within(
    budget_bytes: int,
    needed: Callable[[int], float | None],
    *,
    low: int,
    high: int,
    unit: int,
    most: int,
    first: Sequence[int] = (),
) -> int | None:
    """The largest multiple of `unit` from `low` to below `high` that needs at most the budget.

    Larger sizes need more; `low` is taken to fit. Asks about the sizes of `first`, then where the line
    through the two sizes nearest to the budget meets it, and every fourth time half-way. None where `needed`
    gives None. No size is above `most`.
    """
    known: dict[int, float] = {}
    for turn in count():
        if high - low <= unit:
            return low
        limit = min(high, MOST_GROWTH * max(low, unit)) if high > most else high
        size = (low + limit) // 2
        near = sorted(known, key=lambda one: (abs(known[one] - budget_bytes), one))[:2]
        if len(near) == 2 and turn % 4 != 3:
            one, other = near
            slope = (known[other] - known[one]) / (other - one)
            if slope > 0:
                size = int(one + (budget_bytes - known[one]) / slope)
        size = max(low + unit, min(size // unit * unit, limit - unit))
        size = next((each for each in first if low < each < high and each not in known), size)
        nbytes = needed(size)
        if nbytes is None:
            return None
        known[size] = nbytes
        low, high = (low, size) if nbytes > budget_bytes else (size, high)
    raise AssertionError


class NotInterpolable(Exception):
    """A call whose arguments at the captured sizes fit no polynomial."""


class Workspaces:
    """Workspaces at other sizes than the `captured` ones.

    `least_bytes`: ops whose workspace should be smaller are not run. `measure` runs calls; each comes with
    its interpolated workspace.
    """

    def __init__(
        self, captured: Mapping[int, KnownCosts], *, least_bytes: int, measure: MeasureWorkspaces
    ) -> None:
        self.captured, self.least_bytes, self.measure = dict(sorted(captured.items())), least_bytes, measure
        self._linear: set[Signatures] = set()

    def measured(self, step: Step, size: int) -> Step | None:
        """`step`, interpolated at `size`, with its workspaces measured; None where its calls cannot be
        interpolated. An op whose workspace was as interpolated at one size is not run at the next."""
        signatures_of = self._signatures
        if signatures_of is None:
            return None
        found: dict[Signatures, tuple[str, int]] = {}
        calls: dict[str, tuple[Call, int]] = {}
        for signatures, run in {signatures: run for run, signatures in signatures_of.items()}.items():
            if signatures in self._linear or len(set(signatures)) == 1:
                continue
            alike = {one: known.runs[run] for one, known in self.captured.items()}
            expected = self._expected_bytes(size, alike)
            if expected is None:
                continue
            try:
                call = call_at(size, alike)
            except NotInterpolable:
                return None
            found[signatures] = (signature(call), expected)
            calls[signature(call)] = (call, max(0, expected))
        measured = self.measure(calls)
        more = {key: measured[name] - nbytes for key, (name, nbytes) in found.items() if name in measured}
        self._linear |= {key for key, nbytes in more.items() if abs(nbytes) < self.least_bytes}
        return _with_more_workspace(step, {run: more.get(key, 0) for run, key in signatures_of.items()})

    @cached_property
    def _signatures(self) -> dict[Run, Signatures] | None:
        """The signatures of runs that all sizes have; None where their ops differ. Remats may differ."""
        first, *others = (known.runs for known in self.captured.values())
        if len({frozenset(run for run in runs if run.is_first) for runs in (first, *others)}) > 1:
            return None
        return {
            run: tuple(signature(known.runs[run]) for known in self.captured.values())
            for run in first
            if all(run in runs for runs in others)
        }

    def _expected_bytes(self, size: int, alike: Mapping[int, Call]) -> int | None:
        """The interpolated workspace; None where that is small, and at the nearest size as well."""
        costs = [self.captured[one].measured_cost(call) for one, call in alike.items()]
        known = [0 if cost is None else cost.workspace_bytes for cost in costs]
        shares = weights(size, list(alike))
        expected = ceil(sum(share * nbytes for share, nbytes in zip(shares, known, strict=True)))
        near = min(zip(alike, known, strict=True), key=lambda each: (abs(each[0] - size), each[0]))[1]
        return expected if max(expected, near) >= self.least_bytes else None


def call_at(size: int, calls: Mapping[int, Call]) -> Call:
    """The call at `size` from those of other sizes."""
    sizes = sorted(calls)
    shares = weights(size, sizes)
    storages: dict[int, Tensor] = {}

    def number(values: Sequence[int]) -> int:
        if len(set(values)) == 1:
            return values[0]
        value = sum((share * one for share, one in zip(shares, values, strict=True)), Fraction(0))
        if value.denominator != 1 or value < 0:
            raise NotInterpolable
        return int(value)

    def tensor(same: Sequence[Tensor]) -> Tensor:
        first = same[0]
        if any(one.dtype != first.dtype or one.dim() != first.dim() or one.is_conj() for one in same):
            raise NotInterpolable
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
            raise NotInterpolable
        return same[0]

    leaves: list[list[Any]] = [[] for _ in sizes]
    for one, found in zip(sizes, leaves, strict=True):
        map_leaves(found.append, (calls[one].args, calls[one].kwargs))
    if len(set(map(len, leaves))) > 1 or len({calls[one].target for one in sizes}) > 1:
        raise NotInterpolable
    with FakeTensorMode(), torch.no_grad():
        left = iter([leaf(same) for same in zip(*leaves, strict=True)])
    first = calls[sizes[0]]
    args, kwargs = map_leaves(lambda _: next(left), (first.args, first.kwargs))
    return Call(first.target, args, kwargs)


def _with_more_workspace(step: Step, more: Mapping[Run, int]) -> Step:
    """The step with `more` bytes in the workspaces of runs; a remat without its own call gets those of its
    node."""
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
