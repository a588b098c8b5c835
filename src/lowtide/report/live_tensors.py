"""The live tensors at a peak, by module and by line of source, and why each is live."""

from collections.abc import Iterable
from dataclasses import dataclass, field

from lowtide.facts import Kind, Step
from lowtide.planning.simulate import Timeline, is_remat
from lowtide.report.style import short_source

OUTSIDE = "outside of modules"
NARROWEST = 0.4
"""Boxes below this share, in percent, are not drawn."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveTensor:
    """A live tensor at the peak; a block that an op overwrites counts with negative bytes."""

    name: str
    kind: Kind
    nbytes: int
    module: str
    source: str
    kept: str


@dataclass(slots=True, kw_only=True)
class Branch:
    """A module and its live tensors at the peak, those of its submodules included."""

    name: str
    nbytes: int = 0
    branches: dict[str, "Branch"] = field(default_factory=dict)
    tensors: list[LiveTensor] = field(default_factory=list)

    @property
    def largest_first(self) -> list["Branch"]:
        return sorted(self.branches.values(), key=lambda branch: (-branch.nbytes, branch.name))


@dataclass(frozen=True, slots=True, kw_only=True)
class Box:
    """A module in the flame graph; `left` and `width` are percentages."""

    name: str
    nbytes: int
    depth: int
    left: float
    width: float


def live_at_peak(step: Step, timeline: Timeline) -> list[LiveTensor]:
    """The live tensors at the peak of `timeline`, the largest first; their sum is the peak."""
    if not timeline.runs:
        return []
    at, last = timeline.peak_position, len(timeline.runs) - 1
    rows = [
        LiveTensor(
            name=storage.name,
            kind=storage.kind,
            nbytes=storage.nbytes,
            module=storage.name.rpartition(".")[0] if storage.kind in (Kind.PARAMETER, Kind.BUFFER) else "",
            source="",
            kept="there before and after the step",
        )
        for storage in step.storages
        if storage.static and storage.nbytes
    ]
    for number, start, end in timeline.blocks:
        storage = step.storages[number]
        if not start <= at <= end or not storage.nbytes:
            continue
        run = timeline.runs[start]
        maker = step.nodes[run.rank]
        again = ", rematerialized" if is_remat(step, run) else ""
        reader = step.nodes[timeline.runs[end].rank].name
        kept = "live to the end of the step" if storage.pinned and end == last else f"read last by {reader}"
        rows.append(
            LiveTensor(
                name=storage.name,
                kind=storage.kind,
                nbytes=storage.nbytes,
                module=maker.module,
                source=maker.source,
                kept=(kept if end > at else "made or read now") + again,
            )
        )
    if timeline.workspace_bytes[at]:
        node = step.nodes[timeline.runs[at].rank]
        rows.append(
            LiveTensor(
                name=f"inside of {node.name}",
                kind=Kind.OTHER,
                nbytes=timeline.workspace_bytes[at],
                module=node.module,
                source=node.source,
                kept="while the op runs",
            )
        )
    return sorted(rows, key=lambda row: (-row.nbytes, row.name))


def by_module(rows: Iterable[LiveTensor]) -> Branch:
    """A tree of modules, as their names are nested."""
    root = Branch(name="model")
    for row in rows:
        branch = root
        branch.nbytes += row.nbytes
        for part in row.module.split(".") if row.module else [OUTSIDE]:
            branch = branch.branches.setdefault(part, Branch(name=part))
            branch.nbytes += row.nbytes
        branch.tensors.append(row)
    root.branches = _folded(root.branches)
    return root


def _folded(branches: dict[str, Branch]) -> dict[str, Branch]:
    """Join a module with its only submodule: `encoder.layers`."""
    found = {}
    for branch in branches.values():
        while len(branch.branches) == 1 and not branch.tensors:
            (inner,) = branch.branches.values()
            inner.name = f"{branch.name}.{inner.name}"
            branch = inner  # noqa: PLW2901 - goes down to the first that forks
        branch.branches = _folded(branch.branches)
        found[branch.name] = branch
    return found


def by_source(rows: Iterable[LiveTensor], *, limit: int = 20) -> list[tuple[str, int, int]]:
    """Lines of source with the bytes and the number of tensors that they made, the largest first."""
    found: dict[str, tuple[int, int]] = {}
    for row in rows:
        if row.source:
            nbytes, count = found.get(short_source(row.source), (0, 0))
            found[short_source(row.source)] = nbytes + row.nbytes, count + 1
    ranked = sorted(found.items(), key=lambda item: (-item[1][0], item[0]))
    return [(source, nbytes, count) for source, (nbytes, count) in ranked[:limit]]


def flame(root: Branch) -> list[Box]:
    """The tree as boxes below each other, each as wide as its share of the peak."""
    boxes: list[Box] = []

    def place(branch: Branch, depth: int, left: float) -> None:
        width = 100 * max(0, branch.nbytes) / max(1, root.nbytes)
        if width < NARROWEST:
            return
        boxes.append(Box(name=branch.name, nbytes=branch.nbytes, depth=depth, left=left, width=width))
        for child in branch.largest_first:
            place(child, depth + 1, left)
            left += 100 * max(0, child.nbytes) / max(1, root.nbytes)

    place(root, 0, 0.0)
    return boxes
