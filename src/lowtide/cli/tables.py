"""Profiles, plans and verifications as data for `--json`, and as tables of that data."""

from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

from rich.console import RenderableType
from rich.text import Text

from lowtide.cli.exit_codes import Exit
from lowtide.cli.terminal import Dotted, table
from lowtide.facts import Action, Activation, Decision, Kind, Solution, Step
from lowtide.facts.gpus import gpu_behind
from lowtide.facts.serial import to_dict
from lowtide.planning.simulate import Timeline
from lowtide.profiles import Profile
from lowtide.report.module_summary import FATES, by_module
from lowtide.report.results import relative_increase
from lowtide.report.style import (
    HOW_TIMED,
    LABELS,
    STACK,
    UNKNOWN,
    added,
    duration,
    how_good,
    percent,
    reserved_text,
    short_source,
    size,
)
from lowtide.report.times import by_region
from lowtide.verification.verdict import kept, verdict

if TYPE_CHECKING:
    from lowtide.experiments.measured import Outcome
    from lowtide.verification.verify_plan import Verification


NUM_LARGEST = 10


def profile_summary(profile: Profile, *, name: str) -> dict[str, Any]:
    """Peak, its node, its parts by kind, time by region and the largest activations."""
    step, timeline, found = profile.step, profile.timeline, profile.activations
    largest = sorted(found, key=lambda a: (-a.nbytes, a.creation_rank, a.name))[:NUM_LARGEST]
    return {
        "target": name,
        "device": step.device,
        "num_nodes": len(step.nodes),
        "num_activations": len(found),
        "activation_bytes": sum(activation.nbytes for activation in found),
        "peak_bytes": timeline.peak_bytes,
        "peak": _place(step, timeline),
        "peak_bytes_by_kind": _by_kind(timeline),
        "step_seconds": timeline.seconds,
        "seconds_by_region": {row.name: row.seconds for row in by_region(step, timeline.runs)},
        "num_estimated": sum(node.estimated for node in step.nodes),
        "largest_activations": [_activation(activation) for activation in largest],
        "notes": list(step.notes),
        **({} if step.transfer_speed is None else {"link": asdict(step.transfer_speed)}),
    }


def profile_tables(summary: dict[str, Any]) -> list[RenderableType]:
    peak, place = summary["peak_bytes"], summary["peak"]
    lines = [
        f"{summary['target']}: peak {size(peak)} at '{place['node']}' ({_where(place)})",
        f"{summary['num_nodes']} nodes, {summary['num_activations']} activations of "
        f"{size(summary['activation_bytes'])}, step {duration(summary['step_seconds'])}",
    ]
    if gpu_behind(summary["device"]) is None and summary["num_estimated"]:
        lines.append(f"{summary['num_estimated']} ops too large to time here: scaled from a smaller run")
    if link := summary.get("link"):
        write, read = (size(int(link[f"{way}_bytes_per_second"])) for way in ("write", "read"))
        lines.append(f"{link['store']}: {write}/s written, {read}/s read, past the page cache")
    kinds = [
        (LABELS[Kind(kind)], size(nbytes), _share(nbytes, peak))
        for kind, nbytes in summary["peak_bytes_by_kind"].items()
    ]
    seconds = [
        (region, duration(value), _share(value, summary["step_seconds"]))
        for region, value in summary["seconds_by_region"].items()
    ]
    largest = [
        (a["name"], size(a["nbytes"]), duration(a["idle_seconds"]), _again(a), Dotted(a["module"] or "–"))
        for a in summary["largest_activations"]
    ]
    return [
        *(Text(line) for line in lines),
        Text(),
        table("Memory at the peak", ("kind", "bytes>", "share>"), kinds),
        table("Time by region", ("region", "time>", "share>"), seconds),
        table("Largest activations", ("name", "bytes>", "idle>", "recompute>", "module"), largest),
        *(Text(f"note: {note}") for note in summary["notes"]),
    ]


def plan_summary(solution: Solution, *, name: str) -> dict[str, Any]:
    """Peaks, cost and all decisions of a plan."""
    return {
        "target": name,
        "device": solution.device,
        "planner": solution.planner,
        "budget_bytes": solution.budget_bytes,
        "peak_bytes": solution.peak_bytes,
        "peak_node": solution.peak_node,
        "baseline_peak_bytes": solution.baseline_peak_bytes,
        "floor_bytes": solution.floor_bytes,
        "rounds": list(solution.rounds),
        "floor_bound_bytes": solution.floor_bound_bytes,
        "lower_bound_seconds": solution.lower_bound_seconds,
        "gap": solution.gap,
        "step_seconds": solution.step_seconds,
        "recompute_seconds": solution.recompute_seconds,
        "overhead": solution.overhead,
        "num_recomputed": sum(d.action is Action.RECOMPUTE for d in solution.decisions),
        "decisions": [asdict(decision) for decision in solution.decisions],
        "notes": list(solution.notes),
        **_offload_summary(solution),
        **({} if solution.reserved is None else {"reserved": to_dict(solution.reserved)}),
    }


