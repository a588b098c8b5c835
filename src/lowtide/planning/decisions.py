"""A schedule in words: one decision for each activation, and hints how to lower the floor of a step."""

from collections.abc import Container, Mapping, Sequence
from math import fsum
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from lowtide.facts import (
    LAST_OUTPUTS,
    TEMPORARIES,
    Action,
    Activation,
    Decision,
    Kind,
    Region,
    Remat,
    Run,
    Step,
)
from lowtide.planning.search.table import Table
from lowtide.planning.simulate import Timeline, extra_seconds, is_remat, remat_of, replaced_ranks, source_of
from lowtide.planning.transfer_model import is_fetch, released_after, value_of
from lowtide.units import format_seconds, format_size


def decide(
    table: Table,
    found: tuple[Activation, ...],
    *,
    plain: Timeline,
    planned: Timeline,
    budget_bytes: int,
) -> tuple[Decision, ...]:
    """The decisions of the schedule `planned` about the activations `found`, against the baseline."""
    step = table.step
    rematerialized = _rematerialized(step, planned.runs)
    seconds = _seconds_by_storage(step, planned, rematerialized)
    in_chunks = _made_in_chunks(step, planned.runs)
    for run, storages in in_chunks.items():
        for storage in storages:
            rematerialized[storage] = [remat_of(step, run)]
            seconds[storage] = [extra_seconds(step, run) / len(storages)]
    inside = {s: step.nodes[run.rank].name for run, storages in in_chunks.items() for s in storages}
    over = np.flatnonzero(_by_rank(plain, len(step.nodes)) > budget_bytes)
    offloaded = _offloaded(step, planned.runs)
    highest_price = max(
        (
            a.recompute_seconds / a.nbytes
            for a in found
            if a.storage in rematerialized and a.nbytes and a.storage not in offloaded
        ),
        default=0.0,
    )
    rule_texts = dict(step.rules)
    rows = []
    for a in found:
        remats = rematerialized.get(a.storage, ())
        cost = fsum(seconds.get(a.storage, ()))
        action = remats[0].action if remats else Action.RETAINED
        recomputes = action is Action.RECOMPUTE
        between = offloaded[a.storage] if action is Action.OFFLOAD else ("", "")
        if action is Action.OFFLOAD and not between[0]:  # a resting weight, freed by itself
            between = (step.nodes[a.last_forward_use].name, between[1])
        rows.append(
            Decision(
                name=a.name,
                module=a.module,
                action=action,
                method=remats[0].rule if remats else "",
                nbytes=a.nbytes,
                held_bytes=_kept_bytes(step, remats) if remats else a.nbytes,
                seconds=cost,
                times=len(remats),
                creation_rank=a.creation_rank,
                last_forward_use=a.last_forward_use,
                first_backward_use=a.first_backward_use,
                last_backward_use=a.last_backward_use,
                recompute_seconds=cost if recomputes else a.recompute_seconds,
                reason=_why_freed(
                    a,
                    cost,
                    remats,
                    rule_texts=rule_texts,
                    offloaded=between,
                    inside=inside.get(a.storage, ""),
                )
                if remats
                else _why_retained(a, over, highest_price),
                released_after=between[0],
                fetched_before=between[1],
            )
        )
    return tuple(rows)


def _by_rank(timeline: Timeline, num_nodes: int) -> NDArray[np.int64]:
    """The live bytes during the first run of each rank; 0 for ranks that do not run."""
    live = np.zeros(num_nodes, dtype=np.int64)
    for run, nbytes in zip(timeline.runs, timeline.live_bytes, strict=True):
        if run.is_first:
            live[run.rank] = nbytes
    return live


def _kept_bytes(step: Step, remats: Sequence[Remat]) -> int:
    """The bytes of the packed forms that these remats read."""
    kept = {read for remat in remats for read in remat.reads if step.nodes[read].on_demand}
    return sum(step.storages[s].nbytes for rank in sorted(kept) for s in step.nodes[rank].makes)


def _offloaded(step: Step, runs: Sequence[Run]) -> dict[int, tuple[str, str]]:
    """By offloaded storage, the names of two nodes: after the first the storage is freed, before the second
    its prefetch begins. No node frees a resting weight."""
    freed_after = {value_of(step, leave): after for leave, after in released_after(step, runs).items()}
    found: dict[int, tuple[str, str]] = {}
    following = ""
    for run in reversed(runs):
        if run.is_first:
            following = step.nodes[run.rank].name
        elif is_fetch(step, run):
            freed = freed_after.get(run.rank)
            for storage in source_of(step, run).makes:
                found[storage] = ("" if freed is None else step.nodes[freed].name, following)
    return found


