"""Plan a step whose graphs run several times, from a few schedules for each different graph.

A model of equal blocks, each a graph of its own, is one graph that runs once per block:

    forward   [A][B][B][B][C]        graphs A, B, C; B runs three times
    backward  [C][B][B][B][A]

1. `step_of_graph`: each different graph becomes a step of its own. One storage between its forward and its
   backward pass stands for the other graphs.
2. Each of these steps is planned for several budgets. A schedule of a graph is worth its seconds, the bytes
   that it saves for the backward pass (times the number of runs), and the bytes that each pass needs.
3. A price per saved byte chooses one schedule for each graph, and two such combinations are mixed over the
   runs of a graph (`mixed_runs`). The cheapest combination whose peak fits the budget, simulated over the
   whole step, is the answer.

Shortcoming: all calls of a step that are planned together are treated alike, since the loop may call the
model more often.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import groupby

import numpy as np

from lowtide.errors import LowtideError
from lowtide.facts import GraphRun, Kind, Node, Region, Solution, Step, Storage
from lowtide.planning.graph_passes import ExpectedPeaks, GraphPass, PricedSchedule
from lowtide.planning.mixed_runs import Options, mixtures
from lowtide.planning.planner import Planner, StepSchedules
from lowtide.planning.registry import load_planner
from lowtide.planning.resting_sets import RestingPlanner, may_rest
from lowtide.planning.schedules import graph_schedules, runs_of_schedules
from lowtide.planning.simulate import Timeline, simulate
from lowtide.planning.transfer_model import can_offload
from lowtide.planning.variants import variants, without_dominated

REST = "the rest of the step"


def step_of_graph(step: Step, segment: int, *, rest_bytes: int) -> Step:
    """The forward and backward pass of one graph, with `rest_bytes` in between for all other graphs.

    An input from another graph is live from its first to its last read; two that share a storage, as long as
    one of them is read. Static storages count no bytes.
    """
    own = [node for node in step.nodes if node.segment == segment and node.region is not Region.OPTIMIZER]
    num_forward = sum(node.region is Region.FORWARD for node in own)
    rank = {node.rank: place + (place >= num_forward) for place, node in enumerate(own)}
    storages = tuple(replace(s, nbytes=0) if s.static else s for s in step.storages)
    maker: dict[int, int] = {}
    nodes: list[Node] = []
    for node in own:
        if len(nodes) == num_forward:
            nodes.append(_rest(num_forward, len(storages)))
        reads = tuple(rank[read] for read in node.reads if read in rank)
        found = {s for read in reads for s in nodes[read].holds}
        others = [s for s in node.holds if s not in found and s not in node.makes]
        makes = (*node.makes, *(s for s in others if s not in maker))
        reads = (*reads, *dict.fromkeys(maker[s] for s in others if s in maker))
        maker.update(dict.fromkeys(makes, rank[node.rank]))
        nodes.append(
            replace(
                node,
                rank=rank[node.rank],
                segment=0,
                reads=reads,
                makes=makes,
                eager_reads=tuple(rank[read] for read in node.eager_reads if read in rank),
                remats=tuple(
                    replace(remat, reads=tuple(rank[read] for read in remat.reads)) for remat in node.remats
                ),
            )
        )
    if len(nodes) == num_forward:
        nodes.append(_rest(num_forward, len(storages)))
    rest = Storage(id=len(storages), nbytes=rest_bytes, kind=Kind.OTHER, name=REST)
    return replace(
        step,
        nodes=tuple(nodes),
        storages=(*storages, rest),
        graphs=(step.graphs[segment],),
        fingerprint=step.graphs[segment].fingerprint,
        notes=(),
    )


def _rest(rank: int, storage: int) -> Node:
    return Node(
        rank=rank,
        name=REST,
        op="output",
        region=Region.FORWARD,
        kind=Kind.OTHER,
        segment=0,
        holds=(storage,),
        makes=(storage,),
        fixed="the end of a graph",
    )


NUM_BUDGETS = 12
NUM_BACKWARD_LIMITS = 12
OF_ALL_GRAPHS = ("none", "all")
"""Planners that do the same whatever the budget is."""
SHARES_OF_REST = (0.0, 0.5, 1.0)
"""Bytes that stand for the other graphs while a graph is planned, as shares of its own peak."""


@dataclass(frozen=True, slots=True, order=True)
class Combination:
    """A schedule for each graph of the step, by its number in `choices`, and the step's expected peak."""

    seconds: float
    peak_bytes: int
    options: Options


def planner_for(step: Step) -> Planner:
    """The planner of a step: a few schedules for all runs of a graph, where a graph runs several times."""
    counts = Counter(graph.fingerprint for graph in step.graphs)
    repeated = {i for i, graph in enumerate(step.graphs) if counts[graph.fingerprint] > 1}
    repeats = any(node.remats and node.segment in repeated for node in step.nodes)
    if repeats and can_offload(step):
        raise LowtideError(
            "values cannot be offloaded where graphs run several times, as with FSDP2 or several calls "
            "before a backward pass: leave 'offload' out"
        )
    step = without_dominated(step)
    if may_rest(step) and not repeats:
        return RestingPlanner(step)
    return RepeatedGraphsPlanner(step) if repeats else Planner(step, variants(step))


