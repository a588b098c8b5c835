"""lowtide next to other methods to save memory, measured on the same step in the same way.

The other methods run first; their peaks are the budgets of lowtide's planners.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from typing import Any

from lowtide.errors import BudgetTooSmall, FreshProcessError
from lowtide.experiments.contenders import Contender, NotApplicable, plan_method
from lowtide.experiments.machine import check_memory
from lowtide.experiments.trial import ContenderTrial, try_method
from lowtide.profiles import Profile
from lowtide.report.results import CompareRow, Results
from lowtide.report.style import size
from lowtide.zoo.targets import TargetSpec

MEMORY_BUDGETS = (0.9, 0.7, 0.5, 0.3, 0.1, 0.0)
PLANNERS = ("mu-two", "auto")
LEAST_RUNS = 3
"""Fewer runs have no known noise, and no time is claimed of them."""
NEAR = 1e-5
ALIKE = 0.005
"""Peaks of two other methods that differ by less than this share are one budget: the lower."""
EAGER = Contender(name="none (eager)", kind="eager")
BLOCKS = Contender(name="checkpoint per block", kind="blocks")
REGIONS = Contender(name="torch_remat per block", kind="regions")
COMPILED = Contender(name="torch.compile", kind="inductor")


@dataclass(frozen=True, slots=True, kw_only=True)
class MethodResult(CompareRow):
    """One line of the comparison. `kind` is the method's; `first_difference` names a tensor.

    `budget_bytes`, `predicted_peak_bytes` and `predicted_overhead` are those of lowtide's own plans;
    `predicted_bound`: no plan in that budget adds a smaller share of the baseline's time.
    """

    kind: str
    first_difference: str = ""
    budget_bytes: int | None = None
    predicted_peak_bytes: int | None = None
    predicted_overhead: float | None = None
    predicted_bound: float | None = None


def rivals(memory_budgets: Sequence[float] = MEMORY_BUDGETS, *, executor: str = "eager") -> list[Contender]:
    """Everything but lowtide; torch_remat where it is installed."""
    partitioner = [
        Contender(name=f"partitioner {budget:g}", kind="partitioner", memory_budget=budget)
        for budget in memory_budgets
    ]
    inductor = [
        Contender(name=f"torch.compile {budget:g}", kind="inductor", memory_budget=budget)
        for budget in memory_budgets
    ]
    compiled = [COMPILED, *inductor] if executor == "inductor" else []
    regions = [REGIONS] if find_spec("torch_remat") is not None else []
    return [EAGER, BLOCKS, *regions, *partitioner, *compiled]


def compare(
    source: TargetSpec,
    profile: Profile,
    *,
    executor: str = "eager",
    timed_runs: int = 5,
    memory_budgets: Sequence[float] = MEMORY_BUDGETS,
    planners: Sequence[str] = PLANNERS,
    budgets: Sequence[int] = (),
    with_rivals: bool = True,
    working: Callable[[str], AbstractContextManager[None]] = lambda _: nullcontext(),
) -> Iterator[MethodResult]:
    """One method after the other, each in a fresh process. NotEnoughMemory where eager does not fit.

    `planners` get the `budgets`; without any, the peaks that other methods reach. Without rivals, eager is
    the only other method.
    """
    check_memory(profile.step, peak_bytes=profile.peak_bytes, what="the step without a plan")
    found: list[MethodResult] = []
    for method in rivals(memory_budgets, executor=executor) if with_rivals else [EAGER]:
        with working(f"measuring {method.name}"):
            found.append(_try(source, method, timed_runs))
        yield found[-1]
    for budget_bytes in budgets or budgets_of(found, floor_bytes=profile.floor_bytes):
        pairs = [(planner, "eager") for planner in planners]
        if executor != "eager":
            pairs.append(("auto", executor))
        for planner, runs_by in pairs:
            name = planner if runs_by == "eager" else f"{planner}, {runs_by}"
            with working(f"measuring {name} at {size(budget_bytes)}"):
                result = _plan(
                    source, profile, name, planner, runs_by, budget_bytes=budget_bytes, timed_runs=timed_runs
                )
            yield result


def budgets_of(found: Sequence[MethodResult], *, floor_bytes: int) -> list[int]:
    """The peaks of other methods, highest first: checkpoints by block, and the partitioner at its lowest.

    Where no peak is below eager's, the budget is the floor of lowtide's plans. The floor also replaces a peak
    that is lower by at most the share `NEAR`: predictions reserve a few scalars beside a graph.
    """
    eager = next((result.peak_bytes for result in found if result.kind == "eager"), None)
    budgets = set()
    for kind in ("blocks", "regions", "partitioner"):
        peaks = [result.peak_bytes for result in found if result.kind == kind and result.peak_bytes]
        if peaks and (eager is None or min(peaks) < eager):
            is_near = min(peaks) < floor_bytes <= min(peaks) * (1 + NEAR)
            budgets.add(floor_bytes if is_near else min(peaks))
    alike = {higher for higher in budgets if any(0 < higher - lower < ALIKE * higher for lower in budgets)}
    return sorted(budgets - alike, reverse=True) or [floor_bytes]


def _try(source: TargetSpec, method: Contender, timed_runs: int, **predicted: Any) -> MethodResult:
    try:
        trial = try_method(source, method, timed_runs=timed_runs)
    except FreshProcessError as error:
        text = " ".join(str(error).split())
        if error.kind == NotApplicable.__name__:
            verdict, why = Results.NOT_APPLICABLE, text
        else:
            verdict, why = Results.CRASHED, f"{error.kind}: {text}" if error.kind else text
        return MethodResult(method=method.name, kind=method.kind, verdict=verdict, why=why, **predicted)
    verdict, why = trial.judgement
    is_eager = method.kind == "eager"
    return MethodResult(
        method=method.name,
        kind=method.kind,
        verdict=verdict,
        why=why,
        peak_bytes=trial.peak_bytes,
        time_ratio=1.0 if is_eager else trial.time_ratio,
        noise=None if is_eager or timed_runs < LEAST_RUNS else trial.noise,
        first_difference=_first(trial),
        **predicted,
    )


def _first(trial: ContenderTrial) -> str:
    if not trial.mistakes:
        return ""
    first = next((mistake for mistake in trial.mistakes if mistake.wrong), trial.mistakes[0])
    return f"{first.name}, step {first.step}: relative error {first.error:.2g}"


def _plan(
    source: TargetSpec,
    profile: Profile,
    what: str,
    planner: str,
    executor: str,
    *,
    budget_bytes: int,
    timed_runs: int,
) -> MethodResult:
    name = f"{what} ≤ {size(budget_bytes)}"
    try:
        plan = profile.plan(budget_bytes, planner, executor=executor)
    except BudgetTooSmall as error:
        return MethodResult(
            method=name,
            kind="plan",
            verdict=Results.NOT_REACHED,
            why=f"lowest peak {size(error.floor_bytes)}",
        )
    return _try(
        source,
        plan_method(name, plan),
        timed_runs,
        budget_bytes=budget_bytes,
        predicted_peak_bytes=plan.peak_bytes,
        predicted_overhead=plan.overhead,
        predicted_bound=_share(plan.lower_bound_seconds, profile.step_seconds),
    )


def _share(seconds: float | None, whole: float) -> float | None:
    return seconds / whole if seconds is not None and whole else None


def result_to_dict(result: MethodResult) -> dict[str, Any]:
    return asdict(result)
