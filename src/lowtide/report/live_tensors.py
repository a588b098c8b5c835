"""The live ranges of all tensors of a step, packed: the page shows what is live at any time point.

`templates/live.js` is the other half. Which tensors are live, in which module and made by which line,
follows from the blocks of a timeline and the storages of the step.
"""

from typing import Any

from lowtide.facts import Step
from lowtide.planning.schedules import as_eager
from lowtide.planning.simulate import Timeline
from lowtide.report.page_packing import pack_integers, pack_strings
from lowtide.report.style import STACK, short_source


def pack_storages(step: Step) -> dict[str, Any]:
    """What both runs share: names and kinds of storages, and the call stacks of nodes.

    A storage with the name of a node is stored as that node's rank, another one as `-1 - i` for name `i`
    of `names`.
    """
    ranks = {node.name: node.rank for node in step.nodes}
    names: dict[str, int] = {}
    kinds = list(STACK)
    return {
        "name": pack_integers(
            ranks[storage.name] if storage.name in ranks else -1 - names.setdefault(storage.name, len(names))
            for storage in step.storages
        ),
        "names": list(names),
        "kind": pack_integers(kinds.index(storage.kind) for storage in step.storages),
        "static": pack_integers(storage.id for storage in step.storages if storage.static),
        "lines": pack_strings([short_source(line) for stack in step.stacks for line in stack]),
        "depths": pack_integers(len(stack) for stack in step.stacks),
        "stack": pack_integers(node.stack for node in step.nodes),
    }


def pack_blocks(step: Step, timeline: Timeline, *, is_baseline: bool) -> dict[str, Any]:
    """Blocks of one run and the positions where each is live; the baseline has eager's own bytes."""
    storages = (as_eager(step) if is_baseline else step).storages
    numbers, starts, ends = zip(*timeline.blocks, strict=True) if timeline.blocks else ((), (), ())
    return {
        "bytes": pack_integers(storage.nbytes for storage in storages),
        "pinned": pack_integers(storage.id for storage in storages if storage.pinned),
        "storage": pack_integers(numbers),
        "start": pack_integers(starts),
        "end": pack_integers(ends),
        "inside": pack_integers(timeline.workspace_bytes),
    }
