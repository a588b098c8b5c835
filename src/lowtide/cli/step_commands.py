"""The commands about one training step, in the order of the data flow, and `run`, which is all of them.

- `lowtide profile`: where the memory and the time of a training step go
- `lowtide plan`: which activations to keep and which to recompute, for a budget
- `lowtide verify`: a plan's true peak, and its results against eager training
- `lowtide run`: profile, plan, verify and report in one
"""

import shlex
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import typer

from lowtide.cli.command import OutputOptions, command
from lowtide.cli.exit_codes import UsageError
from lowtide.cli.options import (
    BatchSize,
    Budget,
    Executor,
    ExecutorName,
    Gpus,
    Microbatches,
    On,
    OptionalBatchSize,
    OptionalBudget,
    Pipeline,
    Planner,
    RunFolder,
    SearchMeshes,
    Source,
    TargetText,
    TimedPairs,
)
from lowtide.cli.pipeline_command import pipeline_command
from lowtide.cli.refusals import again, remedies, target_command
from lowtide.cli.search_command import search_command
from lowtide.cli.sources import (
    StepOptions,
    offers,
    on_device,
    open_source,
    profile_target,
    release,
    title_of,
)
from lowtide.cli.terminal import Terminal
from lowtide.errors import BudgetTooSmall, TargetError
from lowtide.facts.gpus import gpu_behind
from lowtide.units import round_up_size
from lowtide.zoo.decoders import DECODERS
from lowtide.zoo.targets import Target, TargetSpec


@command
def profile(
    terminal: Terminal,
    target: TargetText,
    *,
    batch_size: BatchSize,
    step: Annotated[StepOptions, offers("step_in_backward", "offload", "device", "mode")],
    output: OutputOptions,
) -> None:
    """Show where the memory and the time of one training step go, without running it (unless --mode run).

    With -o writes profile.json, node_stats.csv and activation_stats.csv. Exits with 3 when --mode run
    does not fit into this machine's memory.
    """
    from lowtide.cli import output_files as files
    from lowtide.cli.tables import profile_summary, profile_tables

    out = output.claim(files.PROFILE, files.NODES, files.ACTIVATIONS)
    spec = step.spec(target, batch_size)
    measured = profile_target(spec, terminal, step)
    summary = profile_summary(measured, name=on_device(title_of(spec), measured.step.device))
    written = [] if out is None else files.write_profile(out, spec=spec, profile=measured)
    terminal.data(summary)
    terminal.show(*profile_tables(summary))
    if out is not None and not terminal.quiet:
        terminal.note(f"wrote {', '.join(map(str, written))}")
        with terminal.working("looking for the lowest reachable peak"):
            floor_bytes = measured.floor_bytes
        budget = files.budget_to_try(peak_bytes=measured.peak_bytes, floor_bytes=floor_bytes)
        terminal.next_commands(files.plan_command(out, budget=budget))


