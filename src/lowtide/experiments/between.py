"""A step at a size that nobody captured, on paper: from captured ones that have the same ops.

Bytes are polynomials of a size where nothing is rounded: of degree 1 in the batch size, of degree 2 in the
length of sequences (attention) and in the height of images. Where something is, this is a guess.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from fractions import Fraction
from math import ceil

from lowtide.facts import Node, Recipe, Step, Storage

APART = Fraction(1, 10)
"""Captured sizes nearer to each other than this share are not drawn a line through: it would magnify what
is rounded."""


def step_at(size: int, captured: Mapping[int, Step], *, degree: int) -> Step | None:
    """The step at `size`, from the `captured` ones next to it; None where fewer than two have the same ops.

    Seconds are on the line through the next two, whatever the degree, since they are noisy; beyond both, at
    most as steep as from nothing to the next one, which noise would be magnified above.
    """
    if size in captured:
        return captured[size]
    chosen = sizes_alike(size, captured, degree=degree)
    if len(chosen) < 2:
        return None
    return _blend(
        [captured[other] for other in chosen],
        bytes_by=weights(size, chosen),
        seconds_by=_seconds_by(size, chosen),
    )


def sizes_alike(size: int, captured: Mapping[int, Step], *, degree: int) -> list[int]:
    """The `captured` sizes next to `size` that have the same ops, the nearest first, at most as many as a
    polynomial of `degree` needs; none where no two have. Those with the ops of the nearest come first."""
    alike: dict[tuple[object, ...], list[int]] = {}
    for other in sorted(captured, key=lambda other: (abs(other - size), other)):
        chosen = alike.setdefault(_form(captured[other]), [])
        apart = all(abs(other - one) >= APART * max(other, one) for one in chosen)
        if apart and len(chosen) <= degree:
            chosen.append(other)
    return next((sizes for sizes in alike.values() if len(sizes) > 1), [])


def is_steady(sizes: Sequence[int], captured: Mapping[int, Step]) -> bool:
    """Whether all captured sizes above the smallest of `sizes` have its ops: small ones may lack some."""
    own = _form(captured[min(sizes)])
    return all(_form(step) == own for size, step in captured.items() if size > min(sizes))


def _form(step: Step) -> tuple[object, ...]:
    """What two steps must have in common for a third between them to be made of both."""
    return (
        len(step.storages),
        *(
            (node.op, node.reads, node.holds, node.makes, tuple(recipe.method for recipe in node.recipes))
            for node in step.nodes
        ),
    )


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


def _seconds_by(size: int, sizes: Sequence[int]) -> Callable[[Sequence[float]], float]:
    near, far = sizes[:2]
    shares = [float(weight) for weight in weights(size, (near, far))]

    def seconds(values: Sequence[float]) -> float:
        on_line = shares[0] * values[0] + shares[1] * values[1]
        in_proportion = values[0] * size / near
        if size > max(near, far):
            return max(0.0, min(on_line, in_proportion))
        return max(on_line, in_proportion) if size < min(near, far) else max(0.0, on_line)

    return seconds


def _blend(
    steps: Sequence[Step],
    *,
    bytes_by: Sequence[Fraction],
    seconds_by: Callable[[Sequence[float]], float],
) -> Step:
    def nbytes(values: Sequence[int]) -> int:
        if len(set(values)) == 1:
            return values[0]
        return ceil(sum(weight * value for weight, value in zip(bytes_by, values, strict=True)))

    def storage(same: Sequence[Storage]) -> Storage:
        return replace(
            same[0],
            nbytes=max(0, nbytes([one.nbytes for one in same])),
            extra_eager_bytes=nbytes([one.extra_eager_bytes for one in same]),
        )

    def recipe(same: Sequence[Recipe]) -> Recipe:
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
            recipes=tuple(map(recipe, zip(*(one.recipes for one in same), strict=True))),
            estimated=True,
        )

    return replace(
        steps[0],
        nodes=tuple(map(node, zip(*(step.nodes for step in steps), strict=True))),
        storages=tuple(map(storage, zip(*(step.storages for step in steps), strict=True))),
    )