class RepeatedGraphsPlanner(Planner):
    """Solutions for one step, with one schedule for all runs of a graph or with two; the planner `by` chose
    them."""

    def __init__(self, step: Step, *, by: str = "auto") -> None:
        super().__init__(step)
        self.by = by
        self._others: dict[str, RepeatedGraphsPlanner] = {}

    @cached_property
    def kinds(self) -> list[list[int]]:
        """The graphs of the step, equal ones together: also the same outputs get no gradient."""
        found: dict[object, list[int]] = {}
        for index, graph in enumerate(self.step.graphs):
            found.setdefault((graph.fingerprint, graph.missing), []).append(index)
        return list(found.values())

    @cached_property
    def unplanned(self) -> list[PricedSchedule]:
        """Each different graph without any recompute; no search is needed."""
        alone = [Planner(step_of_graph(self.step, kind[0], rest_bytes=0)) for kind in self.kinds]
        return [_graph_schedule(planner.step, planner.baseline) for planner in alone]

    @cached_property
    def choices(self) -> list[list[PricedSchedule]]:
        """The schedules of each different graph, the cheapest first; the first one recomputes nothing."""
        return [_graph_schedules(self.step, kind[0], self.by) for kind in self.kinds]

    @cached_property
    def combinations(self) -> list[Combination]:
        """The Pareto front of seconds and expected peaks, the cheapest first."""
        alike = self._front(map(self._for_each_graph, dict.fromkeys(self.candidates())))
        if self.step.calls > 1 or len(alike) < 2:
            return alike
        options = [combination.options for combination in alike]
        return self._front([*options, *mixtures(options, self.kinds)])

    def _for_each_graph(self, options: Sequence[int]) -> Options:
        """The options of all graphs, from one for each different graph."""
        of = {graph: options[kind] for kind, graphs in enumerate(self.kinds) for graph in graphs}
        return tuple(of[graph] for graph in range(len(self.step.graphs)))

    def _front(self, many: Iterable[Options]) -> list[Combination]:
        found: set[Combination] = set()
        for options in dict.fromkeys(many):
            schedules = self._schedules(options)
            seconds = sum(schedule.seconds for schedule in schedules)
            found.add(Combination(seconds, self._peaks.of(schedules), options))
        best: list[Combination] = []
        for combination in sorted(found):
            if not best or combination.peak_bytes < best[-1].peak_bytes:
                best.append(combination)
        return best

    def lowest(self) -> Timeline:
        return min((self._timeline(p) for p in self.combinations[-3:]), key=lambda t: t.peak_bytes)

    def best(self, budget_bytes: int) -> Timeline | None:
        likely = [combination for combination in self.combinations if combination.peak_bytes <= budget_bytes]
        for combination in (*likely, *(self.combinations[-3:] if not likely else ())):
            timeline = self._timeline(combination)
            if timeline.peak_bytes <= budget_bytes:
                return timeline
        return None

    def adapt(self, schedules: Sequence[Sequence[GraphRun]], *, budget_bytes: int) -> StepSchedules | None:
        try:
            runs = runs_of_schedules(self.step, schedules)
            peak_bytes = simulate(self.step, runs).peak_bytes
        except ValueError:  # the graphs have other ops
            return None
        return (
            StepSchedules(peak_bytes, graph_schedules(self.step, runs))
            if peak_bytes <= budget_bytes
            else None
        )

    def solve(self, *, budget_bytes: int, planner: str = "auto", may_be_eager: bool = False) -> Solution:
        # eager runs the calls of a step that are planned together; a sharded model's processes stay together
        may_be_eager = may_be_eager and self.step.calls > 1
        return super().solve(budget_bytes=budget_bytes, planner=planner, may_be_eager=may_be_eager)

    def planned(self, planner: str, budget_bytes: int) -> Timeline:
        if planner in OF_ALL_GRAPHS:
            return super().planned(planner, budget_bytes)
        if planner != self.by:
            load_planner(planner)  # unknown names are refused before a search
            other = self._others.setdefault(planner, RepeatedGraphsPlanner(self.step, by=planner))
            return other.planned(planner, budget_bytes)
        return self.best(budget_bytes) or self.lowest()

    @property
    def floor_bytes(self) -> int:
        return self.floor().floor_bytes

    def floor_bound(self) -> int | None:
        return None

    def _lower_bound(self, timeline: Timeline, budget_bytes: int) -> float | None:
        """Nothing is proven about schedules that are the same for all runs of a graph."""
        return None

    def _timeline(self, combination: Combination) -> Timeline:
        schedules = [priced.schedule for priced in self._schedules(combination.options)]
        return simulate(self.step, runs_of_schedules(self.step, schedules))

    def _schedules(self, options: Options) -> list[PricedSchedule]:
        return [self.choices[kind][option] for kind, option in zip(self._kind_of_graph, options, strict=True)]

    @cached_property
    def _kind_of_graph(self) -> Options:
        return self._for_each_graph(range(len(self.kinds)))

    @cached_property
    def _peaks(self) -> ExpectedPeaks:
        return ExpectedPeaks(list(self.passes()), len(self.step.graphs))

    def candidates(self) -> Iterator[tuple[int, ...]]:
        """The best schedules for each price of a saved byte and each limit of the backward peaks: one for
        each different graph."""
        prices = sorted({price for options in self.choices for price in _prices(options)} | {0.0})
        for share in np.linspace(1.0, 0.0, NUM_BACKWARD_LIMITS):
            limited = [_within(options, float(share)) for options in self.choices]
            for price in prices:
                yield tuple(
                    min(usable, key=lambda i: (_worth(options[i], price), options[i]))
                    for options, usable in zip(self.choices, limited, strict=True)
                )

    def passes(self) -> Iterator[GraphPass]:
        """The passes of the baseline, in order; exchanges between graphs are passes of no graph."""
        of = {graph: self.unplanned[kind] for kind, graphs in enumerate(self.kinds) for graph in graphs}
        timeline = self.baseline
        waiting: list[int] = []
        position = 0
        for (region, graph), group in groupby(timeline.runs, key=lambda run: self._place(run.rank)):
            length = len(list(group))
            live = int(timeline.live_bytes[position : position + length].max())
            position += length
            is_backward = region is Region.BACKWARD
            if is_backward and graph in waiting:
                waiting.remove(graph)
            own = 0
            if graph >= 0:
                own = of[graph].backward_bytes if is_backward else of[graph].forward_bytes
            base = live - own - sum(of[other].saved_bytes for other in waiting)
            yield GraphPass(base, graph, is_backward, tuple(waiting))
            if region is Region.FORWARD and graph >= 0:
                waiting.append(graph)

    def _place(self, rank: int) -> tuple[Region, int]:
        node = self.step.nodes[rank]
        return node.region, -1 if node.region is Region.OPTIMIZER else node.segment


