"""Changes of a training loop that lower the floor of its step, as a refusal names them."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from lowtide.units import format_size

WIDTH = 80
"""Columns of a terminal."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Lever:
    """One change or several, and the lowest peak that a plan reaches with them.

    `keywords` as in Python, `options` as on the command line, one for each keyword; an empty option where the
    command line has none. `is_estimate`: the floor was not searched for, or for a store of unknown speed.
    `caution`: for which loops the change is wrong.
    """

    keywords: tuple[str, ...]
    options: tuple[str, ...]
    floor_bytes: int
    is_estimate: bool = False
    caution: str = ""

    @property
    def floor(self) -> str:
        return f"{'about ' if self.is_estimate else ''}{format_size(self.floor_bytes)}"


def lever_lines(levers: Sequence[Lever], *, budget_bytes: int, as_options: bool = False) -> list[str]:
    """A line for each lever, and one for each caution; none without levers."""
    if not levers:
        return []
    width = max(len(lever.floor) for lever in levers)
    lines = ["lowest reachable peak with"]
    for lever in levers:
        fits = "fits" if lever.floor_bytes <= budget_bytes else "    "
        start = f"  {lever.floor:>{width}}  {fits}  "
        changes = as_typed(lever) if as_options else [f"{each}," for each in lever.keywords]
        changes[-1] = changes[-1].removesuffix(",")
        lines += _folded(start, changes)
    cautions = dict.fromkeys(lever.caution for lever in levers if lever.caution)
    return [*lines, *cautions]


def as_typed(lever: Lever) -> list[str]:
    """The options of a lever; in place of one that the command line lacks, the keyword."""
    pairs = zip(lever.options, lever.keywords, strict=True)
    return [option or f"{keyword} (in Python)" for option, keyword in pairs]


def _folded(start: str, parts: Sequence[str]) -> list[str]:
    """The parts behind `start`, on as many lines as they need."""
    lines = [start + parts[0]]
    for part in parts[1:]:
        if len(lines[-1]) + 1 + len(part) > WIDTH:
            lines.append(" " * len(start) + part)
        else:
            lines[-1] += f" {part}"
    return lines


LEAST_LOWERED = 0.005
"""The least share of a floor that is worth a line."""


def lowering(levers: Iterable[Lever], *, floor_bytes: int) -> tuple[Lever, ...]:
    """The levers that lower a floor, the lowest first; several together only where they reach less than some
    of them do. Less than half a percent is not lower."""
    found = sorted(levers, key=lambda lever: (len(lever.keywords), lever.keywords))
    kept: list[Lever] = []
    for lever in found:
        fewer = (each.floor_bytes for each in kept if set(each.keywords) < set(lever.keywords))
        if lever.floor_bytes < (1 - LEAST_LOWERED) * min(fewer, default=floor_bytes):
            kept.append(lever)
    return tuple(sorted(kept, key=lambda lever: (lever.floor_bytes, len(lever.keywords), lever.keywords)))
