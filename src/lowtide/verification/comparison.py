"""Train with a plan and without it, from the same start, and compare the state after every step.

Losses, gradients, buffers, parameters and the random state are compared with `torch.equal`. Some models
take another path of their code during capture. For these, the captured graph also runs without recompute,
which shows whether the plan causes the differences from eager.
"""

import copy
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from lowtide.errors import PlanMismatch
from lowtide.facts.serial import solution_from_dict
from lowtide.ops.random_ops import random_state, set_random_state
from lowtide.optim.step_in_backward import UsedGradient
from lowtide.plans import Plan, check_identity
from lowtide.runtime.apply import apply_plan
from lowtide.runtime.executor import EAGER_OPS, Executor, executor_named
from lowtide.runtime.runner import Runner, Schedules, attach, install, remove, runner_of
from lowtide.torch_compat.dispatch import make_first_calls
from lowtide.trace.identity import identify
from lowtide.trace.model_call import call, loss_of, split_batch
from lowtide.verification.measure_step import Timing, device_of, time_steps, train_step
from lowtide.zoo.targets import Target, TargetSpec

COMPARED_STEPS = 3
GRADIENT, BUFFER, PARAMETER = "gradient of ", "buffer ", "parameter "
"""The prefixes of the names of results."""

NEGLIGIBLE = 1e-5
"""Gradients below this share of the model's largest count as zero."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """`differences` from eager, the first one first; empty when all is equal to the last bit.

    An executor with other bits than eager is compared with itself without recompute; `from_eager` says how
    far these results are from eager's.
    """

    differences: tuple[str, ...]
    recompute_exact: bool
    timings: dict[str, Timing]
    from_eager: str = ""


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
    *, source: Target | TargetSpec, solution: dict[str, Any], timed_runs: int, steps: int = COMPARED_STEPS
) -> Comparison:
    """Train eagerly and by the plan, from the same start, and compare every step; then time both in turn."""
    target = source.load() if isinstance(source, TargetSpec) else source
    with tempfile.TemporaryDirectory(prefix="lowtide-") as folder:
        make_first_calls()
        start = Start(target)
        expected = eager = record(target, start, Path(folder) / "eager", steps)
        executor, from_eager = executor_named(solution_from_dict(solution).executor), ""
        if executor is not EAGER_OPS:
            with _without_recompute(target, solution, executor):
                expected = record(target, start, Path(folder) / "captured", steps)
            from_eager = _distance(expected, eager)
        planned(target, solution=solution)
        found = differences(target, start, expected)
        _check_graphs(target, solution)
        recompute_exact = True
        if found and executor is not EAGER_OPS:
            recompute_exact = False
        elif found:
            with _without_recompute(target, solution, executor):
                captured = record(target, start, Path(folder) / "captured", steps)
            planned(target, solution=solution)
            recompute_exact = not differences(target, start, captured)
        start.restore()
    return Comparison(
        differences=tuple(map(str, found)),
        recompute_exact=recompute_exact,
        timings=_time(target, timed_runs) if timed_runs else {},
        from_eager=from_eager,
    )


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
    seen, wanted = (torch.load(files[0], mmap=True) for files in (results, eager))
    off = {
        name: (seen[name].double() - wanted[name].double()).abs().max().item()
        for name in wanted
        if wanted[name].is_floating_point() and wanted[name].numel()
    }
    name = max(off, key=off.__getitem__)
    if not off[name]:
        return "equal to eager training in the first step"
    return f"up to {off[name]:.1g} from eager training in the first step ({name})"


def _check_graphs(target: Target, solution: dict[str, Any]) -> None:
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


class Start:
    """The common start of both trainings."""

    def __init__(self, target: Target) -> None:
        self.target = target
        self.tensors = [tensor.detach().clone() for tensor in _tensors(target.model).values()]
        self.optimizer = copy.deepcopy(target.optimizer.state_dict()) if target.optimizer else None
        self.random = _random_states(target)

    def restore(self) -> None:
        with torch.no_grad():
            for tensor, before in zip(_tensors(self.target.model).values(), self.tensors, strict=True):
                tensor.copy_(before)
        if self.target.optimizer is not None and self.optimizer is not None:
            self.target.optimizer.load_state_dict(copy.deepcopy(self.optimizer))
        self.target.model.zero_grad(set_to_none=True)
        for device, state in self.random.items():
            set_random_state(state, device)


def _tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    named = {f"{PARAMETER}{name}": parameter.detach() for name, parameter in model.named_parameters()}
    return named | {f"{BUFFER}{name}": buffer for name, buffer in model.named_buffers()}


def _random_states(target: Target) -> dict[str, torch.Tensor]:
    """The state of the generators of all devices that the model is on, and of the CPU's."""
    devices = {str(tensor.device) for tensor in (*target.model.parameters(), *target.model.buffers())}
    return {device: random_state(device) for device in sorted({"cpu", *devices})}