@command
def plan(
    terminal: Terminal,
    source: Source,
    *,
    budget: OptionalBudget = None,
    planner: Planner = "auto",
    batch_size: OptionalBatchSize = None,
    step: Annotated[StepOptions, offers("ranks", "shard", "device", "step_in_backward", "offload", "rounds")],
    gpus: Gpus = None,
    search: SearchMeshes = False,
    pipeline: Pipeline = None,
    microbatches: Microbatches = None,
    executor: Executor = ExecutorName.EAGER,
    output: OutputOptions,
) -> None:
    """Decide what to recompute so that a step fits into a budget. From a profile.json at once, without torch.

    With -o writes plan.json and ac_decisions.csv. With --search finds the fastest mesh of many GPUs instead,
    estimated; exits with 3 where none fits. With --pipeline plans each stage of a pipeline, in one process;
    exits with 3 where one does not fit.
    """
    whole = {
        "--planner": planner != "auto",
        "--executor": executor is not ExecutorName.EAGER,
        "--output": output.folder is not None,
    }
    if search:
        others = whole | {"--pipeline": pipeline is not None, "--microbatches": microbatches is not None}
        search_command(
            terminal,
            source,
            gpus=None if gpus is None else int(gpus),
            batch_size=batch_size,
            budget=budget,
            step=step,
            others=tuple(name for name, given in others.items() if given),
        )
    if source in DECODERS:
        raise UsageError(f"{source} is a model of --search alone: add --gpus N --device NAME --search")
    if gpus is not None:
        raise UsageError(
            f"--gpus {gpus} is for --search: add it, or say --ranks {gpus} to plan one of so many processes"
        )
    if budget is None:
        raise UsageError("Missing option '--budget': say how much the step may take, as in --budget 8GiB")
    if pipeline is not None or microbatches is not None:
        pipeline_command(
            terminal,
            source,
            stages=None if pipeline is None else int(pipeline),
            microbatches=None if microbatches is None else int(microbatches),
            batch_size=batch_size,
            budget=budget,
            step=step,
            others=tuple(name for name, given in whole.items() if given),
        )
    from lowtide.cli import output_files as files
    from lowtide.cli.tables import plan_summary, plan_tables

    if executor is not ExecutorName.EAGER:
        from lowtide.runtime.executor import executor_named

        executor_named(executor)  # checked before any work
    out = output.claim(files.PLAN, files.DECISIONS)
    held: list[Target] = []
    profile, spec, name = open_source(source, terminal, step, batch_size=batch_size, held=held)
    anew = "" if spec is None or not source.endswith(".json") else target_command(spec, budget)
    with terminal.working("planning"), remedies(terminal, sys.argv, anew=anew):
        made = profile.plan(budget, planner=planner, executor=executor)
    written = [] if out is None else files.write_plan(out, spec=spec, plan=made)
    terminal.data(plan_summary(made.solution, name=name))
    terminal.show(*plan_tables(made.solution, name=name))
    if out is not None:
        terminal.note(f"wrote {', '.join(map(str, written))}")
    if out is not None and step.ranks is None and step.device is None:
        terminal.next_commands(f"lowtide verify {shlex.quote(str(out / files.PLAN))}")


@command
def verify(
    terminal: Terminal,
    plan: Annotated[
        Path, typer.Argument(metavar="PLAN", help="A plan.json of `lowtide plan`.", show_default=False)
    ],
    *,
    timed_runs: TimedPairs = None,
    on: On = None,
    output: OutputOptions,
) -> None:
    """Train without and with a plan in fresh processes: compare to the last bit, measure peaks and times.

    The target is the one that the plan was made for, on its device or another of the same kind (--on). A
    step that only the plan makes small enough for this machine runs with the plan alone, and is not compared.
    With -o writes verification.json.
    Exits with 4 when results differ, with 3 when the peak is above the budget or the machine too small.
    """
    from lowtide.cli.output_files import VERIFICATION, load_plan
    from lowtide.cli.tables import outcome_data, outcome_exit, outcome_tables
    from lowtide.facts.serial import save_json

    out = output.claim(VERIFICATION)
    made, spec = load_plan(plan)
    if spec is None:
        raise TargetError(f"'{plan}' does not say what it was made for: make it with `lowtide plan`")
    spec = _on_its_kind(spec, made.solution.device, on=on)
    with terminal.working(f"verifying {spec.text}, {_timing(timed_runs)}"):
        from lowtide.experiments.measured import run_plan

        outcome = run_plan(spec, made, timed_runs=timed_runs)
    name = on_device(title_of(spec), spec.device or made.solution.device)
    data = outcome_data(outcome, name=name, device=spec.device or made.solution.device)
    if out is not None:
        save_json(out / VERIFICATION, data)
    terminal.data(data)
    terminal.show(*outcome_tables(outcome, budget_bytes=made.budget_bytes, name=name))
    if out is not None:
        terminal.note(f"wrote {out / VERIFICATION}")
    raise typer.Exit(outcome_exit(outcome, budget_bytes=made.budget_bytes))


def _timing(timed_runs: int | None) -> str:
    """How long the steps are timed, for the line about progress."""
    if timed_runs is None:
        return "timing steps until the noise is below 2 points, for 30 s at most (--timed-runs N: N steps)"
    return f"timing {timed_runs} steps of each" if timed_runs else "timing none"


