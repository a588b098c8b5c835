"""Who holds the peak: rows that add up, a tree, lines of source, boxes that do not overlap."""

from itertools import pairwise

from hypothesis import given, settings
from report_cases import make_case
from strategies import steps

from lowtide.facts import Step
from lowtide.planning.simulate import baseline_runs, simulate
from lowtide.profiles import Profile
from lowtide.report.live_tensors import NARROWEST, by_module, by_source, flame, live_at_peak


@settings(max_examples=15, deadline=None)
@given(steps())
def test_the_rows_add_up_to_the_peak(step: Step) -> None:
    found = Profile(step)
    for timeline in (
        simulate(step, baseline_runs(step)),
        simulate(step, found.plan(max(found.floor_bytes, 1)).solution.schedule.runs),
    ):
        rows = live_at_peak(step, timeline)
        assert sum(row.nbytes for row in rows) == timeline.peak_bytes
        assert all(row.kept for row in rows)
        assert by_module(rows).nbytes == timeline.peak_bytes


def test_a_tree_holds_what_its_branches_hold() -> None:
    case = make_case(4)
    root = by_module(live_at_peak(case.step, case.after))

    def check(branch) -> None:
        inside = [child.nbytes for child in branch.largest_first]
        assert branch.nbytes == sum(inside) + sum(held.nbytes for held in branch.tensors)
        assert inside == sorted(inside, reverse=True)
        for child in branch.branches.values():
            check(child)

    check(root)
    assert len(root.branches) > 1
    assert all(len(b.branches) != 1 or b.tensors for b in root.branches.values()), "chains are folded"


def test_boxes_stand_below_their_parent_and_beside_each_other() -> None:
    case = make_case(4)
    boxes = flame(by_module(live_at_peak(case.step, case.after)))
    assert boxes[0].width == 100
    for depth in {box.depth for box in boxes}:
        row = sorted((box for box in boxes if box.depth == depth), key=lambda box: box.left)
        for one, other in pairwise(row):
            assert one.left + one.width <= other.left + 1e-6
    assert all(box.width >= NARROWEST for box in boxes)


def test_lines_of_source_are_ranked() -> None:
    case = make_case(4)
    rows = live_at_peak(case.step, case.before)
    lines = by_source(rows)
    assert [nbytes for _, nbytes, _ in lines] == sorted((n for _, n, _ in lines), reverse=True)
    assert sum(n for _, n, _ in by_source(rows, limit=1000)) == sum(row.nbytes for row in rows if row.source)
