"""The forms of a step that `auto` searches, as one flat list, and the search over all of them.

A variant fixes two choices for the whole step before the search chooses remats:

    chunks    op by op | each backward chain as it is fastest | each as it is smallest
              | op by op, and one remat rule for each recomputed value
    offload   never | alone: nothing is recomputed | mixed with recompute

A step without chunks and without a store has one variant, a step with both up to twelve. Each is searched on
its own, since a search among more rules can miss what a search among fewer finds. A budget takes the cheapest
schedule of all variants, so chunks and offload never make a schedule slower. A schedule for a smaller budget
also serves larger ones, so a larger budget is never slower.

Shortcoming: no variant treats single chains differently, and the bounds say nothing about such schedules.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import cached_property
from math import fsum

from lowtide.facts import FETCH, Action, Node, Region, Remat, Run, Step
from lowtide.planning.auto import Auto
from lowtide.planning.mu_two import policy_with_offload
from lowtide.planning.offload_sets import Offloading, offload_sets, with_slack
from lowtide.planning.planning_problem import PlanningProblem
from lowtide.planning.search.problem import Ints
from lowtide.planning.search.step_problem import Archive
from lowtide.planning.simulate import Timeline, extra_seconds, is_remat, remat_of, replaced_ranks, simulate
from lowtide.planning.transfer_model import can_offload, rests_on_store, transfer_bytes

FASTER = 0.9
"""Measured times differ by up to this factor by chance: a chain in chunks is faster below it."""
MOST_NODES = 8000
"""A larger step whose weights rest is searched for transfers alone: the search for both takes too long."""
NUM_MU_TWO = 6
"""Budgets for which `mu-two` gives a schedule to start from."""

ChunkedRuns = tuple[Run, ...]
"""The backward nodes that run by a remat rule, each in place of the chain that leads to it alone; by rank."""


class OffloadUse(StrEnum):
    NEVER = "never"
    ALONE = "alone"
    MIXED = "mixed"


@dataclass(frozen=True, slots=True, eq=False)
class Variant:
    """One form of a step: `form` is a step with each chain of `chunks` as one op, which takes `extra_seconds`
    longer than the step op by op. `why` says what this variant finds that others miss."""

    name: str
    why: str
    form: Step
    chunks: ChunkedRuns = ()
    extra_seconds: float = 0.0
    offload: OffloadUse = OffloadUse.NEVER


def variants(step: Step) -> list[Variant]:
    """All forms of a step that `auto` searches; the first one runs op by op and never offloads."""
    uses = {OffloadUse.NEVER: "recompute alone, which waits for no transfer"}
    if rests_on_store(step):
        uses = {}  # the forward pass reads weights from the store in any case
    if can_offload(step):
        uses[OffloadUse.ALONE] = "transfers alone, which no recompute delays"
        uses[OffloadUse.MIXED] = "what recompute and transfers reach together"
        if rests_on_store(step) and len(step.nodes) > MOST_NODES:
            del uses[OffloadUse.MIXED]
    return [
        replace(variant, name=f"{variant.name}, offload {use}", why=f"{variant.why}; {words}", offload=use)
        for variant in _chunk_variants(step)
        for use, words in uses.items()
    ]


def _chunk_variants(step: Step) -> Iterator[Variant]:
    seen: set[ChunkedRuns] = set()
    for name, why, chunks in (
        ("op by op", "chains in chunks can be slower", ()),
        ("fastest chunks", "less time where memory is plenty", _chosen(step, _fastest)),
        ("smallest chunks", "the lowest peak", _chosen(step, _smallest)),
    ):
        if chunks not in seen:
            seen.add(chunks)
            yield chunk_variant(step, chunks, name=name, why=why)
    nodes = tuple(replace(node, remats=_with_one_recompute(node)) for node in step.nodes)
    if nodes != step.nodes:
        why = "fewer rules, among which the search misses less"
        yield Variant("op by op, one rule per value", why, replace(step, nodes=nodes))


def chunk_variant(step: Step, chunks: ChunkedRuns, *, name: str = "", why: str = "") -> Variant:
    """The variant of given chunks, without offload."""
    extra = fsum(extra_seconds(step, run) for run in chunks)
    return Variant(name, why, with_chunks(step, chunks) if chunks else step, chunks, extra)


def auto(problem: PlanningProblem, budget_bytes: int) -> Timeline:
    """The planner `auto`: the cheapest schedule within the budget, or the one with the lowest peak."""
    search = problem.once(VariantsSearch)
    return search.best(budget_bytes) or search.lowest()


class VariantsSearch:
    """The cheapest schedules of all variants of one step."""

    def __init__(self, problem: PlanningProblem) -> None:
        self.problem = problem
        self.variants = problem.variants or (chunk_variant(problem.step, ()),)
        forms = {id(problem.step): problem}
        for variant in self.variants:
            if id(variant.form) not in forms:
                forms[id(variant.form)] = PlanningProblem(variant.form)
        self.forms = {id(v.form): (forms[id(v.form)], v.extra_seconds) for v in self.variants}
        self.searches = [VariantSearch(v, forms[id(v.form)]) for v in self.variants]

    def best(self, budget_bytes: int) -> Timeline | None:
        """The cheapest schedule with a peak of at most `budget_bytes`."""
        found = [
            (search.variant, schedule)
            for search in self.searches
            if (schedule := search.best(budget_bytes)) is not None
        ]
        if not found:
            return None
        order = {form: number for number, form in enumerate(self.forms)}

        def cost(pair: tuple[Variant, Timeline | Offloading]) -> tuple[float, int, float, int]:
            variant, schedule = pair
            seconds, nbytes = (
                schedule.price if isinstance(schedule, Offloading) else (schedule.added_seconds, 0)
            )
            return seconds + variant.extra_seconds, order[id(variant.form)], seconds, nbytes

        variant, schedule = min(found, key=cost)
        if isinstance(schedule, Offloading):
            schedule = with_slack(variant.form, schedule, budget_bytes)
        step = self.problem.step
        if variant.form is step and step.transfer_speed is None:
            return schedule
        return simulate(step, as_chunks(step, schedule.runs, variant.chunks))

    def lowest(self) -> Timeline:
        """The schedule with the lowest peak."""
        timeline = self.best(self.floor_bytes)
        assert timeline is not None
        return timeline

    @cached_property
    def floor_bytes(self) -> int:
        return min(search.floor_bytes for search in self.searches)

    def bound_seconds(self, budget_bytes: int) -> float:
        """No schedule within the budget adds less, among those that treat all chains alike."""
        return min(problem.bounds.seconds(budget_bytes) + extra for problem, extra in self.forms.values())

    @cached_property
    def floor_bound_bytes(self) -> int:
        """No schedule has a lower peak."""
        return min(problem.bounds.floor_bytes for problem, _ in self.forms.values())


class VariantSearch:
    """The schedules of one variant for all budgets, as schedules of its form; `problem` is that form."""

    def __init__(self, variant: Variant, problem: PlanningProblem) -> None:
        self.variant, self.problem = variant, problem

    def best(self, budget_bytes: int) -> Timeline | Offloading | None:
        if self.variant.offload is OffloadUse.NEVER:
            return self.problem.once(without_offload).once(Auto).best_timeline(budget_bytes)
        return self._archive.best(budget_bytes)

    @property
    def floor_bytes(self) -> int:
        if self.variant.offload is OffloadUse.NEVER:
            return self.problem.once(without_offload).once(Auto).floor_bytes
        return self._archive.entries[0].peak_bytes

    @property
    def _archive(self) -> Archive[Offloading]:
        alone = self.variant.offload is OffloadUse.ALONE
        return self.problem.once(offload_alone if alone else offload_mixed)


def without_offload(problem: PlanningProblem) -> PlanningProblem:
    """The same step without a store; the problem itself where it has none."""
    if problem.step.transfer_speed is None:
        return problem
    return PlanningProblem(step_without_offload(problem.step))


def offload_alone(problem: PlanningProblem) -> Archive[Offloading]:
    """Schedules that recompute nothing."""
    return problem.once(offload_sets).search([problem.search_problem.sequence(())])


def offload_mixed(problem: PlanningProblem) -> Archive[Offloading]:
    """Schedules that recompute and offload. The search starts from schedules without a store, from schedules
    where a fetch costs the seconds of both transfers, and from schedules of `mu-two`."""
    without = problem.once(without_offload)
    search = without.once(Auto)
    runs = [without.search_problem.runs(entry.order) for entry in search.archive.entries]
    seeds = [problem.search_problem.sequence_of(some) for some in runs]
    priced = PlanningProblem(with_priced_fetches(problem.step))
    seeds += [entry.order for entry in priced.once(Auto).archive.entries]
    low, high = search.floor_bytes, problem.baseline.peak_bytes
    levels = {high - (high - low) * i // NUM_MU_TWO for i in range(1, NUM_MU_TWO + 1)}
    mu_two: list[Ints] = [policy_with_offload(problem, level) for level in sorted(levels)]
    return problem.once(offload_sets).search([*seeds, *mu_two])


def step_without_offload(step: Step) -> Step:
    """The same step without a store."""
    return _with_remats(step, lambda n: tuple(r for r in n.remats if r.action is not Action.OFFLOAD))


def with_priced_fetches(step: Step) -> Step:
    """The same step without a store, where a fetch is a remat that costs the seconds of both transfers. A
    search for its floor places no transfers, and is many times faster."""
    return _with_remats(step, lambda node: _priced(step, node))


def _with_remats(step: Step, remats: Callable[[Node], tuple[Remat, ...]]) -> Step:
    nodes = tuple(replace(node, remats=remats(node)) for node in step.nodes)
    return replace(step, transfer_speed=None, nodes=nodes)


def _priced(step: Step, node: Node) -> tuple[Remat, ...]:
    """The remats of a node, where a fetch costs the seconds of both transfers."""
    speed = step.transfer_speed
    assert speed is not None
    found = []
    for remat in node.remats:
        seconds = remat.seconds
        if remat.action is Action.OFFLOAD:
            nbytes = transfer_bytes(step, node.rank)
            seconds += speed.read_seconds(nbytes)
            if node.op != FETCH:
                seconds += speed.write_seconds(nbytes)
        found.append(replace(remat, seconds=seconds))
    return tuple(found)


def without_dominated(step: Step) -> Step:
    """Without remats whose workspace is larger than that of another one that is hardly slower."""
    nodes = [
        replace(node, remats=tuple(r for r in node.remats if not _is_dominated(r, node.remats)))
        if node.region is Region.FORWARD and len(node.remats) > 1
        else node
        for node in step.nodes
    ]
    return step if nodes == list(step.nodes) else replace(step, nodes=tuple(nodes))


def _is_dominated(remat: Remat, others: Sequence[Remat]) -> bool:
    made = (remat.action, remat.reads, remat.holds, remat.makes)
    return any(
        (other.action, other.reads, other.holds, other.makes) == made
        and other.workspace_bytes < remat.workspace_bytes
        and remat.seconds > FASTER * other.seconds
        for other in others
    )


def _with_one_recompute(node: Node) -> tuple[Remat, ...]:
    """The remats of a forward node, with only the preferred recompute."""
    if node.region is not Region.FORWARD:
        return node.remats
    preferred = node.recompute
    return tuple(r for r in node.remats if r.action is not Action.RECOMPUTE or r is preferred)


def _chosen(step: Step, choose: Callable[[Step, Node], Remat | None]) -> ChunkedRuns:
    found = [
        (node.rank, choose(step, node))
        for node in step.nodes
        if node.remats and node.region is Region.BACKWARD
    ]
    return tuple(Run(rank, remat.rule) for rank, remat in found if remat is not None)


def _fastest(step: Step, node: Node) -> Remat | None:
    remat = min(node.remats, key=lambda r: (r.seconds, r.workspace_bytes))
    now = [node.rank, *replaced_ranks(step, Run(node.rank, remat.rule))]
    return remat if remat.seconds < FASTER * fsum(step.nodes[rank].seconds for rank in now) else None


def _smallest(step: Step, node: Node) -> Remat | None:
    smaller = [
        remat
        for remat in node.remats
        if set(remat.reads) != set(node.reads) or remat.workspace_bytes < node.workspace_bytes
    ]
    return min(smaller, key=lambda r: (r.workspace_bytes, r.seconds), default=None)


def with_chunks(step: Step, chunks: ChunkedRuns) -> Step:
    """The same step with each chain as one op; the other ops of the chain do nothing.

    before   g -> third_backward -> second_backward -> first_backward -> ...
    after    g -> (nothing)         (nothing)          the whole chain -> ...
    """
    nodes = list(step.nodes)
    for run in chunks:
        remat = remat_of(step, run)
        for rank in replaced_ranks(step, run):
            nodes[rank] = replace(
                nodes[rank], reads=(), holds=(), makes=(), seconds=0.0, workspace_bytes=0, remats=()
            )
        nodes[run.rank] = replace(
            nodes[run.rank],
            reads=remat.reads,
            seconds=remat.seconds,
            workspace_bytes=remat.workspace_bytes,
        )
    return replace(step, nodes=tuple(nodes))


def as_chunks(step: Step, runs: Sequence[Run], chunks: ChunkedRuns) -> tuple[Run, ...]:
    """A schedule of `with_chunks(step, chunks)` as one of the step itself."""
    if not chunks:
        return tuple(runs)
    by_rank: Mapping[int, Run] = {run.rank: run for run in chunks}
    needless = {rank for run in chunks for rank in replaced_ranks(step, run)}
    return tuple(
        by_rank.get(run.rank, run) if run.is_first else run
        for run in runs
        if not run.is_first or run.rank not in needless
    )


def chunks_of(step: Step, runs: Sequence[Run]) -> ChunkedRuns:
    """The chains that a schedule of the step runs in chunks."""
    return tuple(run for run in runs if not run.is_first and not is_remat(step, run))


def as_ops(step: Step, runs: Sequence[Run]) -> tuple[Run, ...]:
    """A schedule of the step as one of `with_chunks(step, chunks_of(step, runs))`."""
    left_out = sorted((rank for run in runs for rank in replaced_ranks(step, run)), reverse=True)
    found: list[Run] = []
    for run in runs:
        if is_remat(step, run):
            found.append(run)
            continue
        while left_out and left_out[-1] < run.rank:
            found.append(Run(left_out.pop()))
        found.append(Run(run.rank))
    return tuple(found)
