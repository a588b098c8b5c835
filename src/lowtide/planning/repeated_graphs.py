"""One graph of a step, as a step of its own: what stays between its forward and its backward pass, and what
it needs while they run, for any plan of it.

Plans for a step whose graphs run several times: one plan for all runs of a graph.

A model of equal blocks, each a graph of its own, is one graph that runs once per block. Each different graph
is planned alone, for several divisions between what it holds until its backward pass (times the number of
its runs) and what it needs while it runs. A price per held byte picks one plan for each graph; the cheapest
pick whose peak, simulated over the whole step, fits the budget is the answer.

Shortcomings: all runs of a graph are treated alike, also the last one, which need not hold anything for long.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import groupby

import numpy as np

from lowtide.errors import LowtideError
from lowtide.facts import GraphRun, Kind, Node, Region, Solution, Step, Storage
from lowtide.planning.planner import Planner, StepSchedules
from lowtide.planning.registry import planner_names
from lowtide.planning.schedules import graph_schedules, runs_of_schedules
from lowtide.planning.simulate import Timeline, simulate
from lowtide.planning.transfer_model import can_offload
from lowtide.planning.variants import variants, without_dominated

REST = "the rest of the step"


def step_of_graph(step: Step, segment: int, *, rest_bytes: int) -> Step:
    """The forward and backward pass of one graph, with `rest_bytes` in between for all other graphs.

    What comes from other graphs is there when it is first read, and goes when nothing reads it any more.
    What is there all along counts nothing.
    """
    own = [node for node in step.nodes if node.segment == segment and node.region is not Region.OPTIMIZER]
    num_forward = sum(node.region is Region.FORWARD for node in own)
    rank = {node.rank: place + (place >= num_forward) for place, node in enumerate(own)}
    storages = tuple(replace(s, nbytes=0) if s.static else s for s in step.storages)
    made: set[int] = set()
    nodes: list[Node] = []
    for node in own:
        if len(nodes) == num_forward:
            nodes.append(_rest(num_forward, len(storages)))
        reads = tuple(rank[read] for read in node.reads if read in rank)
        found = {s for read in reads for s in nodes[read].holds}
        arrives = tuple(s for s in node.holds if s not in found and s not in node.makes and s not in made)
        makes = (*node.makes, *arrives)
        made.update(makes)
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
NUM_LIMITS = 12
TIED_PLANNERS = ("auto", "none", "all")
SHARES_OF_REST = (0.0, 0.5, 1.0)
"""How much of a graph's own peak stands for the other graphs, when its plans are looked for."""


@dataclass(frozen=True, slots=True, order=True)
class Option:
    """One plan of a graph: `held_bytes` until its backward pass, what its two passes need, and its cost."""

    seconds: float
    held_bytes: int
    backward_bytes: int
    forward_bytes: int
    schedule: tuple[GraphRun, ...]


@dataclass(frozen=True, slots=True, order=True)
class Pick:
    """An option for every different graph, by its number, and the peak that they should have together."""

    seconds: float
    peak_bytes: int
    options: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class _Stretch:
    """Runs between which nothing of a plan changes: bytes that no plan changes, the graph that runs (-1 for
    none), whether backward, and the graphs that hold something for their backward pass."""

    base_bytes: int
    graph: int
    is_backward: bool
    waiting: tuple[int, ...]


def planner_for(step: Step) -> Planner:
    """What plans a step: tied, where a graph that can be planned runs several times."""
    fingerprints = [graph.fingerprint for graph in step.graphs]
    repeated = {i for i, name in enumerate(fingerprints) if fingerprints.count(name) > 1}
    tied = any(node.remats and node.segment in repeated for node in step.nodes)
    if tied and can_offload(step):
        raise LowtideError(
            "values cannot be offloaded where graphs run several times, as with FSDP2: leave 'offload' out"
        )
    step = without_dominated(step)
    return RepeatedGraphsPlanner(step) if tied else Planner(step, variants(step))


