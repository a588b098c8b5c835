"""Two runs side by side: figures, changes by module, and what they do not claim."""

import json
from dataclasses import replace

import pytest
from report_cases import ENVIRONMENT, make_case, measurement_of

from lowtide.facts import Action
from lowtide.planning.schedules import eager_timeline
from lowtide.report.diff_page import render_diff
from lowtide.report.side_by_side import (
    ComparedRun,
    change_rows,
    figure_rows,
    have_common,
    headline,
    module_changes,
    notes_of,
)
from lowtide.report.style import size


@pytest.fixture(scope="module")
def case():
    return make_case(4)


@pytest.fixture(scope="module")
def planned(case):
    return ComparedRun(
        name="a", target="resnet", step=case.step, solution=case.solution, measurement=case.measurement
    )


def kept_instead(case):
    """The plan that keeps the first recomputed activation, for more bytes and less time."""
    first = next(d for d in case.solution.decisions if d.action is Action.RECOMPUTE)
    kept = replace(first, action=Action.RETAINED, held_bytes=first.nbytes, seconds=0.0, times=0)
    decisions = tuple(kept if d is first else d for d in case.solution.decisions)
    peak = case.solution.peak_bytes + first.nbytes
    seconds = case.solution.recompute_seconds - first.seconds
    return first, replace(
        case.solution, decisions=decisions, peak_bytes=peak, budget_bytes=peak, recompute_seconds=seconds
    )


def test_a_run_beside_itself_has_no_changes(planned):
    assert module_changes(planned, planned) == [] and notes_of(planned, planned) == []
    rows = figure_rows(planned, planned)
    assert {change for *_, change in rows} == {"="}
    assert headline(planned, planned).startswith("B has the same peak of ")


def test_changes_are_told_by_module_with_bytes_and_time(case, planned):
    first, solution = kept_instead(case)
    (change,) = module_changes(planned, replace(planned, solution=solution))
    assert (change.was, change.now, change.num_activations) == ("recomputed", "kept", 1)
    assert change.after_bytes == first.nbytes and change.added_seconds == pytest.approx(-first.seconds)
    ((path, words, *_),) = change_rows([change])
    assert "*" in path and words == "recomputed → kept"
    figures = {label: rest for label, *rest in figure_rows(planned, replace(planned, solution=solution))}
    assert figures["peak, predicted"][2].startswith(f"+{size(first.nbytes)} (+")
    assert figures["time added, predicted"][2].startswith("−")
    assert "target" not in figures and "bytes offloaded" not in figures


def test_the_headline_is_measured_where_both_are(case, planned):
    _, solution = kept_instead(case)
    other = replace(planned, solution=solution, measurement=measurement_of(solution))
    assert headline(planned, other).endswith(" (measured)") and "higher" in headline(planned, other)
    assert headline(planned, replace(other, measurement=None)).endswith(" (predicted)")


def test_different_models_are_compared_by_their_figures_alone(case, planned):
    other = make_case(3, module="decoder.{layer}")
    b = ComparedRun(name="b", step=other.step, solution=replace(other.solution, fingerprint="ff"))
    assert not have_common(planned, b) and module_changes(planned, b) == []
    assert notes_of(planned, b)[0].startswith("A and B are different steps")
    unplanned = ComparedRun(name="c", step=case.step)
    assert notes_of(unplanned, unplanned) == ["A and B have no plan: only the baselines are compared"]
    assert headline(planned, unplanned).endswith("(predicted)")
    nothing = ComparedRun(name="d")
    assert headline(nothing, planned) == "A and B have no figure in common"


def test_the_page_has_both_timelines_and_one_baseline_of_one_step(case, planned):
    _, solution = kept_instead(case)
    text = render_diff(
        planned, replace(planned, name="</script>", solution=solution), environment=ENVIRONMENT
    )
    data = json.loads(text.split('id="report-data">')[1].split("</script>")[0])
    labels = [line["label"] for line in data["lines"]]
    assert labels == ["A, baseline", "A, with the plan", "B, with the plan"]
    assert len(data["budgets"]) == 2 and "&lt;/script&gt;" in text
    assert render_diff(planned, planned, environment=ENVIRONMENT).count("every activation alike") == 1


def test_the_step_time_of_a_profile_is_that_of_its_baseline(case):
    """Ops that only some plans run, such as chunks, are no part of the baseline."""
    extra = replace(case.step.nodes[-1], name="extra", rank=len(case.step.nodes), on_demand=True, seconds=9.0)
    step = replace(case.step, nodes=(*case.step.nodes, extra))
    figures = ComparedRun(name="a", step=step).figures
    assert figures["step_seconds"] == eager_timeline(step).seconds < 9
