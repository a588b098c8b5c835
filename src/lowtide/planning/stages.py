"""Plan a stage of many equal blocks from the step of a few of them.

    captured   [first][B][B][B][B][last]             four blocks
    stage      [first][B][B] ... [B][B][last]        as many as wanted, in the place of the gap

Every pass over a graph needs: bytes that no plan changes, its own bytes, and what the graphs before it have
saved. From one block to the next these bytes grow by the same amount, so that those of any number of blocks
follow from the second and the third captured block. Nothing is simulated again: 126 blocks are planned in the
time of four.

A stage of a pipeline runs several micro-batches before the first of them comes back: then the saved bytes of
the others wait as well.

Shortcoming: all blocks get one schedule, as in `repeated_graphs`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby

from lowtide.facts import Kind, Region, Step
from lowtide.planning.graph_passes import GraphPass, PricedSchedule
from lowtide.planning.repeated_graphs import RepeatedGraphsPlanner
from lowtide.planning.simulate import Timeline

CAPTURED_BLOCKS = 4
"""A block behind others and before others is in the middle; the difference of two of these is the growth."""


Schedules = Sequence[PricedSchedule]
"""One for each different graph."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StageLoad:
    """`blocks` of a stage. `in_flight`: micro-batches whose saved values are live at once. `extra_bytes` are
    live throughout, besides what was captured."""

    blocks: int
    in_flight: int = 1
    extra_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class StagePlan:
    """The answer for one stage: predicted bytes, and estimated seconds of one micro-batch.

    `block_forward_seconds` and `block_backward_seconds` are those of one block, recompute included; the other
    seconds are those of embedding, head and loss. `recompute_seconds`: of all blocks and graphs together.
    """

    peak_bytes: int
    unplanned_peak_bytes: int
    block_forward_seconds: float
    block_backward_seconds: float
    other_forward_seconds: float
    other_backward_seconds: float
    recompute_seconds: float
    optimizer_seconds: float


@dataclass(frozen=True, slots=True)
class Growth:
    """The bytes by which a pass grows with each block more: `always` live ones (parameters and state), bytes
    of passes behind the gap `after_forward` of these blocks, and `after_backward`."""

    middle: int
    always: int
    after_forward: int
    after_backward: int


class StagePlanner:
    """Plans of stages of any number of blocks, from the planner of a step with `CAPTURED_BLOCKS` blocks.

    `batch_bytes` of each micro-batch in flight wait beside its saved values.
    """

    def __init__(self, planner: RepeatedGraphsPlanner) -> None:
        self.planner = planner
        self.step = planner.step
        blocks = max(planner.kinds, key=len)
        assert len(blocks) == CAPTURED_BLOCKS, "the first or last block is another graph than those between"
        self.blocks = blocks
        self.batch_bytes = sum(s.nbytes for s in self.step.storages if s.static and s.kind is Kind.INPUT)

    @cached_property
    def options(self) -> list[Schedules]:
        """Combinations of one schedule for each different graph."""
        choices = self.planner.choices
        return [
            tuple(choices[kind][option] for kind, option in enumerate(options))
            for options in dict.fromkeys(self.planner.candidates())
        ]

    @cached_property
    def growth(self) -> Growth:
        return growth_of(self.passes, self.blocks, always=bytes_of_block(self.step))

    @cached_property
    def passes(self) -> list[GraphPass]:
        return list(self.planner.passes())

    def best(self, budget_bytes: int, load: StageLoad) -> StagePlan | None:
        """The cheapest plan with a peak of at most `budget_bytes`; None where none was found.

        Schedules are searched only where the stage does not fit without a plan.
        """
        if self.peak(self.planner.unplanned, load) <= budget_bytes:
            return self._plan(self.planner.unplanned, load)
        fitting = [(self._seconds(o, load), o) for o in self.options if self.peak(o, load) <= budget_bytes]
        return self._plan(min(fitting)[1], load) if fitting else None

    def lowest(self, load: StageLoad) -> StagePlan:
        """The plan with the lowest peak."""
        return self._plan(min(self.options, key=lambda o: (self.peak(o, load), o)), load)

    def peak(self, schedules: Schedules, load: StageLoad) -> int:
        """The expected peak of a stage where each different graph has one schedule."""
        of = {
            graph: schedule
            for schedule, graphs in zip(schedules, self.planner.kinds, strict=True)
            for graph in graphs
        }
        more, block = load.blocks - CAPTURED_BLOCKS, of[self.blocks[0]]
        waits = sum(schedule.saved_bytes for schedule in of.values()) + more * block.saved_bytes
        beside = load.extra_bytes + (load.in_flight - 1) * (waits + self.batch_bytes)
        return beside + max(_needs(self.passes, self.growth, of, more=more, block=block))

    def _seconds(self, schedules: Schedules, load: StageLoad) -> float:
        counts = [load.blocks if kind == self.blocks else len(kind) for kind in self.planner.kinds]
        return sum(schedule.seconds * number for schedule, number in zip(schedules, counts, strict=True))

    @cached_property
    def _block_kind(self) -> int:
        return self.planner.kinds.index(self.blocks)

    def _plan(self, schedules: Schedules, load: StageLoad) -> StagePlan:
        seconds = {(region, is_block): 0.0 for region in Region for is_block in (False, True)}
        for node in self.step.nodes:
            if not node.on_demand:
                seconds[node.region, node.segment in self.blocks] += node.seconds
        own = {region: seconds[region, True] / CAPTURED_BLOCKS for region in Region}
        block = schedules[self._block_kind].seconds
        added = self._seconds(schedules, load)
        return StagePlan(
            peak_bytes=self.peak(schedules, load),
            unplanned_peak_bytes=self.peak(self.planner.unplanned, load),
            block_forward_seconds=own[Region.FORWARD],
            block_backward_seconds=own[Region.BACKWARD] + block,
            other_forward_seconds=seconds[Region.FORWARD, False],
            other_backward_seconds=seconds[Region.BACKWARD, False] + added - block * load.blocks,
            recompute_seconds=added,
            optimizer_seconds=_update_seconds(self.step, load.blocks),
        )


