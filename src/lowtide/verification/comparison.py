"""Train with a plan and without it, from the same start, and compare the state after every step.

Losses, gradients, buffers, parameters and the random state are compared with `torch.equal`. Some models
take another path of their code during capture. For these, the captured graph also runs without recompute,
which shows whether the plan causes the differences from eager.

Eager is compared with itself first, over one step: the same ops run in every step. Where the plan differs
from eager, eager trains some more times, since two runs of a nondeterministic op are often equal by luck.
`eager_noise` judges the plan where eager differs from itself.
"""

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from lowtide.errors import PlanMismatch
from lowtide.facts.serial import solution_from_dict
from lowtide.plans import Plan, check_identity
from lowtide.runtime.apply import apply_plan
from lowtide.runtime.call_schedules import Schedules
from lowtide.runtime.executor import EAGER_OPS, Executor, executor_named
from lowtide.runtime.runner import Runner, attach, install, remove, runner_of
from lowtide.torch_compat.dispatch import make_first_calls
from lowtide.trace.identity import identify
from lowtide.trace.model_call import split_batch
from lowtide.trace.step_device import device_of
from lowtide.verification.eager_noise import Judgement, judge
from lowtide.verification.measure_step import MOST_SECONDS, Timing, time_steps, train_step
from lowtide.verification.rounding import Rounding, measure_rounding
from lowtide.verification.trained_steps import Difference, Start, differences, record, results_in
from lowtide.zoo.targets import Target, TargetSpec

COMPARED_STEPS = 3
MORE_TRAININGS = 4
"""How often eager trains again before a difference is the plan's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """`differences` from eager, the first one first; empty when all is equal to the last bit.

    An executor with other bits than eager is compared with itself without recompute; `from_eager` says how
    far these results are from eager's. `eager_differences` are those of eager from itself, and
    `nondeterministic_ops` cause them; `differences` are then the plan's alone, compared with the setting
    `deterministic_with`, or beyond eager's own differences where no setting helps.
    `rounding` is set for a plan that rounds: `differences` are then those that rounding does not explain.
    """

    differences: tuple[str, ...]
    recompute_exact: bool
    timings: dict[str, Timing]
    from_eager: str = ""
    eager_differences: tuple[str, ...] = ()
    nondeterministic_ops: tuple[str, ...] = ()
    deterministic_with: str = ""
    rounding: Rounding | None = None


def planned(target: Target, *, solution: dict[str, Any]) -> Target:
    """The target with its plan applied; PlanMismatch where the plan is for another target."""
    plan = Plan(solution_from_dict(solution))
    check_identity(plan, identify(target.model, split_batch(target.batch)))
    model = apply_plan(plan, target.model, optimizer=target.optimizer)
    return replace(target, model=model, holds_outputs=plan.solution.holds_outputs)


def looped(target: Target, *, solution: dict[str, Any]) -> Target:
    """The target without its plan, in the loop of the plan."""
    return replace(target, holds_outputs=solution_from_dict(solution).holds_outputs)


def compare(
    *,
    source: Target | TargetSpec,
    solution: dict[str, Any],
    timed_runs: int | None,
    most_seconds: float = MOST_SECONDS,
    steps: int = COMPARED_STEPS,
) -> Comparison:
    """Train eagerly and by the plan, from the same start, and compare every step; then time both in turn.

    `timed_runs` and `most_seconds` are those of `time_steps`; none for 0 runs.
    """
    target = source.load() if isinstance(source, TargetSpec) else source
    with tempfile.TemporaryDirectory(prefix="lowtide-") as folder:
        make_first_calls()
        trainings = Trainings(target, solution, Path(folder), steps)
        start = Start(target)
        if solution_from_dict(solution).rounds:
            return _compared_up_to_rounding(trainings, start, timed_runs, most_seconds)
        from_eager = trainings.from_eager(start)
        expected = trainings.recorded(start)
        noise = trainings.of_reference(start, expected[:1])
        found = trainings.of_plan(start, expected)
        for _ in range(MORE_TRAININGS):
            if found and not noise:
                noise = trainings.of_reference(start, expected)
        if noise:
            judged = judge(trainings, start, noise)
        else:
            judged = Judgement(found, recompute_exact=not found or trainings.is_recompute_exact(start))
        planned(target, solution=solution)
        start.restore()
    return Comparison(
        differences=tuple(map(str, judged.differences)),
        recompute_exact=judged.recompute_exact,
        timings={} if timed_runs == 0 else time_both(target, timed_runs, most_seconds),
        from_eager=from_eager,
        eager_differences=tuple(map(str, noise)),
        nondeterministic_ops=judged.ops,
        deterministic_with=judged.deterministic_with,
    )


def _compared_up_to_rounding(
    trainings: "Trainings", start: Start, timed_runs: int | None, most_seconds: float
) -> Comparison:
    """The comparison of a plan that rounds: one step, and how far apart the results are."""
    target, folder = trainings.target, trainings.folder
    eager = trainings.recorded(start, steps=1)
    planned(target, solution=trainings.solution)
    found = record(target, start, folder / "planned", 1)
    check_graphs(target, trainings.solution)
    remove(target.model)
    rounding, differences = measure_rounding(target, start, found, eager)
    planned(target, solution=trainings.solution)
    start.restore()
    return Comparison(
        differences=tuple(differences),
        recompute_exact=False,
        timings={} if timed_runs == 0 else time_both(target, timed_runs, most_seconds),
        rounding=rounding,
    )


class Trainings:
    """Trainings of one target from a common start: by the plan, and by what the plan is compared with.

    That reference is eager; for a compiled plan, the compiled graphs without recompute.
    """

    def __init__(self, target: Target, solution: dict[str, Any], folder: Path, steps: int) -> None:
        self.target, self.solution, self.folder, self.steps = target, solution, folder, steps
        self.executor = executor_named(solution_from_dict(solution).executor)

    def from_eager(self, start: Start) -> str:
        """How far the compiled reference is from eager; empty where the reference is eager."""
        if self.executor is EAGER_OPS:
            return ""
        remove(self.target.model)
        eager = record(self.target, start, self.folder / "eager", 1)
        return _distance(self.recorded(start, steps=1), eager)

    def recorded(self, start: Start, *, steps: int | None = None) -> list[Path]:
        """The reference's results, on disk."""
        with self._reference():
            return record(self.target, start, self.folder / "expected", steps or self.steps)

    def of_reference(self, start: Start, expected: list[Path]) -> list[Difference]:
        """Differences of the reference from itself."""
        with self._reference():
            return differences(self.target, start, expected)

    def of_plan(self, start: Start, expected: list[Path]) -> list[Difference]:
        """Differences of the plan from the reference. PlanMismatch where the plan did not run."""
        planned(self.target, solution=self.solution)
        found = differences(self.target, start, expected)
        check_graphs(self.target, self.solution)
        remove(self.target.model)
        return found

    def is_recompute_exact(self, start: Start) -> bool:
        """Whether the plan equals the captured graphs without recompute."""
        if self.executor is not EAGER_OPS:
            return False  # it was compared with them
        with _without_recompute(self.target, self.solution, self.executor):
            captured = record(self.target, start, self.folder / "captured", self.steps)
        return not self.of_plan(start, captured)

    @contextmanager
    def _reference(self) -> Iterator[None]:
        remove(self.target.model)
        if self.executor is EAGER_OPS:
            yield
            return
        with _without_recompute(self.target, self.solution, self.executor):
            yield


