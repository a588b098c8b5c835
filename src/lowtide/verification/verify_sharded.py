"""Verify a plan of a model that is divided among processes, by all of these processes together.

Such a model can be neither copied nor sent to a fresh process. So the model itself trains here, eagerly and
by the plan, from the state that it has, and gets this state back:

    rank 0:  state ─ train eagerly ─ state ─ train by the plan ─ compare ─ state ─┐
    rank 1:  state ─ train eagerly ─ state ─ train by the plan ─ compare ─ state ─┴─ one verdict

Each process compares its own parts, and measures its own peaks. The verdict is that of all: every difference,
and the highest peaks. All processes take the same number of steps, so that none waits for another in vain.

Shortcoming: what is neither a parameter nor a buffer, such as a counter of the model's own, stays as training
left it.
"""

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lowtide.facts.serial import solution_to_dict
from lowtide.generators import generators_kept
from lowtide.parallel.ranks import Ranks, together
from lowtide.plans import Plan, check_identity
from lowtide.runtime.runner import remove
from lowtide.stage_log import stage
from lowtide.torch_compat.dispatch import make_first_calls
from lowtide.trace.identity import identify
from lowtide.trace.model_call import split_batch
from lowtide.trace.step_device import device_of, devices_of
from lowtide.verification.comparison import COMPARED_STEPS, check_graphs, looped, time_both
from lowtide.verification.measure_step import (
    STEPS_IN_LOOP,
    USUAL_PAIRS,
    Timing,
    peak_and_op,
    static_bytes,
    train_steps,
)
from lowtide.verification.trained_steps import Difference, Start, differences, record
from lowtide.verification.verify_plan import Verification
from lowtide.zoo.targets import Target

MOST_PEAKS = 20
"""A peak is the least of up to so many, until that of every process is as predicted: gloo frees its copies in
threads of its own, now and then too late."""


@dataclass(frozen=True, slots=True)
class _Found:
    """The findings of one process; plain data but for the timings."""

    differences: list[str]
    eager_differences: list[str]
    peaks: list[tuple[int, str]]
    timings: dict[str, Timing]

    @property
    def told(self) -> list[Any]:
        return [self.differences, self.eager_differences, self.peaks]


@stage("verify", given=lambda _target, plan, **_: repr(plan), made=repr)
def verify_sharded(
    target: Target, plan: Plan, *, ranks: Ranks | None, timed_runs: int | None = None
) -> Verification:
    """The verification of a plan by the processes `ranks`, which all have to call this; None for one alone.

    `timed_runs` None: the usual number of steps is timed.
    """
    runs = USUAL_PAIRS if timed_runs is None else timed_runs

    def work() -> _Found:
        check_identity(plan, identify(target.model, split_batch(target.batch)))
        return _found(target, plan, ranks, runs)

    if ranks is None:
        found = work()
        told = [found.told]
    else:
        found, told = together(ranks, work, tell=lambda one: one.told)
    (baseline_bytes, baseline_op), (planned_bytes, planned_op) = (
        max((tuple(peaks[which]) for _, _, peaks in told), key=lambda peak: peak[0]) for which in (0, 1)
    )
    different = _of_all([own for own, _, _ in told])
    return Verification(
        exact=not different,
        differences=different,
        recompute_exact=not different,
        budget_bytes=plan.budget_bytes,
        predicted_peak_bytes=plan.peak_bytes,
        measured_peak_bytes=planned_bytes,
        resident_peak_bytes=None,
        baseline_predicted_peak_bytes=plan.baseline_peak_bytes,
        baseline_measured_peak_bytes=baseline_bytes,
        baseline_resident_peak_bytes=None,
        step_timing=found.timings.get("planned"),
        baseline_step_timing=found.timings.get("eager"),
        fresh_process=False,
        peak_op=planned_op,
        baseline_peak_op=baseline_op,
        eager_differences=_of_all([own for _, own, _ in told]),
        plan=plan,
    )


def _of_all(by_rank: list[list[str]]) -> tuple[str, ...]:
    return tuple(
        f"rank {rank}: {words}" if len(by_rank) > 1 else words
        for rank, own in enumerate(by_rank)
        for words in own
    )


def _found(target: Target, plan: Plan, ranks: Ranks | None, runs: int) -> _Found:
    solution = solution_to_dict(plan.solution)
    target = looped(target, solution=solution)
    with tempfile.TemporaryDirectory(prefix="lowtide-") as folder, _as_before(target) as start:
        make_first_calls()
        remove(target.model)
        expected = record(target, start, Path(folder, "eager"), COMPARED_STEPS)
        noise = differences(target, start, expected[:1])
        peaks = [_peak(target, start, ranks, plan.baseline_peak_bytes)]
        plan.apply(target.model, optimizer=target.optimizer, process_group=ranks.group if ranks else None)
        found = differences(target, start, expected)
        check_graphs(target, solution)
        peaks.append(_peak(target, start, ranks, plan.peak_bytes))
        timings = time_both(target, runs, 0.0) if runs else {}
    return _Found([str(one) for one in _beyond(noise, found)], [str(one) for one in noise], peaks, timings)


def _beyond(noise: list[Difference], found: list[Difference]) -> list[Difference]:
    """The differences that are not eager's own: where eager differs from itself, those of the first step."""
    own = {one.name for one in noise}
    return [one for one in found if not own or (one.step == 1 and one.name not in own)]


@contextmanager
def _as_before(target: Target) -> Iterator[Start]:
    """The common start of all trainings; afterwards the model is as before, without a plan."""
    parameters = list(target.model.parameters())
    gradients = [parameter.grad for parameter in parameters]
    with generators_kept(devices_of(target.model, target.batch)):
        start = Start(target)
        try:
            yield start
        finally:
            remove(target.model)
            start.restore()
            for parameter, gradient in zip(parameters, gradients, strict=True):
                parameter.grad = gradient


def _peak(target: Target, start: Start, ranks: Ranks | None, predicted_bytes: int) -> tuple[int, str]:
    """The peak of a step in the loop, and the op that ran there."""

    def loop() -> None:
        train_steps(
            target.model,
            target.batch,
            target.optimizer,
            target.loss,
            steps=STEPS_IN_LOOP if target.holds_outputs else 1,
            holds_outputs=target.holds_outputs,
            within=target.within,
        )

    start.restore()
    loop()
    device = device_of(target.model, target.batch)
    own_bytes = static_bytes(target.model, target.batch, target.optimizer)
    least: tuple[int, str] | None = None
    for _ in range(MOST_PEAKS):
        above, op = peak_and_op(loop, device=device)
        least = min(least or (own_bytes + above, op), (own_bytes + above, op))
        if not _any_is_over(ranks, least[0] > predicted_bytes):
            break
    assert least is not None
    return least


def _any_is_over(ranks: Ranks | None, is_over: bool) -> bool:
    return is_over if ranks is None else any(together(ranks, lambda: is_over, tell=bool)[1])
