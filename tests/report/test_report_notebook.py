"""Cards for notebooks: escaped, without scripts, and drawn from what was simulated."""

import re

from synthetic import chain, resnet

from lowtide.facts import Step
from lowtide.plans import Plan, load_plan
from lowtide.profiles import Profile
from lowtide.report.notebook import LEFT, MOST_POINTS, WIDTH, card, timeline_svg


def points(svg: str, shape: str) -> list[list[tuple[float, float]]]:
    found = re.findall(rf'<{shape} points="([^"]*)"', svg)
    return [[tuple(map(float, p.split(","))) for p in each.split()] for each in found]


def planned(step: Step) -> Plan:
    found = Profile(step)
    return found.plan(found.floor_bytes)


def test_text_is_only_text() -> None:
    html = card("<script>alert(1)</script>", [("<b>", "</td><img src=x>")])
    assert "<script" not in html and "<img" not in html and "&lt;script&gt;" in html


def test_the_highest_point_is_the_peak_however_many_ops_there_are() -> None:
    step = resnet(blocks=(1, 2, 1, 1))
    found = Profile(step)
    assert len(found.timeline.runs) > MOST_POINTS
    svg = timeline_svg(found.timeline)
    areas = points(svg, "polygon")
    assert len(areas[0]) == 2 * MOST_POINTS
    xs, ys = zip(*(point for area in areas for point in area), strict=True)
    assert min(xs) >= LEFT and max(xs) <= WIDTH and min(ys) == 10.0


def test_a_plan_is_drawn_below_its_budget() -> None:
    plan = planned(chain(length=30))
    svg = plan._repr_html_()
    lines = points(svg, "polyline")
    budget = lines[-1][0][1]
    assert all(y >= budget - 0.1 for area in points(svg, "polygon") for _, y in area)
    assert min(y for _, y in lines[0]) < budget, "the step without the plan is above it"


def test_a_plan_of_a_file_shows_its_figures_alone(tmp_path) -> None:
    planned(chain(length=10)).save(tmp_path / "plan.json")
    plan = load_plan(tmp_path / "plan.json")
    assert "<svg" not in plan._repr_html_() and "budget" in plan.summary()
    assert "Decisions" in plan.report(tmp_path / "plan.html").read_text()