def _on_its_kind(spec: TargetSpec, planned: str, *, on: str | None) -> TargetSpec:
    """The target on the device to verify it on, which must be of the kind that it was `planned` for."""
    from lowtide.zoo.placement import device_named

    where = on or spec.device or "cpu"
    again = f"lowtide plan {shlex.quote(spec.text)} -b {spec.batch_size} --budget SIZE --on {where}"
    if gpu_behind(planned) is not None:
        raise UsageError(f"this plan is estimated for {planned}: plan where the GPU is, as in {again}")
    if on is not None and device_named(on).type != planned.partition(":")[0]:
        raise UsageError(f"this plan is for a step on {planned}, not on {on}: plan there, as in {again}")
    device_named(on or planned)
    return spec if on is None else replace(spec, device=on)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOutput(OutputOptions):
    """A folder in any case."""

    folder: RunFolder = Path("lowtide-out")


@command
def run(
    terminal: Terminal,
    target: TargetText,
    *,
    batch_size: BatchSize,
    budget: Budget,
    planner: Planner = "auto",
    step: Annotated[StepOptions, offers("step_in_backward", "offload", "rounds")],
    executor: Executor = ExecutorName.EAGER,
    timed_runs: TimedPairs = None,
    output: RunOutput,
) -> None:
    """Profile a step, plan it for a budget, verify the plan in fresh processes, and write a report.

    A step that only the plan makes small enough for this machine runs with the plan alone, and is not
    compared. A budget that cannot be met leaves the profile and its report. Exits with 3 when the budget or
    this machine's memory cannot be met, with 4 when results differ.
    """
    from lowtide.cli import output_files as files
    from lowtide.cli import tables
    from lowtide.runtime.executor import executor_named

    executor_named(executor)  # checked before any work
    out = output.claim(*files.FILES)
    assert out is not None
    spec = step.spec(target, batch_size)
    held: list[Target] = []
    profile = profile_target(spec, terminal, step, held=held)
    name = on_device(title_of(spec), profile.step.device)
    summary = tables.profile_summary(profile, name=name)
    terminal.show(*tables.profile_tables(summary))
    written = files.write_profile(out, spec=spec, profile=profile)
    try:
        with terminal.working("planning"), remedies(terminal, sys.argv, folder=out):
            plan = profile.plan(budget, planner=planner, executor=executor)
    except BudgetTooSmall as error:
        written += files.write_refusal(out, profile=profile, name=name, refusal=error)
        terminal.note(f"wrote {', '.join(map(str, written))}; there is no plan")
        terminal.note(f"report: {out / files.REPORT}")
        lowest = round_up_size(error.floor_bytes) + (f" {error.of}" if error.of else "")
        if executor is ExecutorName.EAGER:
            terminal.after_failure.append(files.plan_command(out, budget=lowest, planner=planner))
        else:
            terminal.after_failure.append(again(sys.argv, budget=lowest, force=True))
        raise
    release(held, profile)
    written += files.write_plan(out, spec=spec, plan=plan)
    terminal.show(*tables.plan_tables(plan.solution, name=name))
    with terminal.working(f"verifying in fresh processes, {_timing(timed_runs)}"):
        from lowtide.experiments.measured import run_plan

        outcome = run_plan(spec, plan, timed_runs=timed_runs)
    with terminal.working("writing the report"):
        written += files.write_results(out, profile=profile, plan=plan, outcome=outcome, name=name)
    terminal.show(*tables.outcome_tables(outcome, budget_bytes=plan.budget_bytes, name=name))
    terminal.data(
        {
            "profile": summary,
            "plan": tables.plan_summary(plan.solution, name=name),
            "verification": tables.outcome_data(outcome, name=name, device=profile.step.device),
            "files": [str(path) for path in written],
        }
    )
    terminal.note(f"report: {out / files.REPORT}")
    terminal.next_commands(
        *files.after_run(
            out,
            floor_bytes=profile.floor_bytes,
            step_in_backward=plan.solution.step_in_backward,
            executor=executor,
        )
    )
    raise typer.Exit(tables.outcome_exit(outcome, budget_bytes=plan.budget_bytes))
