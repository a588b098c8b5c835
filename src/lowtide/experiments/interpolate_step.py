"""The largest size whose bytes, which lie near to a line, are within a budget: found with few questions.

A step at a size that nobody captured, on paper: from captured ones that have the same ops.

Bytes are polynomials of a size where nothing is rounded: of degree 1 in the batch size, of degree 2 in the
length of sequences (attention) and in the height of images. Where something is, this is a guess.
"""

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import replace
from fractions import Fraction
from itertools import count
from math import ceil, lcm, log
from operator import mul

import numpy as np

from lowtide.facts import Kind, Node, Region, Remat, Step, Storage
from lowtide.planning.simulate import Bytes

MOST_GROWTH = 16
"""How many times as large a size is asked for next, at most."""


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

    Larger sizes need more; `low` is not asked about, and is taken to fit. None where `needed` does not know.
    Sizes of `first` are asked about first; nothing is above `most`.
    """
    told: dict[int, float] = {}
    for turn in count():
        if high - low <= unit:
            return low
        untold = [size for size in first if low < size < high and size not in told]
        limit = min(high, MOST_GROWTH * max(low, unit)) if high > most else high
        halve = turn % 4 == 3
        size = untold[0] if untold else _next(budget_bytes, told, low, limit, unit=unit, halve=halve)
        nbytes = needed(size)
        if nbytes is None:
            return None
        told[size] = nbytes
        low, high = (low, size) if nbytes > budget_bytes else (size, high)
    raise AssertionError


def _next(
    budget_bytes: int, told: Mapping[int, float], low: int, high: int, *, unit: int, halve: bool
) -> int:
    """Where the line through the two sizes next to the budget meets it, between `low` and `high`."""
    size = (low + high) // 2
    near = sorted(told, key=lambda one: (abs(told[one] - budget_bytes), one))[:2]
    if len(near) == 2 and not halve:
        one, other = near
        slope = (told[other] - told[one]) / (other - one)
        if slope > 0:
            size = int(one + (budget_bytes - told[one]) / slope)
    return max(low + unit, min(size // unit * unit, high - unit))


APART = Fraction(1, 10)
"""Captured sizes nearer to each other than this share are not drawn a line through: it would magnify what
is rounded."""

MOST_ABOVE = 0.75
"""How much faster than by a power values may seem to grow: those that padding is cut from do."""


Form = tuple[object, ...]
"""What two steps must have in common for a third between them to be made of both."""


def step_at(size: int, captured: Mapping[int, Step], *, degree: int) -> Step | None:
    """The step at `size`, from the `captured` ones next to it; None where no two have the same ops."""
    if size in captured:
        return captured[size]
    chosen = sizes_alike(size, {other: form_of(step) for other, step in captured.items()}, degree=degree)
    return step_from(size, {other: captured[other] for other in chosen}) if chosen else None


def step_from(size: int, chosen: Mapping[int, Step]) -> Step:
    """The step at `size` from the `chosen` ones, the nearest first, which have the same ops.

    Seconds are on the line through the next two, whatever the degree, since they are noisy; beyond both, at
    most as steep as from nothing to the next one, which noise would be magnified above. Ways to bring values
    back are those of the nearest.
    """
    sizes = list(chosen)
    nearest, *others = (
        step if step is chosen[sizes[0]] else with_ways_of(step, chosen[sizes[0]], Fraction(other, sizes[0]))
        for other, step in chosen.items()
    )
    return _blend([nearest, *others], bytes_by=weights(size, sizes), seconds_by=seconds_by(size, sizes))


def with_ways_of(step: Step, other: Step, ratio: Fraction) -> Step:
    """The step with the same ways to bring values back as another of the same form, which is of another size
    by that ratio: those that it lacks, in proportion."""
    if all(_methods(node) == _methods(there) for node, there in zip(step.nodes, other.nodes, strict=True)):
        return step
    nodes = []
    for node, there in zip(step.nodes, other.nodes, strict=True):
        own = {remat.rule: remat for remat in node.remats}
        # a run that writes over what it reads saves the bytes of its result
        more_bytes = _made_bytes(step, node) - _made_bytes(other, there)
        remats = tuple(
            own.get(remat.rule) or _resized(remat, ratio, saved_bytes=more_bytes) for remat in there.remats
        )
        nodes.append(replace(node, remats=remats))
    return replace(step, nodes=tuple(nodes))


def _methods(node: Node) -> tuple[str, ...]:
    return tuple(remat.rule for remat in node.remats)


def _made_bytes(step: Step, node: Node) -> int:
    return sum(step.storages[made].nbytes for made in node.makes)


def _resized(remat: Remat, ratio: Fraction, *, saved_bytes: int) -> Remat:
    """What it holds inside need not grow with the size, and is not taken to shrink."""
    inside = remat.workspace_bytes
    inside = inside - saved_bytes if inside < 0 else ceil(inside * max(Fraction(1), ratio))
    return replace(remat, seconds=remat.seconds * float(ratio), workspace_bytes=inside)


def sizes_alike(size: int, forms: Mapping[int, Hashable], *, degree: int) -> list[int]:
    """The sizes next to `size` that have the same form, the nearest first, at most as many as a polynomial of
    `degree` needs; none where no two have. Those of the form of the nearest come first, if they are as many
    as it needs."""
    alike: dict[Hashable, list[int]] = {}
    for other in sorted(forms, key=lambda other: (abs(other - size), other)):
        chosen = alike.setdefault(forms[other], [])
        apart = all(abs(other - one) >= APART * max(other, one) for one in chosen)
        if apart and len(chosen) <= degree:
            chosen.append(other)
    for enough in (degree + 1, 2):
        for chosen in alike.values():
            if len(chosen) >= enough:
                return chosen
    return []


def form_of(step: Step) -> Form:
    """Not the ways to bring values back: some pay for large values alone, so that small sizes lack them."""
    nodes = ((node.op, node.reads, node.holds, node.makes, node.on_demand) for node in step.nodes)
    return (len(step.storages), *nodes)


def degree_shown(degree: int, steps: Mapping[int, Step], *, least_bytes: float) -> int:
    """`degree`, or the power by which values of `least_bytes` or more grow from the one size to the other, if
    that is higher. The steps have the same ops."""
    small, large = sorted(steps)
    pairs = zip(steps[small].storages, steps[large].storages, strict=True)
    growths = [
        there.nbytes / here.nbytes for here, there in pairs if here.nbytes and there.nbytes >= least_bytes
    ]
    shown = log(max([1.0, *growths])) / log(large / small)
    return round(shown) if shown > degree + MOST_ABOVE else degree


def weights(size: int, sizes: Sequence[int]) -> list[Fraction]:
    """Shares of the values at `sizes` in the value at `size` of the polynomial through them (Lagrange)."""
    weights = []
    for one in sizes:
        weight = Fraction(1)
        for other in sizes:
            if other != one:
                weight *= Fraction(size - other, one - other)
        weights.append(weight)
    return weights


def seconds_by(size: int, sizes: Sequence[int]) -> Callable[[Sequence[float]], float]:
    near, far = sizes[:2]
    shares = [float(weight) for weight in weights(size, (near, far))]

    def seconds(values: Sequence[float]) -> float:
        on_line = shares[0] * values[0] + shares[1] * values[1]
        in_proportion = values[0] * size / near
        if size > max(near, far):
            return max(0.0, min(on_line, in_proportion))
        return max(on_line, in_proportion) if size < min(near, far) else max(0.0, on_line)

    return seconds


def peak_from(size: int, chosen: Mapping[int, Sequence[int] | Bytes]) -> int:
    """The most bytes at `size`, from those at the same moments of the `chosen` sizes."""
    shares = np.array([float(weight) for weight in weights(size, list(chosen))])
    held = shares @ np.array([np.asarray(series, dtype=float) for series in chosen.values()])
    return ceil(float(held.max()) - 1e-3)  # of a float that was an int


def scaled(step: Step, ratio: Fraction) -> Step:
    """A guess at the step of `ratio` times the size, from one alone: parameters, their gradients and the
    optimizer's step stay as they are, and all else grows, the batch too."""
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


