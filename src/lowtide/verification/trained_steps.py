"""Training from a common start: the state after every step, on disk, and the differences from it.

Copies of the start and results on disk are in the host's memory, compared there: on an accelerator, the
device has the memory of one training and no more. Of a tensor that is divided among processes, each process
has its own part, under a name with its placements.
"""

import copy
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from lowtide.generators import random_state, set_random_state, with_generators
from lowtide.optim.joined_optimizers import inner_optimizers
from lowtide.optim.updated_parameter import UsedGradient
from lowtide.torch_compat.dispatch import arrived, map_leaves
from lowtide.trace.model_call import call, loss_of
from lowtide.trace.step_device import devices_of
from lowtide.zoo.targets import Target

GRADIENT, BUFFER, PARAMETER = "gradient of ", "buffer ", "parameter "
"""The prefixes of the names of results."""

NEGLIGIBLE = 1e-5
"""Gradients below this share of the model's largest count as zero."""


class Start:
    """The common start of several trainings, in the host's memory."""

    def __init__(self, target: Target) -> None:
        self.target = target
        self.tensors = [arrived(each).to("cpu", copy=True) for each in _tensors(target.model).values()]
        self.optimizer = _on_host(target.optimizer.state_dict()) if target.optimizer else None
        self.random = random_states(target)

    def restore(self) -> None:
        with torch.no_grad():
            for tensor, before in zip(_tensors(self.target.model).values(), self.tensors, strict=True):
                arrived(tensor).copy_(before)
        if self.target.optimizer is not None and self.optimizer is not None:
            for optimizer in inner_optimizers(self.target.optimizer):
                optimizer.state.clear()  # or the device would have two states for a while
            self.target.optimizer.load_state_dict(_where_it_was(self.optimizer))
        self.target.model.zero_grad(set_to_none=True)
        for device, state in self.random.items():
            set_random_state(state, device)


@dataclass(frozen=True, slots=True)
class _OnHost:
    """A tensor of the optimizer's state, on the host, and the device that it was on."""

    value: torch.Tensor
    device: torch.device


def _on_host(state: Any) -> Any:
    def keep(leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor):
            return _OnHost(leaf.detach().to("cpu", copy=True), leaf.device)
        return copy.deepcopy(leaf)

    return map_leaves(keep, state)


def _where_it_was(state: Any) -> Any:
    def give(leaf: Any) -> Any:
        return leaf.value.to(leaf.device, copy=True) if isinstance(leaf, _OnHost) else copy.deepcopy(leaf)

    return map_leaves(give, state)


def _tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    named = {f"{PARAMETER}{name}": parameter.detach() for name, parameter in model.named_parameters()}
    return named | {f"{BUFFER}{name}": buffer for name, buffer in model.named_buffers()}


def random_states(target: Target) -> dict[str, torch.Tensor]:
    """The state of the generators of all devices of the model and its batch, and of the CPU's."""
    return {
        device: random_state(device) for device in with_generators(devices_of(target.model, target.batch))
    }


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
        states = {f"random state of {device}": s for device, s in random_states(target).items()}
        yield dict(map(_part, (seen | _tensors(target.model)).items())) | states
        target.model.zero_grad(set_to_none=True)


def _part(named: tuple[str, torch.Tensor]) -> tuple[str, torch.Tensor]:
    name, tensor = named
    placements = getattr(tensor, "placements", None)
    return (name if placements is None else f"{name} {placements}"), arrived(tensor)


def record(target: Target, start: Start, stem: Path, steps: int) -> list[Path]:
    """Write results to disk, so that memory has no second copy of the model."""
    files = []
    for number, seen in enumerate(train(target, start, steps)):
        files.append(stem.with_name(f"{stem.name}-{number}"))
        torch.save(seen, files[-1])
    return files


def results_in(path: Path) -> dict[str, torch.Tensor]:
    """The results of one step, read from disk as they are used."""
    found: dict[str, torch.Tensor] = torch.load(path, mmap=True, map_location="cpu")
    return found


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
        wanted = results_in(path)
        gradients = [_largest(value) for name, value in wanted.items() if name.startswith(GRADIENT)]
        least = NEGLIGIBLE * max(gradients, default=0.0)
        for name in dict.fromkeys((*wanted, *seen)):
            before, after = wanted.get(name), _host(seen.get(name))
            words = _difference(before, after)
            if words:
                scale = least if name.startswith(GRADIENT) else 0.0
                error = _relative_error(before, after, least=scale)
                found.append(Difference(name, step, error, words))
    return found


def _host(value: torch.Tensor | None) -> torch.Tensor | None:
    return value if value is None or isinstance(value, UsedGradient) else value.cpu()


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
