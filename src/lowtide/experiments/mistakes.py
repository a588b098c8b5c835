"""What a method leaves behind that eager training does not: equal, rounded otherwise, or wrong.

Bits are compared over all steps. Whether a difference is a mistake or rounding is judged after the
first step alone, since every optimizer blows up rounding in the next ones. Some models blow it up in the
first step already, such as deep ones with batch norm on few samples: there a difference that eager training
shows itself, from parameters that are the next numbers to its own, is no mistake. Not parameters are judged
but what they are made of: Adam's first step takes nothing but the sign of a gradient, which rounding turns
where it is next to zero.
"""

import copy
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from lowtide.checking.comparison import Start, train
from lowtide.report.records import Results
from lowtide.zoo.targets import Target

ROUNDING = 1e-3
"""The largest error, relative to the tensor's largest value, that still passes for rounding."""
NEGLIGIBLE = 1e-5
"""Gradients below this share of the model's largest are zero but for rounding."""

SHAKEN = 10
"""So many times what the smallest change of the parameters does still passes for rounding."""

GRADIENT, BUFFER, PARAMETER = "gradient of ", "buffer ", "parameter "


@dataclass(frozen=True, slots=True)
class Mistake:
    """A tensor whose bits differ after `step`; `error` is relative, infinite where it cannot be said.

    `shaken`: what the smallest change of the parameters does to that tensor in eager training.
    """

    name: str
    step: int
    error: float
    shaken: float = 0.0

    @property
    def wrong(self) -> bool:
        if self.step > 1 or self.name.startswith(PARAMETER):
            return False
        return not self.error <= max(ROUNDING, SHAKEN * self.shaken)


def mistakes(target: Target, start: Start, expected: Sequence[Path]) -> list[Mistake]:
    """Train from `start` and compare with the results on disk; the first difference comes first."""
    found: list[Mistake] = []
    for step, (seen, path) in enumerate(
        zip(train(target, start, len(expected)), expected, strict=True), start=1
    ):
        wanted = torch.load(path, mmap=True)
        found += [Mistake(name, step, error) for name, error in _errors(wanted, seen)]
    return found


def shaken(target: Target, start: Start, expected: Path) -> dict[str, float]:
    """The relative errors of eager training's first step, by name, from parameters that are the next numbers
    to those of `start`; `expected` is that step from `start` itself."""
    moved = copy.copy(start)
    moved.tensors = [_next_to(tensor) for tensor in start.tensors]
    wanted = torch.load(expected, mmap=True)
    return {name: error for seen in train(target, moved, 1) for name, error in _errors(wanted, seen)}


def weighed(found: Sequence[Mistake], sensitivity: Mapping[str, float]) -> list[Mistake]:
    """The same differences, seen beside those of `shaken`."""
    return [replace(mistake, shaken=sensitivity.get(mistake.name, 0.0)) for mistake in found]


def _errors(wanted: dict[str, torch.Tensor], seen: dict[str, torch.Tensor]) -> Iterator[tuple[str, float]]:
    largest = max((_size(value) for name, value in wanted.items() if name.startswith(GRADIENT)), default=0.0)
    for name in dict.fromkeys((*wanted, *seen)):
        if name not in wanted or name not in seen or wanted[name].shape != seen[name].shape:
            yield name, float("inf")
        elif not torch.equal(wanted[name], seen[name]):
            scale = max(_size(wanted[name]), NEGLIGIBLE * largest if name.startswith(GRADIENT) else 0.0)
            off = (wanted[name].double() - seen[name].double()).abs().max().item()
            exact_kind = not wanted[name].is_floating_point()
            yield name, float("inf") if exact_kind or not scale else off / scale


def _next_to(values: torch.Tensor) -> torch.Tensor:
    return values * (1 + torch.finfo(values.dtype).eps) if values.is_floating_point() else values


def _size(value: torch.Tensor) -> float:
    return value.double().abs().max().item() if value.numel() else 0.0


def judge(found: Sequence[Mistake], *, num_gradients: int, unlike_eager: bool = False) -> tuple[Results, str]:
    """What the results are, and in words what is wrong: `72 of 73 gradients, 12 buffers`.

    `unlike_eager`: the comparison was with the method's own graph, since eager's results are others.
    """
    if not found:
        return (Results.UNLIKE_EAGER if unlike_eager else Results.EXACT), ""
    wrong = list(dict.fromkeys(mistake.name for mistake in found if mistake.wrong))
    if not wrong:
        rounded = len({mistake.name for mistake in found if mistake.name.startswith(GRADIENT)})
        return Results.ROUNDED, f"rounding ({rounded} of {num_gradients} gradients)"
    gradients = sum(name.startswith(GRADIENT) for name in wrong)
    buffers = sum(name.startswith(BUFFER) for name in wrong)
    words = [f"{gradients} of {num_gradients} gradients"] if gradients else []
    words += [f"{buffers} buffer{'s' if buffers > 1 else ''}"] if buffers else []
    return Results.WRONG, ", ".join(words or wrong[:1])
