"""One self-contained HTML page: no network, no fonts, no images, nothing to install.

The template escapes all text that comes from models (names of modules, nodes, files, error messages). The
page's own policy runs only the scripts shipped here.
"""

from collections.abc import Sequence
from typing import Any

from lowtide.errors import BudgetTooSmall
from lowtide.facts import Action, Activation, Decision, Region, Solution, Step
from lowtide.planning.simulate import Timeline
from lowtide.report import style, times
from lowtide.report.answer import (
    compare_verdict,
    free_text,
    lever_rows,
    plan_tiles,
    plan_verdict,
    refused_verdict,
    sweep_verdict,
    unfinished_verdict,
)
from lowtide.report.explanation import pack_around
from lowtide.report.module_summary import FATES, by_module
from lowtide.report.page_packing import script_json
from lowtide.report.page_parts import render_page
from lowtide.report.payload import WITH, WITHOUT, made_index, page_data, with_made
from lowtide.report.results import CompareRow, Environment, Measurement, SweepRow, TradeoffPoint
from lowtide.report.times import store_use

STORE_PICTURE = (1000, 180)
"""Width and height of the picture of transfers."""

_SCRIPTS = (
    *("theme.js", "decode.js", "copy.js", "live.js", "timeline.js", "tradeoff.js"),
    *("table.js", "around.js"),
)


def render_report(
    *,
    title: str,
    environment: Environment,
    step: Step | None = None,
    before: Timeline | None = None,
    after: Timeline | None = None,
    solution: Solution | None = None,
    activations: Sequence[Activation] = (),
    measurement: Measurement | None = None,
    tradeoff: Sequence[TradeoffPoint] = (),
    without_offload: Sequence[TradeoffPoint] = (),
    sweep: Sequence[SweepRow] = (),
    compare: Sequence[CompareRow] = (),
    step_seconds: float | None = None,
    notes: Sequence[str] = (),
    unfinished: str = "",
    refusal: BudgetTooSmall | None = None,
    plan_file: str = "",
) -> str:
    """The page for the given data; a section without data is left out.

    `before` and `after` are timelines of the baseline and of the plan's schedule. `activations`
    give the sizes of the activations in `tradeoff`; a solution's decisions serve as well.
    `without_offload` is the curve of the same step without its store.
    `step_seconds` is only needed for a trade-off curve without `step` and `solution`. `unfinished` says
    what is missing on a page that is written before the end of the work. `refusal` is of a budget that no
    plan meets. `plan_file` is the plan's own file,
    for the lines that apply it.
    """
    baseline_seconds = step_seconds or (
        solution.step_seconds if solution else before.seconds if before else 0.0
    )
    points = with_made(tradeoff, solution, measurement)
    decisions = sorted(solution.decisions, key=_decision_order) if solution else []
    data = page_data(
        step=step,
        before=before,
        after=after,
        solution=solution,
        tradeoff=points,
        without_offload=without_offload,
        activations=activations or decisions,
        step_seconds=baseline_seconds,
        made_on_curve=made_index(tradeoff, solution) is not None,
    )
    if step is not None and before is not None and solution:
        data["around"] = pack_around(step, solution.schedule.runs, decisions)
    verdicts = [unfinished_verdict(unfinished)] if unfinished else []
    if refusal is not None:
        verdicts.append(refused_verdict(refusal))
    if solution:
        verdicts.append(plan_verdict(solution, measurement))
    if sweep:
        verdicts.append(sweep_verdict(sweep))
    if compare:
        verdicts.append(compare_verdict(compare))
    use = store_use(step, after) if step is not None else None
    modules = by_module(decisions)
    return render_page(
        "report.html",
        scripts=_SCRIPTS,
        title=title,
        environment=environment,
        data=script_json(data),
        verdicts=verdicts,
        levers=[] if refusal is None else lever_rows(refusal),
        tiles=plan_tiles(solution, measurement) if solution else [],
        solution=solution,
        measurement=measurement,
        before=before,
        after=after,
        step=step,
        regions=_regions(step) if step else [],
        tradeoff=points,
        without_offload=without_offload,
        step_seconds=baseline_seconds,
        how_timed=style.HOW_TIMED,
        sweep=sweep,
        sweep_whole=_largest(
            [
                peak
                for row in sweep
                for peak in (row.baseline.peak_bytes, row.planned.peak_bytes, row.budget_bytes)
            ]
        ),
        sweep_slowest=_largest([s.seconds_median for row in sweep for s in (row.baseline, row.planned)]),
        compare=compare,
        compare_whole=_largest([row.peak_bytes for row in compare]),
        decisions=decisions,
        offloads=any(decision.action is Action.OFFLOAD for decision in decisions),
        breakdown=_breakdown(before, after),
        made=made_index(points, solution),
        free=free_text(
            tradeoff,
            baseline_seconds,
            baseline_bytes=solution.baseline_peak_bytes if solution else None,
        ),
        modules=modules,
        fates=FATES,
        shown_fates=[i for i in range(len(FATES)) if any(row.nbytes[i] for row in modules)],
        apply_lines=_apply_lines(solution, plan_file) if solution else "",
        time_groups=_time_groups(step, after if after is not None else before) if step else [],
        time_parts=[(str(part), _PART_COLOURS[part]) for part in times.PARTS],
        notes=list(
            dict.fromkeys((*notes, *(solution.notes if solution else ()), *(step.notes if step else ())))
        ),
        kinds=[(str(kind), style.LABELS[kind], style.COLOURS[kind]) for kind in style.STACK],
        store=use,
        store_lines=use.lines(*STORE_PICTURE) if use else [],
        store_picture=STORE_PICTURE,
        directions=style.DIRECTIONS,
        labels={"before": WITHOUT, "after": WITH},
        colours={"before": style.BEFORE, "after": style.AFTER},
    )