def _rematerialized(step: Step, runs: Sequence[Run]) -> dict[int, list[Remat]]:
    """Storages that backward nodes read from rematerialized values, with the remats that made them."""
    makers: dict[int, dict[int, int]] = {}  # by rank and storage, the position of the maker
    read: dict[int, set[int]] = {}
    for position, run in enumerate(runs):
        source = source_of(step, run)
        shared = {
            s: at for rank in reversed(source.reads) for s, at in makers[rank].items() if s in source.holds
        }
        makers[run.rank] = shared | dict.fromkeys(source.makes, position)
        if step.nodes[run.rank].region is not Region.FORWARD:
            for rank in source.reads:
                for storage, made_at in makers[rank].items():
                    if not runs[made_at].is_first:
                        read.setdefault(storage, set()).add(made_at)
    found: dict[int, list[Remat]] = {}
    for storage, positions in read.items():
        sources = [source_of(step, runs[position]) for position in sorted(positions)]
        found[storage] = [source for source in sources if isinstance(source, Remat)]
    return found


def _made_in_chunks(step: Step, runs: Sequence[Run]) -> dict[Run, list[int]]:
    """By chunked backward run, the forward storages that it recomputes inside and that no run reads."""
    read = {
        storage
        for run in runs
        if step.nodes[run.rank].region is not Region.FORWARD
        for rank in source_of(step, run).reads
        for storage in step.nodes[rank].holds
    }
    found: dict[Run, list[int]] = {}
    for run in runs:
        if run.is_first or is_remat(step, run):
            continue
        plain = [
            storage
            for rank in (run.rank, *replaced_ranks(step, run))
            for value in step.nodes[rank].reads
            if step.nodes[value].region is Region.FORWARD
            for storage in step.nodes[value].holds
        ]
        freed = [s for s in dict.fromkeys(plain) if s not in read and not step.storages[s].static]
        if freed:
            found[run] = freed
    return found


def _seconds_by_storage(
    step: Step, planned: Timeline, rematerialized: Container[int]
) -> dict[int, list[float]]:
    """The seconds of each added run, charged to an activation: the one that the run rematerializes, or else
    the one that its first reader is charged to."""
    latest: dict[int, int] = {}
    first_reader: dict[int, int] = {}
    for position, run in enumerate(planned.runs):
        for read in source_of(step, run).reads:
            first_reader.setdefault(latest[read], position)
        latest[run.rank] = position
    owner: dict[int, int] = {}
    charged: dict[int, list[float]] = {}
    for position, run in reversed(list(enumerate(planned.runs))):
        if run.is_first and not step.nodes[run.rank].on_demand:
            continue
        source = source_of(step, run)
        mine = next((s for s in source.holds if s in rematerialized), None)
        if mine is None:
            mine = owner.get(first_reader.get(position, -1))
        if mine is not None:
            owner[position] = mine
            charged.setdefault(mine, []).append(source.seconds)
    for transfer in planned.traffic.transfers if planned.traffic is not None else ():
        mine = next((s for s in step.nodes[transfer.node].holds if s in rematerialized), None)
        if mine is not None:
            charged.setdefault(mine, []).append(transfer.added_seconds)
    return charged


def _why_freed(
    a: Activation,
    seconds: float,
    remats: Sequence[Remat],
    *,
    rule_texts: Mapping[str, str],
    offloaded: tuple[str, str],
    inside: str,
) -> str:
    between = f"ranks {a.last_forward_use} and {a.first_backward_use}"
    if remats[0].action is Action.OFFLOAD:
        between = f"'{offloaded[0]}' and '{offloaded[1]}'"
    idle = f"frees {format_size(a.nbytes)} between {between}"
    often = f", {len(remats)} times" if len(remats) > 1 else ""
    how = rule_texts.get(remats[0].rule, remats[0].rule)
    where = f", inside of '{inside}'" if inside else ""
    return f"{idle} for {format_seconds(seconds)}: {how}{often}{where}"


def _why_retained(a: Activation, over: NDArray[np.intp], highest_price: float) -> str:
    if a.fixed:
        return f"cannot be recomputed: {a.fixed}"
    if not len(over):
        return "the budget is met without recomputing anything"
    following = int(np.searchsorted(over, a.last_forward_use, side="right"))
    if following == len(over) or over[following] >= a.first_backward_use:
        return "does not live across the peak"
    if a.nbytes and a.recompute_seconds / a.nbytes > highest_price:
        cost, limit = (1e3 * 2**20 * each for each in (a.recompute_seconds / a.nbytes, highest_price))
        return f"costs more per byte ({cost:.3g} ms/MiB) than what is recomputed (at most {limit:.3g})"
    return "the budget is met without it"