def plan_tables(solution: Solution, *, name: str) -> list[RenderableType]:
    recomputed, offloaded = (_largest(solution, action) for action in (Action.RECOMPUTE, Action.OFFLOAD))
    saved = solution.peak_bytes / solution.baseline_peak_bytes - 1 if solution.baseline_peak_bytes else None
    figures = [
        ("budget", size(solution.budget_bytes), _reserved_budget(solution)),
        ("predicted peak", size(solution.peak_bytes), f"{percent(saved)}, at '{solution.peak_node}'"),
        *_reserved(solution),
        ("baseline peak", size(solution.baseline_peak_bytes), ""),
        *(
            [("rounds", ",".join(solution.rounds), "not equal to eager to the last bit")]
            if solution.rounds
            else []
        ),
        *_floor(solution),
        (
            "recompute" if solution.offload is None else "time added",
            duration(solution.recompute_seconds),
            f"{percent(solution.overhead)} of the step",
        ),
        *_bound(solution),
        (
            "activations recomputed",
            len(recomputed),
            f"of {len(solution.decisions)}, {size(sum(d.nbytes for d in recomputed))} in all",
        ),
        *_offload(solution, offloaded),
    ]
    head = table(f"Plan for {name} ({solution.planner})", ("", ">", ""), figures)
    tables: list[RenderableType] = [head, *_modules(solution)]
    for action, last, found in (("recomputed", "how", recomputed), ("offloaded", "why", offloaded)):
        if found:
            columns = ("name", "bytes>", "time>", "module", last)
            title = f"Largest activations that are {action} ({min(NUM_LARGEST, len(found))} of {len(found)})"
            tables.append(table(title, columns, [_decision(d) for d in found[:NUM_LARGEST]]))
    return [*tables, *(Text(f"note: {note}") for note in solution.notes)]


def _modules(solution: Solution) -> list[RenderableType]:
    """The modules whose activations do not all stay; a column for each fate that some activation has."""
    rows = by_module(solution.decisions)
    changed = [row for row in rows if row.changed_bytes]
    if not changed:
        return []
    shown = [i for i in range(len(FATES)) if any(row.nbytes[i] for row in changed)]
    title = f"By module ({min(NUM_LARGEST, len(changed))} of {len(changed)} that change)"
    columns = ("module", *(f"{FATES[i]}>" for i in shown), "time added>")
    cells = [
        (
            Dotted(row.path),
            *(size(row.nbytes[i]) if row.nbytes[i] else "" for i in shown),
            duration(row.seconds) if row.seconds else "",
        )
        for row in changed[:NUM_LARGEST]
    ]
    return [table(title, columns, cells)]


def _reserved_budget(solution: Solution) -> str:
    found = solution.reserved
    if found is None or found.budget_bytes is None:
        return ""
    return f"so that at most {size(found.budget_bytes)} are reserved"


def _reserved(solution: Solution) -> list[tuple[str, str, str]]:
    found = solution.reserved
    return [] if found is None else [("predicted reserved", size(found.most_bytes), reserved_text(found))]


def _largest(solution: Solution, action: Action) -> list[Decision]:
    return sorted(
        (decision for decision in solution.decisions if decision.action is action),
        key=lambda d: (-d.nbytes, d.creation_rank, d.name),
    )


def _offload_summary(solution: Solution) -> dict[str, Any]:
    """The offloaded values, if any."""
    if solution.offload is None:
        return {}
    num_offloaded = sum(d.action is Action.OFFLOAD for d in solution.decisions)
    return {"num_offloaded": num_offloaded, "offload": to_dict(solution.offload)}


def _offload(solution: Solution, offloaded: list[Decision]) -> list[tuple[str, object, str]]:
    found = solution.offload
    if found is None:
        return []
    hidden = max(0.0, found.transfer_seconds - found.stall_seconds)
    return [
        (
            "activations offloaded",
            len(offloaded),
            f"to {found.transfer_speed.store}, {size(found.store_bytes)} in all",
        ),
        (
            "transfers",
            duration(found.transfer_seconds),
            f"{duration(hidden)} behind the compute, {duration(found.stall_seconds)} waited for"
            + (f", {duration(found.slowed_seconds)} lost to copies" if found.slowed_seconds else ""),
        ),
    ]


def _floor(solution: Solution) -> list[tuple[str, str, str]]:
    if solution.floor_bytes is None:
        return []
    bound = solution.floor_bound_bytes
    proven = "proven" if solution.is_floor_proven else f"no plan is below {size(bound)}"
    return [("lowest reachable peak", size(solution.floor_bytes), proven if bound is not None else "")]


def _bound(solution: Solution) -> list[tuple[str, str, str]]:
    if solution.lower_bound_seconds is None:
        return []
    return [("no plan adds less than", duration(solution.lower_bound_seconds), how_good(solution.gap))]


def _place(step: Step, timeline: Timeline) -> dict[str, Any]:
    node = step.nodes[timeline.peak_rank]
    return {
        "node": node.name,
        "rank": node.rank,
        "region": node.region,
        "module": node.module,
        "source": node.source,
    }


def _where(place: dict[str, Any]) -> str:
    where = (place["region"], place["module"], short_source(place["source"] or ""))
    return ", ".join(str(word) for word in where if word)