class RepeatedGraphsPlanner(Planner):
    """Plans for one step, with the same plan for all runs of a graph."""

    @cached_property
    def kinds(self) -> list[list[int]]:
        """The graphs of the step, equal ones together; those that differ in what the loss asks for do not."""
        found: dict[object, list[int]] = {}
        for index, graph in enumerate(self.step.graphs):
            found.setdefault((graph.fingerprint, graph.missing), []).append(index)
        return list(found.values())

    @cached_property
    def options(self) -> list[list[Option]]:
        """What each different graph can do, the cheapest first; the first one recomputes nothing."""
        return [_options(self.step, kind[0]) for kind in self.kinds]

    @cached_property
    def picks(self) -> list[Pick]:
        """All that are worth a look, the cheapest first."""
        stretches = list(self._stretches())
        found: set[Pick] = set()
        for options in dict.fromkeys(self._candidates()):
            seconds = sum(
                self.options[kind][option].seconds * len(self.kinds[kind])
                for kind, option in enumerate(options)
            )
            found.add(Pick(seconds, self._peak(stretches, options), options))
        best: list[Pick] = []
        for pick in sorted(found):
            if not best or pick.peak_bytes < best[-1].peak_bytes:
                best.append(pick)
        return best

    def lowest(self) -> Timeline:
        return min((self._timeline(p) for p in self.picks[-3:]), key=lambda t: t.peak_bytes)

    def best(self, budget_bytes: int) -> Timeline | None:
        likely = [pick for pick in self.picks if pick.peak_bytes <= budget_bytes]
        for pick in (*likely, *(self.picks[-3:] if not likely else ())):
            timeline = self._timeline(pick)
            if timeline.peak_bytes <= budget_bytes:
                return timeline
        return None

    def adapt(self, schedules: Sequence[Sequence[GraphRun]], *, budget_bytes: int) -> StepSchedules | None:
        try:
            runs = runs_of_schedules(self.step, schedules)
            peak_bytes = simulate(self.step, runs).peak_bytes
        except ValueError:  # the ops are others
            return None
        return (
            StepSchedules(peak_bytes, graph_schedules(self.step, runs))
            if peak_bytes <= budget_bytes
            else None
        )

    def solve(self, *, budget_bytes: int, planner: str = "auto", may_be_eager: bool = False) -> Solution:
        if planner in planner_names() and planner not in TIED_PLANNERS:
            raise LowtideError(
                f"planner '{planner}' does not plan models whose graphs run several times: "
                f"choose one of {', '.join(TIED_PLANNERS)}"
            )
        return super().solve(budget_bytes=budget_bytes, planner=planner)

    def planned(self, planner: str, budget_bytes: int) -> Timeline:
        if planner != "auto":
            return super().planned(planner, budget_bytes)
        return self.best(budget_bytes) or self.lowest()

    @property
    def floor_bytes(self) -> int:
        return self.floor().floor_bytes

    def floor_bound(self) -> int | None:
        return None

    def _lower_bound(self, timeline: Timeline, budget_bytes: int) -> float | None:
        """Nothing is proven of plans that are the same for all runs of a graph."""
        return None

    def _timeline(self, pick: Pick) -> Timeline:
        schedules: list[Sequence[GraphRun]] = [()] * len(self.step.graphs)
        for kind, option in enumerate(pick.options):
            for graph in self.kinds[kind]:
                schedules[graph] = self.options[kind][option].schedule
        return simulate(self.step, runs_of_schedules(self.step, schedules))

    def _candidates(self) -> Iterator[tuple[int, ...]]:
        """For prices of a held byte, and limits of what a graph needs while it runs, the best options."""
        prices = sorted({price for options in self.options for price in _prices(options)} | {0.0})
        for share in np.linspace(1.0, 0.0, NUM_LIMITS):
            limited = [_within(options, float(share)) for options in self.options]
            for price in prices:
                yield tuple(
                    min(usable, key=lambda i: (_worth(options[i], price), options[i]))
                    for options, usable in zip(self.options, limited, strict=True)
                )

    def _stretches(self) -> Iterator[_Stretch]:
        plain = [options[0] for options in self.options]
        of = {graph: plain[kind] for kind, graphs in enumerate(self.kinds) for graph in graphs}
        timeline = self.baseline
        waiting: list[int] = []
        position = 0
        for (region, graph), group in groupby(timeline.runs, key=lambda run: self._place(run.rank)):
            length = len(list(group))
            held = int(timeline.live_bytes[position : position + length].max())
            position += length
            is_backward = region is Region.BACKWARD
            if is_backward and graph in waiting:
                waiting.remove(graph)
            own = 0
            if graph >= 0:
                own = of[graph].backward_bytes if is_backward else of[graph].forward_bytes
            base = held - own - sum(of[other].held_bytes for other in waiting)
            yield _Stretch(base, graph, is_backward, tuple(waiting))
            if region is Region.FORWARD and graph >= 0:
                waiting.append(graph)

    def _place(self, rank: int) -> tuple[Region, int]:
        node = self.step.nodes[rank]
        return node.region, -1 if node.region is Region.OPTIMIZER else node.segment

    def _peak(self, stretches: Sequence[_Stretch], options: tuple[int, ...]) -> int:
        of = {
            graph: self.options[kind][option]
            for kind, option in enumerate(options)
            for graph in self.kinds[kind]
        }
        return max(_need(stretch, of) for stretch in stretches)