def bytes_of_block(step: Step) -> int:
    """Parameters and optimizer state of one of the captured blocks; state divides as parameters do."""
    static = [storage for storage in step.storages if storage.static]
    parameters = [storage for storage in static if storage.kind is Kind.PARAMETER]
    whole = sum(storage.nbytes for storage in parameters)
    state = sum(storage.nbytes for storage in static if storage.kind is Kind.OPTIMIZER_STATE)
    own = sum(storage.nbytes for storage in parameters if storage.name.startswith("blocks.1."))
    return own + state * own // whole if whole else 0


def _update_seconds(step: Step, blocks: int) -> float:
    """The optimizer's seconds; they divide as parameters do."""
    parameters = [s for s in step.storages if s.static and s.kind is Kind.PARAMETER]
    whole = sum(storage.nbytes for storage in parameters)
    own = sum(storage.nbytes for storage in parameters if storage.name.startswith("blocks.1."))
    captured = sum(node.seconds for node in step.nodes if node.region is Region.OPTIMIZER)
    more = (blocks - CAPTURED_BLOCKS) * own / whole if whole else 0.0
    return captured * (1 + more)


def _places(passes: Sequence[GraphPass], middle: int) -> list[tuple[bool, bool]]:
    """For each pass, whether it runs behind the forward pass of blocks before graph `middle`, and whether it
    runs behind their backward pass."""
    found = []
    has_turned = False
    for graph_pass in passes:
        has_turned = has_turned or graph_pass.is_backward
        last = max(graph_pass.waiting, default=-1)
        next_graph = last if graph_pass.is_backward else last + 1
        anchor = graph_pass.graph if graph_pass.graph >= 0 else next_graph
        is_update = has_turned and not graph_pass.is_backward
        found.append(
            (has_turned or anchor >= middle, is_update or (graph_pass.is_backward and anchor < middle))
        )
    return found


def growth_of(passes: Sequence[GraphPass], blocks: Sequence[int], *, always: int) -> Growth:
    """The growth from one block to the next, from the second and the third of them."""
    base = {(p.graph, p.is_backward): p.base_bytes for p in passes if p.graph >= 0}
    second, third = blocks[1], blocks[2]
    return Growth(
        middle=third,
        always=always,
        after_forward=base[third, False] - base[second, False],
        after_backward=base[second, True] - base[third, True],
    )


def _needs(
    passes: Sequence[GraphPass],
    growth: Growth,
    of: dict[int, PricedSchedule],
    *,
    more: int,
    block: PricedSchedule,
) -> list[int]:
    """The bytes of every pass of a stage with so many blocks more."""
    found = []
    for graph_pass, (grows, is_behind) in zip(passes, _places(passes, growth.middle), strict=True):
        need = graph_pass.base_bytes + more * growth.always
        if grows:
            need += more * growth.after_forward
        if is_behind:
            need += more * growth.after_backward
        elif grows:
            need += more * block.saved_bytes
        if graph_pass.graph >= 0:
            schedule = of[graph_pass.graph]
            need += schedule.backward_bytes if graph_pass.is_backward else schedule.forward_bytes
        found.append(need + sum(of[other].saved_bytes for other in graph_pass.waiting))
    return found


def peak_of_timeline(step: Step, timeline: Timeline, blocks: Sequence[int], load: StageLoad) -> int:
    """The peak of a stage whose blocks all run as in a finished schedule of the captured step.

    What a block saves for its backward pass is the growth of the forward passes here.
    """
    passes = _finished(step, timeline)
    growth = growth_of(passes, blocks, always=bytes_of_block(step))
    more = load.blocks - CAPTURED_BLOCKS
    needs = [
        p.base_bytes
        + more * (growth.always + growth.after_forward * grows + growth.after_backward * is_behind)
        for p, (grows, is_behind) in zip(passes, _places(passes, growth.middle), strict=True)
    ]
    batch = sum(s.nbytes for s in step.storages if s.static and s.kind is Kind.INPUT)
    waits = load.blocks * growth.after_forward + batch
    return max(needs) + load.extra_bytes + (load.in_flight - 1) * waits


def _finished(step: Step, timeline: Timeline) -> list[GraphPass]:
    """The passes of a finished schedule, where all bytes are bytes that no plan changes."""
    has_turned = False
    places = []
    for run in timeline.runs:
        node = step.nodes[run.rank]
        has_turned = has_turned or node.region is Region.BACKWARD
        is_update = node.region is Region.OPTIMIZER
        places.append((has_turned and not is_update, -1 if is_update else node.segment))
    found: list[GraphPass] = []
    waiting: list[int] = []
    position = 0
    for (is_backward, graph), group in groupby(places):
        length = len(list(group))
        live = int(timeline.live_bytes[position : position + length].max())
        position += length
        if is_backward and graph in waiting:
            waiting.remove(graph)
        found.append(GraphPass(live, graph, is_backward, tuple(waiting)))
        if not is_backward and graph >= 0:
            waiting.append(graph)
    return found