def baseline_schedules(solution: dict[str, Any]) -> Schedules:
    """Schedules without recompute, for the same gradients as a plan."""
    found = solution_from_dict(solution)
    return Schedules(found.graphs, found.gradient_strides)


@contextmanager
def _without_recompute(target: Target, solution: dict[str, Any], executor: Executor) -> Iterator[None]:
    """Run the captured graphs without recompute inside the block."""
    install(Runner(target.model, baseline_schedules(solution), executor=executor))
    try:
        yield
    finally:
        remove(target.model)


def _distance(results: list[Path], eager: list[Path]) -> str:
    """The distance of the first step's results from eager's, in words."""
    seen, wanted = (results_in(files[0]) for files in (results, eager))
    off = {
        name: (seen[name].double() - wanted[name].double()).abs().max().item()
        for name in wanted
        if wanted[name].is_floating_point() and wanted[name].numel()
    }
    name = max(off, key=off.__getitem__)
    if not off[name]:
        return "equal to eager training in the first step"
    return f"up to {off[name]:.1g} from eager training in the first step ({name})"


def check_graphs(target: Target, solution: dict[str, Any]) -> None:
    """Raise PlanMismatch where the plan did not run: changed code gives another graph, planned anew."""
    runner = runner_of(target.model)
    assert runner is not None
    if runner.eager_batch is not None:
        return
    ran = {segment.fingerprint for segment, _, _ in runner.backend.graphs}
    if not ran & {graph.fingerprint for graph in solution_from_dict(solution).graphs}:
        raise PlanMismatch(
            "this plan is for another graph: the model's code or settings, such as autocast, changed since. "
            "Profile and plan again"
        )


def time_both(target: Target, runs: int | None, most_seconds: float) -> dict[str, Timing]:
    """Times of eager steps and of steps by the plan that the model has, in turn."""
    model, runner = target.model, runner_of(target.model)
    assert runner is not None

    def step() -> object:
        return train_step(model, target.batch, target.optimizer, target.loss, within=target.within)

    def eager() -> object:
        remove(model)  # with its observer and its optimizer hooks
        return step()

    def planned() -> object:
        attach(model, runner)
        return step()

    device = device_of(model, target.batch)
    steps = {"eager": eager, "planned": planned}
    timings = time_steps(steps, device=device, runs=runs, most_seconds=most_seconds)
    attach(remove(model), runner)
    return timings