def _by_kind(timeline: Timeline) -> dict[str, int]:
    """Bytes of each kind at the peak; kinds without bytes are left out."""
    parts = {kind: int(timeline.bytes_by_kind[kind][timeline.peak_position]) for kind in STACK}
    return {kind.value: nbytes for kind, nbytes in parts.items() if nbytes}


def _activation(activation: Activation) -> dict[str, Any]:
    return {
        "name": activation.name,
        "nbytes": activation.nbytes,
        "module": activation.module,
        "source": activation.source,
        "idle_seconds": activation.inactive_seconds,
        "recompute_seconds": activation.recompute_seconds,
        "fixed": activation.fixed,
    }


def _again(activation: dict[str, Any]) -> str:
    return "never" if activation["fixed"] else duration(activation["recompute_seconds"])


def _decision(decision: Decision) -> tuple[object, ...]:
    return (
        decision.name,
        size(decision.nbytes),
        duration(decision.seconds),
        Dotted(decision.module or "–"),
        # bytes and time are columns of their own
        decision.reason.partition(": ")[2] if decision.action is Action.RECOMPUTE else decision.reason,
    )


def _share(part: float, whole: float) -> str:
    return f"{100 * part / whole:.1f} %" if whole else "–"


def outcome_data(outcome: "Outcome", *, name: str, device: str) -> dict[str, Any]:
    result = outcome.verification
    if result is None:
        return {
            "target": name,
            "device": device,
            "not_compared": outcome.reason,
            **asdict(outcome.measurement),
        }
    figures = {"fits": result.fits, "overhead": result.overhead, "noise": result.noise}
    return {
        "target": name,
        "device": device,
        **figures,
        **asdict(replace(result, plan=None)),
        "notes": list(result.notes),
    }


def outcome_tables(outcome: "Outcome", *, budget_bytes: int, name: str) -> list[RenderableType]:
    """The measurements without and with the plan, and the verdict in words."""
    if outcome.verification is not None:
        return verification_tables(outcome.verification, name=name)
    planned = outcome.measurement.planned
    lines = [f"{name}: the step without the plan {outcome.reason}"]
    if planned.measured_peak_bytes is None:
        lines.append("nothing was run, since the planned step does not fit into this machine either")
    else:
        lines.append(f"with the plan: {kept(planned.measured_peak_bytes, budget_bytes)}")
        lines.append(f"step: {duration(planned.seconds_median)}")
        lines.append("results: not compared")
    return [Text(line) for line in lines]


def outcome_exit(outcome: "Outcome", *, budget_bytes: int) -> Exit:
    """Wrong results are worse than too much memory."""
    peak_bytes = outcome.measurement.planned.measured_peak_bytes
    if outcome.measurement.exact is False:
        return Exit.RESULTS_DIFFER
    if outcome.verification is not None:
        return Exit.DONE if outcome.verification.fits else Exit.DOES_NOT_FIT
    return Exit.DONE if peak_bytes is not None and peak_bytes <= budget_bytes else Exit.DOES_NOT_FIT


def verification_tables(result: "Verification", *, name: str) -> list[RenderableType]:
    """Two rows in each table, without and with the plan, and the verdict in words."""
    peaks = [
        (
            "baseline",
            size(result.baseline_predicted_peak_bytes),
            size(result.baseline_measured_peak_bytes),
            size(result.baseline_resident_peak_bytes),
            "",
        ),
        (
            "planned",
            size(result.predicted_peak_bytes),
            size(result.measured_peak_bytes),
            size(result.resident_peak_bytes),
            percent(relative_increase(result.baseline_measured_peak_bytes, result.measured_peak_bytes)),
        ),
    ]
    times = [
        ("baseline", _timing(result.baseline_step_timing), ""),
        ("planned", _timing(result.step_timing), added(result.overhead, result.noise)),
    ]
    columns = ("step", "predicted peak>", "measured peak>", "resident peak>", "memory>")
    tables: list[RenderableType] = [table(f"{name}, peak memory", columns, peaks)]
    if result.measured_reserved_bytes is not None:
        tables.append(table(f"{name}, reserved by the allocator", RESERVED, _reserved_rows(result)))
    if result.step_timing is not None:
        tables.append(table(f"{name}, step time", ("step", "time>", "time added>"), times))
        tables.append(Text(HOW_TIMED))
    return [*tables, *(Text(line) for line in verdict(result))]


RESERVED = ("step", "predicted at most>", "measured>", "budget>")


def _reserved_rows(result: "Verification") -> list[tuple[str, str, str, str]]:
    return [
        (
            "baseline",
            size(result.baseline_predicted_reserved_bytes),
            size(result.baseline_measured_reserved_bytes),
            "",
        ),
        (
            "planned",
            size(result.predicted_reserved_bytes),
            size(result.measured_reserved_bytes),
            size(result.reserved_budget_bytes),
        ),
    ]


def _timing(timing: Any) -> str:
    if timing is None:
        return UNKNOWN
    return f"{duration(timing.median_seconds)} ± {duration(timing.spread_seconds / 2)}"