def _need(stretch: _Stretch, of: Mapping[int, Option]) -> int:
    own = 0
    if stretch.graph >= 0:
        option = of[stretch.graph]
        own = option.backward_bytes if stretch.is_backward else option.forward_bytes
    return stretch.base_bytes + own + sum(of[other].held_bytes for other in stretch.waiting)


def _worth(option: Option, price: float) -> float:
    return option.seconds + price * option.held_bytes


def _prices(options: Sequence[Option]) -> Iterator[float]:
    """Those at which one option becomes better than another, and a little more."""
    for one in options:
        for other in options:
            if other.held_bytes < one.held_bytes and other.seconds > one.seconds:
                yield 1.001 * (other.seconds - one.seconds) / (one.held_bytes - other.held_bytes)
    yield 1.0


def _within(options: Sequence[Option], share: float) -> list[int]:
    """Options whose backward pass needs at most that share of the way from the least to the most."""
    least = min(option.backward_bytes for option in options)
    most = max(option.backward_bytes for option in options)
    limit = least + (most - least) * share
    return [i for i, option in enumerate(options) if option.backward_bytes <= limit]


def _options(step: Step, segment: int) -> list[Option]:
    alone = Planner(step_of_graph(step, segment, rest_bytes=0))
    found = {_option(alone.step, alone.baseline)}
    if alone.table.uses:
        for share in SHARES_OF_REST:
            rest_bytes = int(alone.baseline.peak_bytes * share)
            desk = Planner(step_of_graph(step, segment, rest_bytes=rest_bytes)) if rest_bytes else alone
            high, low = desk.baseline.peak_bytes, desk.floor().floor_bytes
            for number in range(NUM_BUDGETS):
                budget_bytes = high - (high - low) * number // (NUM_BUDGETS - 1)
                timeline = desk.best(budget_bytes)
                assert timeline is not None
                found.add(_option(desk.step, timeline))
    return _worthwhile(sorted(found))


def _option(step: Step, timeline: Timeline) -> Option:
    border = next(i for i, run in enumerate(timeline.runs) if step.nodes[run.rank].name == REST)
    rest_bytes = step.storages[-1].nbytes
    held = timeline.live_bytes
    return Option(
        seconds=timeline.added_seconds,
        held_bytes=int(held[border]) - rest_bytes,
        backward_bytes=int(held[border + 1 :].max(initial=0)),
        forward_bytes=int(held[:border].max(initial=0)),
        schedule=graph_schedules(step, timeline.runs)[0].schedule,
    )


def _worthwhile(options: Sequence[Option]) -> list[Option]:
    """Without those that are nowhere better than a cheaper one."""
    kept: list[Option] = []
    for option in options:
        if not any(
            other.held_bytes <= option.held_bytes
            and other.backward_bytes <= option.backward_bytes
            and other.forward_bytes <= option.forward_bytes
            for other in kept
        ):
            kept.append(option)
    return kept
