"""Judge a plan where eager training differs from itself.

Two eager trainings from one state can differ in the last bits: several threads or blocks of a GPU add up in
any order, a library chooses its kernel by a race of clocks. `judge`

1. names the ops: each op of an eager step runs again on the same inputs;
2. looks for a setting with which eager equals itself, and compares the plan with eager under that setting, to
   the last bit;
3. where no setting helps, compares single steps from the same state: what differs in eager's own repetitions
   as well is not the plan's. A gradient that is further off than eager's own repetitions is.
"""

import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

import torch

from lowtide.errors import PlanMismatch
from lowtide.trace.step_device import device_of
from lowtide.verification.measure_step import train_step
from lowtide.verification.repeated_ops import ops_that_differ
from lowtide.verification.trained_steps import GRADIENT, PARAMETER, Difference, Start
from lowtide.zoo.targets import Target

REPEATS = 3
"""A setting helps where eager equals itself so often."""
MOST_REPEATS = 10
"""How often eager repeats a step before a difference is the plan's."""
FURTHER = 10
"""The plan is to blame for a gradient that is so many times as far off as in eager's own repetitions."""

DETERMINISTIC = "torch.use_deterministic_algorithms(True)"
CUBLAS = "CUBLAS_WORKSPACE_CONFIG=:4096:8 in the environment"
NOT_DETERMINISTIC = "does not have a deterministic implementation"


Names = Callable[[], tuple[str, ...]]


class Compared(Protocol):
    """The trainings that are compared."""

    target: Target
    steps: int

    def recorded(self, start: Start, *, steps: int | None = None) -> list[Path]: ...
    def of_reference(self, start: Start, expected: list[Path]) -> list[Difference]: ...
    def of_plan(self, start: Start, expected: list[Path]) -> list[Difference]: ...
    def is_recompute_exact(self, start: Start) -> bool: ...


@dataclass(frozen=True, slots=True)
class Judgement:
    """The differences that are the plan's; `ops` make eager differ from itself, and the setting
    `deterministic_with` makes eager equal to itself, empty where none does."""

    differences: Sequence[Difference]
    recompute_exact: bool
    ops: tuple[str, ...] = ()
    deterministic_with: str = ""


@dataclass(frozen=True, slots=True)
class Setting:
    """A setting of torch under which ops may be deterministic. Inside of `with applied() as ops`, `ops()` are
    the names of ops that have run and that torch has no deterministic kernel for."""

    words: str
    applied: Callable[[], AbstractContextManager[Names]]


def judge(trainings: Compared, start: Start, noise: Sequence[Difference]) -> Judgement:
    """The plan's own differences, where eager has `noise`."""
    found = Judgement((), recompute_exact=True, ops=_ops(trainings.target, start))
    for setting in settings_for(device_of(trainings.target.model, trainings.target.batch)):
        with setting.applied() as without_kernel:
            expected = trainings.recorded(start)
            if any(trainings.of_reference(start, expected) for _ in range(REPEATS)):
                continue
            words, names = setting.words, without_kernel()
            if names:  # torch would raise there
                words = words.replace("(True)", "(True, warn_only=True)")
            found = replace(found, deterministic_with=words, ops=found.ops or names)
            try:
                differences = trainings.of_plan(start, expected)
            except PlanMismatch:
                break  # the model runs other ops under the setting, which the plan is not for
            exact = not differences or trainings.is_recompute_exact(start)
            return replace(found, differences=differences, recompute_exact=exact)
    differences = _beyond_noise(trainings, start)
    return replace(found, differences=differences, recompute_exact=not differences)


def settings_for(device: torch.device) -> list[Setting]:
    """The settings to try, the least change first."""
    settings = []
    if device.type == "cuda" and torch.backends.cudnn.benchmark:
        settings.append(Setting("torch.backends.cudnn.benchmark = False", _without_autotuning))
    words = f"{DETERMINISTIC} and {CUBLAS}" if device.type == "cuda" else DETERMINISTIC
    settings.append(Setting(words, _deterministic))
    if device.type == "cpu" and torch.get_num_threads() > 1:
        settings.append(Setting("torch.set_num_threads(1)", _one_thread))
    return settings


@contextmanager
def _deterministic() -> Iterator[Names]:
    before = torch.get_deterministic_debug_mode()
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        torch.use_deterministic_algorithms(True, warn_only=True)

        def names() -> tuple[str, ...]:
            texts = [str(warning.message) for warning in seen]
            return tuple(dict.fromkeys(text.split()[0] for text in texts if NOT_DETERMINISTIC in text))

        try:
            yield names
        finally:
            torch.set_deterministic_debug_mode(before)


@contextmanager
def _without_autotuning() -> Iterator[Names]:
    before, torch.backends.cudnn.benchmark = torch.backends.cudnn.benchmark, False
    try:
        yield tuple
    finally:
        torch.backends.cudnn.benchmark = before


@contextmanager
def _one_thread() -> Iterator[Names]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield tuple
    finally:
        torch.set_num_threads(before)


def _ops(target: Target, start: Start) -> tuple[str, ...]:
    """The ops of an eager step that differ from themselves; the step leaves no trace."""
    start.restore()
    try:
        return ops_that_differ(
            lambda: train_step(
                target.model, target.batch, target.optimizer, target.loss, within=target.within
            )
        )
    finally:
        start.restore()


def _beyond_noise(trainings: Compared, start: Start) -> list[Difference]:
    """Differences of the plan in single steps that eager's own repetitions do not have, of every step."""
    blamed = []
    for number in range(1, trainings.steps + 1):
        expected = trainings.recorded(start, steps=1)
        after = Start(trainings.target)  # what the next step begins with
        found = trainings.of_plan(start, expected)
        errors: dict[str, float] = {}
        for _ in range(MOST_REPEATS):
            if not found:
                break
            for own in trainings.of_reference(start, expected):
                errors[own.name] = max(errors.get(own.name, 0.0), _at_most_infinite(own.error))
            found = [difference for difference in found if _is_plans(difference, errors)]
        blamed += [replace(difference, step=number) for difference in found]
        start = after
    return blamed


def _is_plans(difference: Difference, errors: dict[str, float]) -> bool:
    name = difference.name
    if name.startswith(PARAMETER):  # some optimizers take the sign of a gradient, which the last bit decides
        return name not in errors and f"{GRADIENT}{name.removeprefix(PARAMETER)}" not in errors
    return name not in errors or _at_most_infinite(difference.error) > FURTHER * errors[name]


def _at_most_infinite(error: float) -> float:
    return math.inf if math.isnan(error) else error