LASTING = {
    Kind.PARAMETER: "parameters",
    Kind.GRADIENT: "gradients",
    Kind.OPTIMIZER_STATE: "optimizer state",
    Kind.BUFFER: "buffers",
}
"""Kinds that are live to the end of a step: no recompute lowers them."""


LIBRARY_WORKSPACES = "library workspaces"
WORKSPACE_OF = "workspace of "
"""Names of storages that libraries keep in a device's memory, of kind `other`. The second is the start of one
that names its library: `workspace of cuBLAS, forward`."""


class Hint(NamedTuple):
    """What sets the lowest peak, and a remedy for it."""

    cause: str
    remedy: str


def floor_hint(step: Step, timeline: Timeline) -> Hint:
    """The largest kinds that are live at the lowest peak, and remedies."""
    at = timeline.peak_position
    live = {kind: int(series[at]) for kind, series in timeline.bytes_by_kind.items()}
    peak = step.nodes[timeline.peak_rank]
    found = hint(peak.region, live, libraries=library_bytes(step))
    last_bytes = sum(
        step.storages[storage].nbytes
        for storage, start, end in timeline.blocks
        if start <= at <= end and step.storages[storage].name == LAST_OUTPUTS
    )
    cause = found.cause
    if peak.module and peak.region is not Region.OPTIMIZER:
        cause = f"This op is in {peak.module}. {cause}"
    if 100 * last_bytes >= timeline.peak_bytes:
        words = f"{format_size(last_bytes)} of it are {LAST_OUTPUTS}, which a loop keeps that names them"
        cause += f" {words}: where yours frees them before backward(), say holds_outputs=False."
    if step.first_break:
        num_graphs = sum(graph.in_model for graph in step.graphs)
        breaks = f"The model breaks into {num_graphs} graphs, first at {step.first_break}"
        cause += f" {breaks}, and nothing is recomputed across them."
    return Hint(cause, found.remedy)


def library_bytes(step: Step) -> dict[str, int]:
    """The bytes of libraries' workspaces, by their name: `cuBLAS workspaces`. They are live all the time."""
    found: dict[str, int] = {}
    for storage in step.storages:
        if storage.static and storage.name.startswith((WORKSPACE_OF, LIBRARY_WORKSPACES)):
            words = storage.name.partition(",")[0]
            if words.startswith(WORKSPACE_OF):
                words = f"{words.removeprefix(WORKSPACE_OF)} workspaces"
            found[words] = found.get(words, 0) + storage.nbytes
    return found


def hint(region: Region, live: Mapping[Kind, int], *, libraries: Mapping[str, int] | None = None) -> Hint:
    """The hint from the region of the lowest peak, and the live bytes there by kind; of the kind `other`,
    the workspaces of `libraries` have their own names."""
    named = {kind.value.replace("_", " "): nbytes for kind, nbytes in live.items() if kind is not Kind.OTHER}
    named |= libraries or {}
    named[TEMPORARIES] = live.get(Kind.OTHER, 0) - sum((libraries or {}).values())
    largest = ", ".join(
        f"{format_size(nbytes)} {words}"
        for words, nbytes in sorted(named.items(), key=lambda item: -item[1])[:3]
        if nbytes
    )
    lighter = ["an optimizer with less state such as SGD"] if live.get(Kind.OPTIMIZER_STATE) else []
    if region is Region.OPTIMIZER:
        remedies = ["fused=True", "foreach=False", *lighter]
        return Hint(
            f"The optimizer step sets it ({largest}), which no recompute lowers.",
            f"Try {listed(remedies, 'or')}.",
        )
    lasting = {words: live[kind] for kind, words in LASTING.items() if live.get(kind)}
    if lasting and 2 * sum(lasting.values()) > sum(live.values()):
        remedies = [*lighter, "a smaller model", "lower precision"]
        return Hint(
            f"{listed(list(lasting), 'and').capitalize()} set it ({largest}), which no recompute lowers.",
            f"Try {listed(remedies, 'or')}.",
        )
    return Hint(f"It holds {largest}.", "Try that budget, or a smaller batch.")


def listed(items: Sequence[str], last: str) -> str:
    """`a`, `a or b`, `a, b or c`."""
    *rest, end = items
    return f"{', '.join(rest)} {last} {end}" if rest else end
