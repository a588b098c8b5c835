import json
import re
from dataclasses import replace
from html.parser import HTMLParser

import pytest
from hypothesis import given
from hypothesis import strategies as st
from report_cases import (
    ENVIRONMENT,
    compare_rows,
    make_case,
    measurement_of,
    sweep_rows,
    tradeoff_of,
    tradeoff_points,
    unpack,
)

from lowtide.facts import Action
from lowtide.report import style, times
from lowtide.report.answer import (
    compare_verdict,
    free_peak,
    free_text,
    plan_tiles,
    plan_verdict,
    sweep_verdict,
)
from lowtide.report.html import render_report
from lowtide.report.module_summary import RECOMPUTED, by_module, fate_of, module_lines, pattern_of
from lowtide.report.page_packing import pack_integers, script_json
from lowtide.report.payload import made_index, with_made
from lowtide.report.results import Environment, SweepStatus, TradeoffPoint

EVIL = "</script><script>alert(1)</script><img src=x onerror=alert(2)>&\"'<!--"


class Page(HTMLParser):
    """Scripts, ids and addresses of a page, as a browser would split it."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.scripts: list[str] = []
        self.tags: set[str] = set()
        self.ids: set[str] = set()
        self.addresses: list[str] = []
        self.handlers: list[str] = []
        self._in_script = False
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.add(tag)
        self.handlers += [name for name, _ in attrs if name.startswith("on")]
        values = dict(attrs)
        self.ids.add(values.get("id") or "")
        self.addresses += [values[key] for key in ("src", "href") if key in values]
        if tag == "script":
            self._in_script = True
            self.scripts.append("")

    def handle_endtag(self, tag):
        self._in_script = self._in_script and tag != "script"

    def handle_data(self, data):
        if self._in_script:
            self.scripts[-1] += data


def render(case, **changes):
    given = {
        "title": "a step",
        "environment": ENVIRONMENT,
        "step": case.step,
        "before": case.before,
        "after": case.after,
        "solution": case.solution,
        "measurement": case.measurement,
        "tradeoff": case.tradeoff,
    }
    return render_report(**(given | changes))


@pytest.fixture(scope="module")
def case():
    return make_case(6)


@given(st.lists(st.integers(min_value=-(2**51), max_value=2**51)))
def test_integers_come_back(values):
    assert unpack(pack_integers(values)) == values


@given(st.text())
def test_json_in_a_script_is_only_data(text):
    embedded = str(script_json({"name": text}))
    assert not re.search(r"[<>&\u2028\u2029]", embedded)
    assert json.loads(embedded) == {"name": text}


def test_all_sections_are_there(case):
    page = Page(render(case, sweep=sweep_rows(), compare=compare_rows()))
    wanted = {"answer", "sweep", "compare", "timeline", "holders", "breakdown", "tradeoff", "modules"}
    wanted |= {"decisions", "time", "how"}
    assert wanted <= page.ids


def test_sections_without_data_are_left_out():
    page = Page(render_report(title="t", environment=Environment()))
    assert page.ids & {"answer", "sweep", "compare", "timeline", "tradeoff", "decisions", "time"} == set()
    assert "how" in page.ids


def test_a_profile_alone_has_a_timeline_and_no_answer(case):
    page = Page(render_report(title="t", environment=ENVIRONMENT, step=case.step, before=case.before))
    assert "timeline" in page.ids
    assert "answer" not in page.ids


def test_nothing_is_loaded_from_elsewhere(case):
    page = Page(render(case, sweep=sweep_rows(), compare=compare_rows()))
    assert [a for a in page.addresses if not a.startswith(("#", "data:"))] == []


def test_names_from_models_are_only_names():
    case = make_case(3, module=EVIL.replace("{", "{{") + "{layer}")
    evil = replace(case.solution.decisions[0], name=EVIL, reason=EVIL, method=EVIL)
    solution = replace(case.solution, decisions=(evil, *case.solution.decisions[1:]), notes=(EVIL,))
    point = replace(case.tradeoff[-1], recomputed=(EVIL,))
    measurement = replace(measurement_of(solution, exact=False), differences=(EVIL,))
    text = render(
        case,
        title=EVIL,
        solution=solution,
        tradeoff=(point,),
        measurement=measurement,
        environment=Environment(command=EVIL, date=EVIL, machine=EVIL, versions=((EVIL, EVIL),)),
        sweep=[replace(row, status=SweepStatus.FAILED, why=EVIL) for row in sweep_rows()],
        compare=[replace(row, method=EVIL, why=EVIL) for row in compare_rows()],
    )
    page, plain = Page(text), Page(render(case, sweep=sweep_rows(), compare=compare_rows()))
    assert len(page.scripts) == len(plain.scripts)
    assert page.handlers == []
    assert page.tags - plain.tags <= {"ul", "li"}
    data = next(script for script in page.scripts if '"kinds"' in script[:20])
    assert json.loads(data)["timeline"]["modules"]["table"][1].startswith("</script>")


def test_only_the_shipped_scripts_may_run(case):
    text = render(case)
    policy = re.search(r'Content-Security-Policy" content="([^"]*)"', text)
    assert policy
    scripts = policy[1].split("script-src")[1]
    assert scripts.count("sha256-") == len(Page(text).scripts) - 1
    assert "unsafe" not in scripts


def test_a_large_step_stays_small():
    case = make_case(174, num_points=50)
    assert len(case.step.nodes) >= 4000
    assert len(case.solution.decisions) >= 620
    text = render(case, sweep=sweep_rows(), compare=compare_rows())
    assert len(text.encode()) < 2_000_000


def test_the_same_input_gives_the_same_page(case):
    assert render(case) == render(make_case(6))


def test_verdicts(case):
    solution, measured = case.solution, case.measurement
    assert plan_verdict(solution, measured).tone == "good"
    assert plan_verdict(solution, measured).headline.startswith("Fits: ")
    assert "simulated" in plan_verdict(solution, None).headline
    assert plan_verdict(solution, measurement_of(solution, exact=False)).tone == "bad"
    # The budget holds in simulation, but a measurement says otherwise: the measurement counts.
    tight = replace(solution, budget_bytes=solution.peak_bytes)
    assert plan_verdict(tight, None).tone == "warn"
    assert plan_verdict(tight, measured).headline.startswith("Does not fit")
    assert sweep_verdict(sweep_rows()).headline.startswith(
        "Fits up to batch size 16 with the plan, 8 without"
    )
    shares = [replace(row, budget_bytes=int(0.7 * row.peaks[0])) for row in sweep_rows()]
    assert sweep_verdict(shares).headline == "4 of 5 batch sizes fit their own budget with the plan"
    alone = [replace(row, status=SweepStatus.PLAN_MEASURED, exact=None) for row in sweep_rows()[:1]]
    assert sweep_verdict(alone).why == "1 of 1 sizes ran with the plan only, and were not compared."
    assert sweep_verdict([replace(r, exact=False) for r in sweep_rows()]).tone == "bad"


def test_verdicts_do_not_say_more_than_was_found(case):
    solution = case.solution
    too_small = [
        replace(r, status=SweepStatus.TOO_SMALL, why="lowest reachable peak 1 B") for r in sweep_rows()[:1]
    ]
    assert sweep_verdict(too_small).why == "1 of 1 sizes have no plan for their budget."
    unlike = replace(measurement_of(solution, exact=False), recompute_exact=True)
    assert "without any recompute, too" in plan_verdict(solution, unlike).why
    assert plan_tiles(solution, unlike)[-1].note.startswith("recompute exact, unlike eager")
    assert "430.0 MiB with auto" in compare_verdict(compare_rows()).headline
    assert compare_verdict(compare_rows()[2:4]).tone == "bad"


def test_wrong_results_come_first_and_a_time_only_where_it_is_known():
    rows = compare_rows()
    verdict = compare_verdict(rows)
    assert verdict.tone == "warn"
    assert verdict.headline.startswith("Wrong results, without an error: partitioner 0.5. Lowest exact peak")
    assert verdict.why == "Crashed: budget 0.0."
    assert "times the time" not in verdict.headline
    timed = [replace(row, noise=0.02) if row.method == "auto" else row for row in rows]
    assert compare_verdict(timed).headline.endswith("with auto at 1.12 times the time")
    noisy = [replace(row, noise=0.2) if row.method == "auto" else row for row in rows]
    assert "times the time" not in compare_verdict(noisy).headline


def test_a_floor_that_nobody_searched_for_is_not_told(case):
    solution = replace(case.solution, floor_bytes=None, budget_bytes=1)
    assert "lowest" not in plan_verdict(solution, None).why.lower() and "lowest peak" not in render(
        case, solution=solution
    )
    assert "lowest" in plan_verdict(replace(solution, floor_bytes=2), None).why.lower()


def test_verdicts_go_by_the_status_and_never_by_its_words():
    odd = [replace(row, status=SweepStatus.FAILED, why="does not fit") for row in sweep_rows()[:1]]
    assert sweep_verdict(odd).why == "1 of 1 sizes failed."
    liar = replace(compare_rows()[2], why="exact")
    assert not liar.exact and compare_verdict([liar]).tone == "bad"


def noisy(measurement, *, noise):
    """The same with the plan 5 % slower, and timings that are off by `noise`."""
    slower = replace(measurement.planned, seconds_median=measurement.baseline.seconds_median * 1.05)
    return replace(measurement, planned=slower, noise=noise)


@pytest.mark.parametrize(
    ("noise", "value", "note"),
    [
        (None, "+5.0 %", "measured; "),
        (0.04, "+5.0 %", "measured ± 4.0 points; "),
        (
            0.06,
            "simulated",
            "simulated; the machine was too busy to measure it: +5.0 % (noise: ± 6.0 %)",
        ),
    ],
)
def test_the_time_added_says_when_it_is_noise(case, noise, value, note):
    found = noisy(case.measurement, noise=noise)
    tile = next(tile for tile in plan_tiles(case.solution, found) if tile.label == "Time added")
    simulated = style.percent(case.solution.overhead)
    assert tile.value == (simulated if value == "simulated" else value) and tile.note.startswith(note)
    assert style.HOW_TIMED in render(case, measurement=found)


def test_a_measured_time_that_is_noise_is_no_ring_of_the_curve(case):
    point = TradeoffPoint(
        peak_bytes=90,
        recompute_seconds=0.1,
        measured_peak_bytes=91,
        measured_overhead=0.06,
        measured_noise=0.01,
    )
    assert style.measured_place(point) == (91, 0.06)
    assert style.measured_place(replace(point, measured_noise=0.7)) is None
    assert style.measured_place(replace(point, measured_overhead=None)) is None
    noisy_point = replace(point, measured_noise=0.7)
    assert "rings are measured" in render(case, measurement=None, tradeoff=[point])
    assert "rings are measured" not in render(case, measurement=None, tradeoff=[noisy_point])


def test_little_time_added_is_told_where_the_noise_is_small(case):
    """Nobody needs to know whether it is +0.5 % or +1.5 %."""
    slower = replace(
        case.measurement.planned, seconds_median=1.005 * case.measurement.baseline.seconds_median
    )
    tiles = plan_tiles(case.solution, replace(case.measurement, planned=slower, noise=0.012))
    tile = next(tile for tile in tiles if tile.label == "Time added")
    assert tile.value == "+0.5 %" and "± 1.2 points" in tile.note and not tile.tone
    assert style.added(0.005, 0.012) == "+0.5 % (noise: ± 1.2 %)"


def test_a_large_change_does_not_excuse_any_noise():
    assert style.added(1.4, 0.2) == "+140.0 %"
    assert style.added(1.4, 0.62) == "+140.0 % (noise: ± 62.0 %)"


def test_noise_is_shown_beside_every_time_added(case):
    rows = [replace(row, noise=0.2) for row in sweep_rows()]
    methods = [replace(row, noise=0.2) for row in compare_rows()]
    points = [replace(point, measured_noise=0.5) for point in case.tradeoff]
    page = render_report(
        title="t", environment=ENVIRONMENT, sweep=rows, compare=methods, tradeoff=points, step_seconds=1.0
    )
    assert page.count("+7.5 % (noise: ± 20.0 %)") == 6 and "(noise: ± 50.0 %)" in page
    # × 1.34 is further from 1 than the noise, × 1.10 and × 1.12 are not
    assert page.count("± 0.20") == 3 and "× 1.34</td>" in page


def test_tiles_say_what_is_simulated(case):
    simulated = {tile.label: tile for tile in plan_tiles(case.solution, None)}
    assert "simulated" in simulated["Peak memory"].note
    assert simulated["Results"].value == "not compared"
    measured = {tile.label: tile for tile in plan_tiles(case.solution, case.measurement)}
    assert measured["Peak memory"].note.startswith("measured")
    assert measured["Results"].value == "exact"


def test_times_add_up(case):
    order = case.after.runs
    for rows in (
        times.by_region(case.step, order),
        times.by_op(case.step, order, limit=3),
        times.by_module(case.step, order, limit=5),
    ):
        assert sum(row.seconds for row in rows) == pytest.approx(case.after.seconds)
    recompute = times.by_region(case.step, order)[-1]
    assert recompute.name == "recompute"
    assert recompute.seconds == pytest.approx(case.after.added_seconds)


def test_the_curve_opens_on_the_plan_that_was_made(case):
    """The nearest plan of the curve is above the budget: the plan itself stands beside the curve."""
    near = replace(case.tradeoff[3], peak_bytes=case.solution.budget_bytes + 1)
    for curve, on_curve in (((*case.tradeoff, near), False), (tradeoff_points([case.solution]), True)):
        points = with_made(curve, case.solution, case.measurement)
        made = made_index(points, case.solution)
        assert made is not None and points[made].peak_bytes == case.solution.peak_bytes
        assert len(points) == len(curve) + (not on_curve)
        assert points[made].measured_peak_bytes == case.measurement.planned.measured_peak_bytes
        data = next(s for s in Page(render(case, tradeoff=curve)).scripts if '"kinds"' in s[:20])
        found = json.loads(data)["tradeoff"]
        assert (found["selected"], found["made"], found["made_on_curve"]) == (made, made, on_curve)
    assert made_index(case.tradeoff, None) is None and with_made((), case.solution, None) == []


def test_what_costs_nothing_is_told(case):
    baseline, points = case.solution.baseline_peak_bytes, tradeoff_of(case.step, case.solution, 40)
    text = free_text(points, case.step.seconds, baseline_bytes=baseline)
    lowest = free_peak(points, case.step.seconds)
    cost = {point.peak_bytes: point.recompute_seconds for point in points}
    assert lowest < baseline and 0 < cost[lowest] <= 0.001 * case.step.seconds
    assert all(s > 0.001 * case.step.seconds for peak, s in cost.items() if peak < lowest)
    assert text.startswith(f"{style.size(baseline).split()[0]} → {style.size(lowest)} for free")
    assert text.partition(":")[0] in render(case, tradeoff=points)
    dear = [replace(point, recompute_seconds=1.0) for point in points]
    assert free_text(dear, 1.0, baseline_bytes=baseline) == "" == free_text((), 1.0)
    assert "for free" not in render(case, tradeoff=dear)


def test_the_page_says_how_to_use_the_plan(case):
    text = render(case, plan_file="out/it's.json")
    assert "lowtide.load_plan(&#34;out/it&#39;s.json&#34;).apply(model)" in text
    stepping = replace(case.solution, step_in_backward=True)
    assert ".apply(model, optimizer=optimizer)" in render(case, solution=stepping, plan_file="p.json")
    again = f"lowtide.checkpoint(model, batch, budget={case.solution.budget_bytes}, optimizer=optimizer)"
    assert again in render(case)


def test_modules_that_differ_in_their_numbers_are_one_row(case):
    rows = by_module(case.solution.decisions)
    assert sum(row.total_bytes for row in rows) == sum(d.nbytes for d in case.solution.decisions)
    assert sum(row.seconds for row in rows) == pytest.approx(sum(d.seconds for d in case.solution.decisions))
    relus = next(row for row in rows if row.changed_bytes)
    assert "*" in relus.path and len(relus.members) > 1 and relus.fates[0][0] == RECOMPUTED
    assert relus.nbytes == tuple(map(sum, zip(*(member.nbytes for member in relus.members), strict=True)))
    assert [row.changed_bytes for row in rows] == sorted((row.changed_bytes for row in rows), reverse=True)
    lines = module_lines(case.solution.decisions, limit=1)
    assert lines[0].startswith(relus.path) and "recomputed" in lines[0]


def test_a_packed_activation_is_neither_kept_nor_recomputed(case):
    first = case.solution.decisions[0]
    packed = replace(first, action=Action.RETAINED, held_bytes=first.nbytes // 8, method="bits")
    away = replace(first, action=Action.OFFLOAD, held_bytes=0)
    fates = [fate_of(decision) for decision in (packed, away, replace(packed, held_bytes=first.nbytes))]
    assert fates == ["packed", "offloaded", "kept"]
    assert pattern_of("layers.0.block10.1") == "layers.*.block10.*"


def test_modules_are_told_apart_at_a_useful_depth(case):
    names = [row.name for row in times.by_module(case.step, case.after.runs, limit=8)]
    assert len(names) <= 8
    assert {"encoder.stages.0", "encoder.stages.3"} <= {".".join(name.split(".")[:3]) for name in names}


def test_budgets_with_the_same_plan_give_one_point(case):
    other = replace(case.solution, peak_bytes=case.solution.peak_bytes - 1)
    points = tradeoff_points([other, case.solution, case.solution])
    assert [p.peak_bytes for p in points] == [case.solution.peak_bytes, other.peak_bytes]
    again = {d.name for d in case.solution.decisions if d.action == "RECOMPUTE"}
    assert again
    assert set(points[0].recomputed) == again


def test_sources_leave_out_where_packages_are_installed():
    assert style.short_source("/home/me/.venv/lib/site-packages/a/b.py:7") == "a/b.py:7"
    assert style.short_source("models/mine.py:7") == "models/mine.py:7"


def test_numbers_read_well():
    assert [style.size(n) for n in (None, 0, 1536, 10**9, 3 * 2**30)] == [
        "–", "0 B", "1.5 KiB", "953.7 MiB", "3.00 GiB",
    ]  # fmt: skip
    assert [style.percent(x) for x in (None, 0.0622, -0.38)] == ["–", "+6.2 %", "−38.0 %"]
    assert [style.duration(x) for x in (None, 2.5, 0.25, 0.0025, 4e-6)] == [
        "–", "2.50 s", "250 ms", "2.5 ms", "4.0 µs",
    ]  # fmt: skip
