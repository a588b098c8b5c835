"""The offload branch of μ-TWO's policy: what an offload costs by algorithm C, and which branch is taken."""

import pytest
from offloadable import with_offload
from strategies import StepBuilder
from synthetic import chain

from lowtide.errors import BudgetTooSmall
from lowtide.facts import Action, Kind, TransferSpeed
from lowtide.planning.activations import activations
from lowtide.planning.mu_two import Prefetching, longest_idle, offload_overhead
from lowtide.planning.repeated_graphs import planner_for


def link(bandwidth: float) -> TransferSpeed:
    return TransferSpeed(store="disk:/x", write_bytes_per_second=bandwidth, read_bytes_per_second=bandwidth)


def three(bandwidth: float = 10.0, recomputable: bool = True):
    """Values of 40 bytes, each read by its own gradient of 3 s, the first one's last."""
    build = StepBuilder(link=link(bandwidth))
    value, made = build.given(1, Kind.INPUT), []
    op = build.op if recomputable else build.fixed
    for _ in range(3):
        value = build.offloadable(op("op", (value,), 40, 2.0))
        made.append(value)
    gradient = build.backward()
    for rank in reversed(made):
        gradient = build.grad((gradient, rank), 1, 3.0)
    return build.step()


def test_an_offload_costs_what_cannot_hide_behind_ops_after_the_peak_interval():
    step = three()
    first, second, third = activations(step)
    start = step.first_backward_rank
    compute = {node.rank: node.seconds for node in step.nodes[start:]}
    # a read takes 4 s; before the gradient of the third value there is nothing, then 3 s and 6 s
    free = Prefetching(dict(compute))
    assert [offload_overhead(a, step.transfer_speed, free) for a in (third, second, first)] == [4, 1, 0]
    # inside of the peak interval nothing can be prefetched
    free.after = second.first_backward_use - 1
    assert [offload_overhead(a, step.transfer_speed, free) for a in (third, second, first)] == [4, 4, 1]
    # compute that hides one read hides no other
    free = Prefetching(dict(compute))
    free.use_up(first, 4.0)
    assert offload_overhead(second, step.transfer_speed, free) == pytest.approx(2.0)


def test_the_longest_idle_is_offloaded_first():
    step = three()
    assert longest_idle(list(activations(step))) == activations(step)[0]


def actions(solution) -> set[Action]:
    return {decision.action for decision in solution.decisions if decision.action is not Action.RETAINED}


@pytest.mark.parametrize(("bandwidth", "action"), [(1e9, Action.OFFLOAD), (1e4, Action.RECOMPUTE)])
def test_the_cheaper_branch_is_taken(bandwidth, action):
    step = with_offload(chain(length=8), link(bandwidth))
    planner = planner_for(step)
    solution = planner.solve(budget_bytes=planner.baseline.peak_bytes * 7 // 10, planner="mu-two")
    assert solution.peak_bytes <= solution.budget_bytes
    assert actions(solution) == {action}


def test_both_branches_in_one_plan():
    """What can hide is offloaded, and the rest recomputed."""
    step = with_offload(chain(length=12), link(1.2e8))
    planner = planner_for(step)
    found = [
        planner.solve(budget_bytes=planner.baseline.peak_bytes * n // 20, planner="mu-two")
        for n in range(10, 19)
    ]
    assert {Action.OFFLOAD, Action.RECOMPUTE} in [actions(solution) for solution in found]


def test_a_budget_that_it_does_not_reach_names_its_own_floor():
    planner = planner_for(three(recomputable=False))
    with pytest.raises(BudgetTooSmall, match="what planner 'mu-two' reaches") as error:
        planner.solve(budget_bytes=10, planner="mu-two")
    reached = planner.solve(budget_bytes=error.value.floor_bytes, planner="mu-two")
    assert reached.peak_bytes == error.value.floor_bytes < planner.baseline.peak_bytes