def _worth(option: PricedSchedule, price: float) -> float:
    return option.seconds + price * option.saved_bytes


def _prices(options: Sequence[PricedSchedule]) -> Iterator[float]:
    """Prices of a saved byte, each a little above one at which two schedules cost the same."""
    for one in options:
        for other in options:
            if other.saved_bytes < one.saved_bytes and other.seconds > one.seconds:
                yield 1.001 * (other.seconds - one.seconds) / (one.saved_bytes - other.saved_bytes)
    yield 1.0


def _within(options: Sequence[PricedSchedule], share: float) -> list[int]:
    """Schedules whose backward peak is at most that share of the way from the lowest to the highest."""
    least = min(option.backward_bytes for option in options)
    most = max(option.backward_bytes for option in options)
    limit = least + (most - least) * share
    return [i for i, option in enumerate(options) if option.backward_bytes <= limit]


def _graph_schedules(step: Step, segment: int, by: str) -> list[PricedSchedule]:
    alone = Planner(step_of_graph(step, segment, rest_bytes=0))
    found = {_graph_schedule(alone.step, alone.baseline)}
    if alone.table.uses:
        for share in SHARES_OF_REST:
            rest_bytes = int(alone.baseline.peak_bytes * share)
            planner = Planner(step_of_graph(step, segment, rest_bytes=rest_bytes)) if rest_bytes else alone
            high, low = planner.baseline.peak_bytes, planner.floor().floor_bytes
            for number in range(NUM_BUDGETS):
                budget_bytes = high - (high - low) * number // (NUM_BUDGETS - 1)
                found.add(_graph_schedule(planner.step, planner.planned(by, budget_bytes)))
    return _worthwhile(sorted(found))


def _graph_schedule(step: Step, timeline: Timeline) -> PricedSchedule:
    border = next(i for i, run in enumerate(timeline.runs) if step.nodes[run.rank].name == REST)
    rest_bytes = step.storages[-1].nbytes
    live = timeline.live_bytes
    return PricedSchedule(
        seconds=timeline.added_seconds,
        saved_bytes=int(live[border]) - rest_bytes,
        backward_bytes=int(live[border + 1 :].max(initial=0)),
        forward_bytes=int(live[:border].max(initial=0)),
        schedule=graph_schedules(step, timeline.runs)[0].schedule,
    )


def _worthwhile(options: Sequence[PricedSchedule]) -> list[PricedSchedule]:
    """The schedules that no cheaper one dominates."""
    kept: list[PricedSchedule] = []
    for option in options:
        if not any(
            other.saved_bytes <= option.saved_bytes
            and other.backward_bytes <= option.backward_bytes
            and other.forward_bytes <= option.forward_bytes
            for other in kept
        ):
            kept.append(option)
    return kept
