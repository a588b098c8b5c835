"""What reports show of values that leave for a store: files, page, plots and trace."""

import csv
from itertools import pairwise

import pytest
from report_cases import ENVIRONMENT, make_case, store_case, tradeoff_points
from report_steps import MIB

from lowtide.facts import Action
from lowtide.profiles import Profile
from lowtide.report import exports
from lowtide.report.answer import plan_tiles
from lowtide.report.exports import chrome_trace
from lowtide.report.html import render_report
from lowtide.report.plots import plot_tradeoff, plot_transfers, write_plots
from lowtide.report.times import READ, WAIT, WRITE, run_starts, store_use, waiting


@pytest.fixture(scope="module")
def case():
    given = store_case()
    return given["step"], given["before"], given["solution"], given["after"]


def read(path):
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def test_decisions_name_the_nodes_between_which_a_value_is_away(case, tmp_path):
    _, _, solution, _ = case
    rows = read(exports.write_decisions(tmp_path / "ac_decisions.csv", solution.decisions))
    away = [row for row in rows if row["decision"] == "OFFLOAD"]
    assert len(away) == sum(d.action is Action.OFFLOAD for d in solution.decisions) > 0
    assert all(row["released_after"] and row["fetched_before"] for row in away)
    assert all(not row["released_after"] for row in rows if row["decision"] != "OFFLOAD")
    spent = sum(float(row["plan_recomp_time_s"]) for row in away)
    assert spent == pytest.approx(solution.offload.stall_seconds)


def test_decisions_without_a_store_have_the_columns_they_had(tmp_path):
    path = exports.write_decisions(tmp_path / "ac_decisions.csv", make_case(3).solution.decisions)
    assert path.read_text().splitlines()[0] == ",".join(exports.DECISION_COLUMNS)


def test_transfers_add_up(case, tmp_path):
    step, before, solution, after = case
    use = store_use(step, after)
    assert use is not None
    rows = read(exports.write_transfers(tmp_path / "transfers.csv", use))
    assert {row["direction"] for row in rows} == {WRITE, READ}
    for direction in (WRITE, READ):
        mine = [row for row in rows if row["direction"] == direction]
        assert sum(int(row["bytes"]) for row in mine) == solution.offload.store_bytes
        assert all(float(a["end_s"]) <= float(b["begin_s"]) + 1e-12 for a, b in pairwise(mine))
    hidden = sum(float(row["hidden_s"]) for row in rows)
    late = sum(float(row["not_hidden_s"]) for row in rows)
    assert late == pytest.approx(solution.offload.stall_seconds)
    assert hidden + late == pytest.approx(solution.offload.transfer_seconds)
    assert store_use(step, before) is None


def test_runs_start_after_what_they_wait_for(case):
    step, _, _, after = case
    starts = run_starts(step, after)
    assert starts[:-1] == pytest.approx(after.traffic.run_seconds)
    assert starts[-1] == pytest.approx(after.seconds)
    assert sum(row.seconds for row in waiting(after)) == pytest.approx(after.stall_seconds)


def test_the_page_shows_the_store(case):
    step, before, solution, after = case
    page = render_report(
        title="a step", environment=ENVIRONMENT, step=step, before=before, after=after, solution=solution
    )
    assert 'id="store"' in page
    assert "<code>disk:/scratch</code>" in page
    assert page.count("<polyline") == 2
    assert '<option value="OFFLOAD">' in page
    assert "Freed after" in page
    assert WAIT in page
    tile = next(tile for tile in plan_tiles(solution, None) if tile.label == "Offloaded")
    assert "disk:/scratch" in tile.note


def test_the_page_of_a_step_without_a_store_shows_none():
    case = make_case(3)
    page = render_report(
        title="a step",
        environment=ENVIRONMENT,
        step=case.step,
        before=case.before,
        after=case.after,
        solution=case.solution,
    )
    assert 'id="store"' not in page and '<option value="OFFLOAD">' not in page and "Let go after" not in page
    assert all(tile.label != "Offloaded" for tile in plan_tiles(case.solution, None))


def test_curves_with_and_without_the_store_are_in_one_picture(case):
    step = case[0]
    profile = Profile(step)
    curve, without = (
        tradeoff_points(planner.tradeoff(points=4))
        for planner in (profile._planner, profile._planner.without_offload)
    )
    assert any(point.offloaded for point in curve)
    assert not any(point.offloaded for point in without)
    axes = plot_tradeoff(curve, step_seconds=step.seconds, without_offload=without).axes[0]
    labels = axes.get_legend_handles_labels()[1]
    assert {"with offload (simulated)", "without offload (simulated)"} <= set(labels)
    page = render_report(
        title="a step",
        environment=ENVIRONMENT,
        tradeoff=curve,
        without_offload=without,
        step_seconds=step.seconds,
    )
    assert "The blue curve may use the store" in page
    assert [p.peak_bytes for p in profile.tradeoff(points=4, offload=False)] == [
        s.peak_bytes for s in profile._planner.without_offload.tradeoff(points=4)
    ]


def test_the_trace_has_a_row_for_each_direction(case):
    step, before, _, after = case
    events = chrome_trace(step, {"without": before, "with": after})["traceEvents"]
    threads = {
        (e["pid"], e["args"]["name"]): e["tid"]
        for e in events
        if e["ph"] == "M" and e["name"] == "thread_name"
    }
    assert (1, WRITE) not in threads
    for direction in (WRITE, READ):
        slices = [e for e in events if e["ph"] == "X" and e["tid"] == threads[2, direction]]
        mine = [t for t in after.traffic.transfers if t.is_write is (direction == WRITE)]
        assert [e["args"]["bytes"] for e in slices] == [t.nbytes for t in mine]
        assert all(a["ts"] + a["dur"] <= b["ts"] + 2e-3 for a, b in pairwise(slices))
    waits = [e["dur"] for e in events if e["ph"] == "X" and e["tid"] == threads[2, WAIT]]
    assert sum(waits) == pytest.approx(1e6 * after.stall_seconds, rel=1e-3)


def test_a_plot_of_the_bytes_on_the_link(case, tmp_path):
    step, before, solution, after = case
    names = {
        path.stem for path in write_plots(tmp_path, step=step, before=before, after=after, formats=["svg"])
    }
    assert "transfers" in names
    use = store_use(step, after)
    lines = plot_transfers(use).axes[0].get_lines()
    assert [line.get_label() for line in lines] == [WRITE, READ]
    assert [line.get_ydata()[-1] for line in lines] == [solution.offload.store_bytes / MIB] * 2