def train(target: Target, start: Start, steps: int) -> Iterator[dict[str, torch.Tensor]]:
    """The state after each step, by name; without gradients that are None."""
    start.restore()
    for _ in range(steps):
        with target.within():
            loss = loss_of(call(target.model, target.batch), target.loss)
        loss.backward()  # type: ignore[no-untyped-call]
        seen = {"loss": loss.detach()}
        for name, parameter in target.model.named_parameters():
            if parameter.grad is not None:
                seen[f"{GRADIENT}{name}"] = parameter.grad
        del loss
        if target.optimizer is not None:
            target.optimizer.step()
        states = {f"random state of {device}": s for device, s in _random_states(target).items()}
        yield seen | _tensors(target.model) | states
        target.model.zero_grad(set_to_none=True)


def record(target: Target, start: Start, stem: Path, steps: int) -> list[Path]:
    """Write results to disk, so that memory has no second copy of the model."""
    files = []
    for number, seen in enumerate(train(target, start, steps)):
        files.append(stem.with_name(f"{stem.name}-{number}"))
        torch.save(seen, files[-1])
    return files


@dataclass(frozen=True, slots=True)
class Difference:
    """A tensor whose bits differ after `step`; `error` is relative to the tensor's largest value, infinite
    where undefined. `words` describe the difference."""

    name: str
    step: int
    error: float
    words: str = ""

    def __str__(self) -> str:
        return f"{self.name}, step {self.step}: {self.words}"


def differences(target: Target, start: Start, expected: Sequence[Path]) -> list[Difference]:
    """Train from `start` and compare with the results on disk; the first difference comes first."""
    found = []
    for step, (seen, path) in enumerate(
        zip(train(target, start, len(expected)), expected, strict=True), start=1
    ):
        wanted = torch.load(path, mmap=True)
        gradients = [_largest(value) for name, value in wanted.items() if name.startswith(GRADIENT)]
        least = NEGLIGIBLE * max(gradients, default=0.0)
        for name in dict.fromkeys((*wanted, *seen)):
            words = _difference(wanted.get(name), seen.get(name))
            if words:
                scale = least if name.startswith(GRADIENT) else 0.0
                error = _relative_error(wanted.get(name), seen.get(name), least=scale)
                found.append(Difference(name, step, error, words))
    return found


def _difference(wanted: torch.Tensor | None, seen: torch.Tensor | None) -> str:
    if wanted is None or seen is None:
        return "is None without the plan" if wanted is None else "is None with the plan"
    if isinstance(seen, UsedGradient):
        return ""  # its effect is in the parameters
    if wanted.shape != seen.shape or wanted.dtype != seen.dtype:
        return f"{seen.dtype}{tuple(seen.shape)} instead of {wanted.dtype}{tuple(wanted.shape)}"
    if torch.equal(wanted, seen) or _same_with_nan(wanted, seen):
        return ""
    off = (wanted.double() - seen.double()).abs()
    return f"{int((wanted != seen).sum())} of {wanted.numel()} values differ, by up to {off.max().item():.3g}"


def _relative_error(wanted: torch.Tensor | None, seen: torch.Tensor | None, *, least: float) -> float:
    """`least` is the smallest value that counts as the tensor's largest."""
    if wanted is None or seen is None or wanted.shape != seen.shape or not wanted.is_floating_point():
        return float("inf")
    scale = max(_largest(wanted), least)
    off: float = (wanted.double() - seen.double()).abs().max().item()
    return off / scale if scale else float("inf")


def _largest(value: torch.Tensor) -> float:
    return value.double().abs().max().item() if value.numel() else 0.0


def _same_with_nan(wanted: torch.Tensor, seen: torch.Tensor) -> bool:
    """Whether two tensors are equal, NaN in the same places included."""
    if not wanted.is_floating_point():
        return False
    return bool(((wanted == seen) | (wanted.isnan() & seen.isnan())).all())


def _time(target: Target, runs: int) -> dict[str, Timing]:
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
    timings = time_steps({"eager": eager, "planned": planned}, device=device, runs=runs)
    attach(remove(model), runner)
    return timings