_PART_COLOURS = {str(region): colour for region, colour in style.REGION_COLOURS.items()} | {
    times.RECOMPUTE: style.RECOMPUTE
}


def _decision_order(decision: Decision) -> tuple[bool, int, int, str]:
    return decision.action is Action.RETAINED, -decision.nbytes, decision.creation_rank, decision.name


def _regions(step: Step) -> list[str]:
    present = {node.region for node in step.nodes}
    return [str(region) for region in Region if region in present]


def _apply_lines(solution: Solution, plan_file: str) -> str:
    """Python that trains by the plan: from its file, else planned again for the same budget."""
    optimizer = ", optimizer=optimizer" if solution.step_in_backward or not plan_file else ""
    if plan_file:
        made = f"model = lowtide.load_plan({plan_file!r}).apply(model{optimizer})"
    else:
        budget, planner = solution.budget_bytes, solution.planner
        chosen = "" if planner == "auto" else f", planner={planner!r}"
        made = f"model = lowtide.checkpoint(model, batch, budget={budget}{chosen}{optimizer})"
    return f"import lowtide\n\n{made}  # then train as before"


def _largest(values: Sequence[float | None]) -> float:
    return max((value for value in values if value is not None), default=0) or 1


def _breakdown(before: Timeline | None, after: Timeline | None) -> list[dict[str, Any]]:
    """Bytes by kind at the peak of each timeline."""
    rows = []
    for key, timeline in (("before", before), ("after", after)):
        if timeline is not None:
            at = timeline.peak_position
            parts = [int(timeline.bytes_by_kind[kind][at]) for kind in style.STACK]
            rows.append({"run": key, "peak": timeline.peak_bytes, "node": timeline.peak_node, "parts": parts})
    return rows


def _time_groups(step: Step, timeline: Timeline | None) -> list[tuple[str, list[times.TimeRow]]]:
    if timeline is None:
        return []
    runs = timeline.runs
    return [
        ("By region", [*times.by_region(step, runs), *times.waiting(timeline)]),
        ("By op", times.by_op(step, runs)),
        ("By module", times.by_module(step, runs)),
    ]
