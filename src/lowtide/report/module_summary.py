"""What a plan does, by module: the bytes that are kept, packed, recomputed and offloaded, and the time added.

Modules that differ only in their numbers are one row, as a model's author thinks of them:

    transformer.h.0.mlp.act  \
    transformer.h.1.mlp.act   >  transformer.h.*.mlp.act, 3 modules
    transformer.h.2.mlp.act  /
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from lowtide.facts import Action, Decision
from lowtide.report.style import duration, size

KEPT, PACKED, RECOMPUTED, OFFLOADED = "kept", "packed", "recomputed", "offloaded"
FATES = (KEPT, PACKED, RECOMPUTED, OFFLOADED)
OUTSIDE = "outside of modules"


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleRow:
    """The activations of one module, or of several that differ in their numbers (`members`).

    `nbytes` are the bytes of activations by fate, in the order of `FATES`; `held_bytes` are live between the
    forward and the backward pass, `seconds` are added to the step.
    """

    path: str
    num_activations: int
    nbytes: tuple[int, ...]
    held_bytes: int
    seconds: float
    members: tuple["ModuleRow", ...] = ()

    @property
    def total_bytes(self) -> int:
        return sum(self.nbytes)

    @property
    def changed_bytes(self) -> int:
        """Bytes that do not stay as they are."""
        return self.total_bytes - self.nbytes[0]

    @property
    def fates(self) -> list[tuple[str, int]]:
        """The fates that have bytes, the largest first."""
        found = [(fate, n) for fate, n in zip(FATES, self.nbytes, strict=True) if n]
        return sorted(found, key=lambda pair: (-pair[1], FATES.index(pair[0])))


def fate_of(decision: Decision) -> str:
    if decision.action is Action.RETAINED:
        return PACKED if decision.held_bytes < decision.nbytes else KEPT
    return RECOMPUTED if decision.action is Action.RECOMPUTE else OFFLOADED


def pattern_of(path: str) -> str:
    """The path with `*` in place of its numbers."""
    return ".".join("*" if part.isdecimal() else part for part in path.split(".")) if path else OUTSIDE


def by_module(decisions: Iterable[Decision]) -> list[ModuleRow]:
    """A row for each pattern of modules; the most changed bytes first, then the most bytes."""
    groups: dict[str, dict[str, list[Decision]]] = {}
    for decision in decisions:
        groups.setdefault(pattern_of(decision.module), {}).setdefault(decision.module, []).append(decision)
    rows = []
    for pattern, modules in groups.items():
        members = tuple(_row(path or OUTSIDE, found) for path, found in modules.items())
        together = [decision for found in modules.values() for decision in found]
        rows.append(_row(pattern, together, members=members) if len(members) > 1 else members[0])
    return sorted(rows, key=lambda row: (-row.changed_bytes, -row.total_bytes, row.path))


def _row(path: str, decisions: Sequence[Decision], members: tuple[ModuleRow, ...] = ()) -> ModuleRow:
    nbytes = dict.fromkeys(FATES, 0)
    for decision in decisions:
        nbytes[fate_of(decision)] += decision.nbytes
    return ModuleRow(
        path=path,
        num_activations=len(decisions),
        nbytes=tuple(nbytes.values()),
        held_bytes=sum(decision.held_bytes for decision in decisions),
        seconds=sum(decision.seconds for decision in decisions),
        members=members,
    )


def module_lines(decisions: Iterable[Decision], *, limit: int = 4) -> list[str]:
    """The modules that change most: `transformer.h.*.mlp.act: 6.0 MiB recomputed, 230 µs`."""
    changed = [row for row in by_module(decisions) if row.changed_bytes]
    lines = [f"{row.path}: {_words(row)}" for row in changed[:limit]]
    rest = changed[limit:]
    if rest:
        lines.append(f"and {len(rest)} more, {size(sum(row.changed_bytes for row in rest))}")
    return lines


def _words(row: ModuleRow) -> str:
    said = [f"{size(nbytes)} {fate}" for fate, nbytes in row.fates if fate != KEPT]
    return ", ".join([*said, *([duration(row.seconds)] if row.seconds else [])])
