"""Plans whose blocks fit into a device's memory, as its caching allocator cuts and reserves it.

A planner counts the bytes of storages. On an accelerator two sums are larger (`allocator`): blocks, since
small rests are not cut off, and segments, which run out first. A solution whose blocks or segments are above
the budget is solved again for a lower budget: first in even steps down to the floor, then by halving the last
step.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace

from lowtide.errors import BudgetTooSmall, LowtideError
from lowtide.facts import Region, ReservedBytes, Solution, Step
from lowtide.planning.allocator import Reserved, caches_blocks, expandable_segments, reserved_for
from lowtide.planning.resting_forms import state_rests
from lowtide.planning.resting_sets import resting_form
from lowtide.planning.schedules import as_eager, eager_timeline
from lowtide.planning.simulate import simulate

STEPS = 16
HALVINGS = 4

Solve = Callable[[int], Solution]


def check_reserves(device: str, text: object) -> None:
    """Refuse a budget of reserved bytes for a device without a caching allocator."""
    if not caches_blocks(device):
        raise LowtideError(
            f"the budget {text!r} is of bytes that an accelerator's allocator reserves, and this step is on "
            f"'{device}', which has none: leave 'reserved' out, or move model and batch to an accelerator"
        )


def baseline_reserved(step: Step, environment: Mapping[str, str]) -> Reserved:
    """What a process reserves that trains without a plan."""
    return reserved_for(as_eager(step), eager_timeline(step), expandable=expandable_segments(environment))


def solve_on_device(
    step: Step,
    solve: Solve,
    *,
    eager: Callable[[], Solution] | None = None,
    budget_bytes: int,
    reserved_budget_bytes: int | None,
    environment: Mapping[str, str],
) -> Solution:
    """The cheapest solution found whose blocks are at most `budget_bytes` and whose segments are at most
    `reserved_budget_bytes`, where given.

    `eager` gives the step without a plan, which is taken where it fits and no other solution does: 100% of
    the baseline's peak is always enough. BudgetTooSmall where none is found. Where a solution's segments may
    be within the budget or above it, as their range says, one that is surely within takes precedence.
    """
    expandable = expandable_segments(environment)
    baseline = baseline_reserved(step, environment)
    seen: list[tuple[Solution, Reserved]] = []

    def fits(solution: Solution, found: Reserved, *, surely: bool) -> bool:
        reserved = found.reserved_bytes if surely else found.least_bytes
        within = reserved_budget_bytes is None or reserved <= reserved_budget_bytes
        return within and found.allocated_bytes <= budget_bytes

    def tried(lowered_bytes: int) -> bool:
        """Whether a solution for a lower budget surely fits."""
        solution = solve(lowered_bytes)
        seen.append((solution, simulated(step, solution, expandable=expandable)))
        return fits(*seen[-1], surely=True)

    def chosen() -> tuple[Solution, Reserved] | None:
        for surely in (True, False):
            good = [pair for pair in seen if fits(*pair, surely=surely)]
            if good:
                return min(good, key=lambda pair: (pair[0].recompute_seconds, -pair[0].peak_bytes))
        return None

    try:
        fitting = tried(budget_bytes)
    except BudgetTooSmall as error:
        tried(error.floor_bytes)
        if reserved_budget_bytes is None and seen[-1][1].allocated_bytes <= error.floor_bytes:
            raise
        raise _too_small(
            seen, budget_bytes=budget_bytes, reserved_budget_bytes=reserved_budget_bytes
        ) from error
    if not fitting:
        _search(tried, high=min(budget_bytes, seen[0][0].peak_bytes), floor=_floor(seen[0][0]))
    best = chosen()
    if best is None and eager is not None:
        seen.append((eager(), baseline))
        best = chosen()
    if best is None:
        raise _too_small(seen, budget_bytes=budget_bytes, reserved_budget_bytes=reserved_budget_bytes)
    solution, found = best
    return replace(
        solution,
        budget_bytes=budget_bytes if reserved_budget_bytes is None else solution.budget_bytes,
        peak_bytes=max(solution.peak_bytes, found.allocated_bytes),
        baseline_peak_bytes=max(solution.baseline_peak_bytes, baseline.allocated_bytes),
        reserved=ReservedBytes(
            least_bytes=found.least_bytes,
            most_bytes=found.reserved_bytes,
            baseline_bytes=baseline.reserved_bytes,
            budget_bytes=reserved_budget_bytes,
            expandable_segments=expandable,
        ),
    )


def simulated(step: Step, solution: Solution, *, expandable: bool) -> Reserved:
    """The allocator's bytes in a process that trains by a solution."""
    if solution.eager:
        return reserved_for(as_eager(step), eager_timeline(step), expandable=expandable)
    step = _with_split_optimizer(resting_form(step, solution.resting), solution)
    return reserved_for(step, simulate(step, solution.schedule.runs), expandable=expandable)


def _with_split_optimizer(step: Step, solution: Solution) -> Step:
    """The step with the optimizer's temporaries of a solution that takes its step in chunks."""
    most = dict(step.optimizer_chunks).get(solution.optimizer_chunk_bytes)
    if most is None:
        return step
    rests = state_rests(step)
    nodes = tuple(
        replace(node, workspace_bytes=most if rests else min(node.workspace_bytes, most))
        if node.region is Region.OPTIMIZER
        else node
        for node in step.nodes
    )
    return replace(step, nodes=nodes)


def _floor(solution: Solution) -> int:
    """The lowest budget to try; half of the peak where the planner does not know a floor."""
    return solution.peak_bytes // 2 if solution.floor_bytes is None else solution.floor_bytes


def _search(tried: Callable[[int], bool], *, high: int, floor: int) -> None:
    """Try lower budgets: the highest of even steps that fits, then between that and the one before."""
    if floor >= high:
        return
    budgets = [high - (high - floor) * number // STEPS for number in range(1, STEPS + 1)]
    before = high
    for lowered in budgets:
        try:
            if tried(lowered):
                low = lowered
                break
        except BudgetTooSmall:  # below what this planner reaches
            return
        before = lowered
    else:
        return
    for _ in range(HALVINGS):
        middle = (low + before) // 2
        low, before = (middle, before) if tried(middle) else (low, middle)


def _too_small(
    seen: list[tuple[Solution, Reserved]], *, budget_bytes: int, reserved_budget_bytes: int | None
) -> BudgetTooSmall:
    if reserved_budget_bytes is None:
        solution, found = min(seen, key=lambda pair: pair[1].allocated_bytes)
        return BudgetTooSmall(
            budget_bytes=budget_bytes,
            floor_bytes=found.allocated_bytes,
            node=solution.peak_node,
            hint="The allocator's blocks are larger than the tensors in them.",
        )
    solution, found = min(seen, key=lambda pair: pair[1].least_bytes)
    return BudgetTooSmall(
        budget_bytes=reserved_budget_bytes,
        floor_bytes=found.least_bytes,
        node=solution.peak_node,
        of="reserved",
    )