def _blend(
    steps: Sequence[Step],
    *,
    bytes_by: Sequence[Fraction],
    seconds_by: Callable[[Sequence[float]], float],
) -> Step:
    denominator = lcm(*(weight.denominator for weight in bytes_by))
    numerators = [int(weight * denominator) for weight in bytes_by]

    def nbytes(values: Sequence[int]) -> int:
        if values.count(values[0]) == len(values):
            return values[0]
        total: int = sum(map(mul, numerators, values))
        return -(-total // denominator)

    def storage(same: Sequence[Storage]) -> Storage:
        return replace(
            same[0],
            nbytes=max(0, nbytes([one.nbytes for one in same])),
            extra_eager_bytes=nbytes([one.extra_eager_bytes for one in same]),
        )

    def remat(same: Sequence[Remat]) -> Remat:
        return replace(
            same[0],
            seconds=seconds_by([one.seconds for one in same]),
            workspace_bytes=nbytes([one.workspace_bytes for one in same]),
        )

    def node(same: Sequence[Node]) -> Node:
        return replace(
            same[0],
            seconds=seconds_by([one.seconds for one in same]),
            workspace_bytes=nbytes([one.workspace_bytes for one in same]),
            extra_eager_bytes=nbytes([one.extra_eager_bytes for one in same]),
            remats=tuple(map(remat, zip(*(one.remats for one in same), strict=True))),
            estimated=True,
        )

    return replace(
        steps[0],
        nodes=tuple(map(node, zip(*(step.nodes for step in steps), strict=True))),
        storages=tuple(map(storage, zip(*(step.storages for step in steps), strict=True))),
    )
