"""Train with and without a plan, and compare to the last bit."""

import copy
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from lowtide.trace.model_call import call, loss_of
from lowtide.verification.measure_step import peak_above_start, static_bytes, train_steps
from lowtide.zoo.targets import Target

Results = list[tuple[str, torch.Tensor | None]]


def train(target: Target, *, steps: int = 2, seed: int = 7) -> Results:
    """The state after each step, by name."""
    torch.manual_seed(seed)
    results: Results = []
    for number in range(steps):
        loss = loss_of(call(target.model, target.batch), target.loss)
        loss.backward()
        results.append((f"loss {number}", loss.detach().clone()))
        for name, parameter in target.model.named_parameters():
            grad = parameter.grad
            results.append((f"gradient of {name} {number}", None if grad is None else grad.clone()))
        if target.optimizer is not None:
            target.optimizer.step()
        target.model.zero_grad(set_to_none=True)
        results += snapshot(target.model, number)
        results.append((f"random state {number}", torch.get_rng_state()))
    return results


def snapshot(model: nn.Module, number: int) -> Results:
    named = [*model.named_parameters(), *model.named_buffers()]
    return [(f"{name} {number}", tensor.detach().clone()) for name, tensor in named]


def differences(expected: Results, seen: Results) -> list[str]:
    """Names of tensors that differ."""
    assert [name for name, _ in expected] == [name for name, _ in seen]
    return [
        name
        for (name, one), (_, other) in zip(expected, seen, strict=True)
        if (one is None) is not (other is None) or (one is not None and not torch.equal(one, other))
    ]


def twin(target: Target) -> Target:
    """A copy that trains apart: its own model, and an optimizer over that model's parameters."""
    model, batch, optimizer = copy.deepcopy((target.model, target.batch, target.optimizer))
    return replace(target, model=model, batch=batch, optimizer=optimizer)


def measured_peak(target: Target) -> int:
    """The true peak of a loop, all state there, after a warm-up."""

    def step() -> Any:
        return train_steps(
            target.model, target.batch, target.optimizer, target.loss, holds_outputs=target.holds_outputs
        )

    step()
    above = peak_above_start(step)
    return static_bytes(target.model, target.batch, target.optimizer) + above
