"""Small models whose training is compared on an accelerator, with and without a plan."""

import gc
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from training import twin

import lowtide
from lowtide.trace.model_call import call, loss_of
from lowtide.zoo.targets import Target

FIGURES: list[tuple[int, int, int]] = []
"""Predicted peak, measured peak and budget of every plan that the current case trained by."""


def cnn() -> Target:
    def block(inputs: int, outputs: int) -> list[nn.Module]:
        return [nn.Conv2d(inputs, outputs, 3, padding=1), nn.BatchNorm2d(outputs), nn.ReLU()]

    body = [layer for _ in range(5) for layer in block(16, 16)]
    head = [nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Linear(256, 10)]
    return as_target(nn.Sequential(*block(3, 16), *body, *head), torch.randn(32, 3, 32, 32))


def mlp() -> Target:
    layers = [layer for _ in range(6) for layer in (nn.Linear(256, 256), nn.GELU())]
    return as_target(nn.Sequential(*layers), torch.randn(2048, 256))


def encoder(dropout: float = 0.1) -> Target:
    layer = nn.TransformerEncoderLayer(64, 4, 256, dropout=dropout, batch_first=True)
    return as_target(nn.TransformerEncoder(layer, 3, enable_nested_tensor=False), torch.randn(16, 64, 64))


CASES: dict[str, Callable[[], Target]] = {"cnn": cnn, "mlp": mlp, "encoder": encoder}


def as_target(model: nn.Module, *batch: Any, **options: Any) -> Target:
    """A model with a batch as a target; `options` are those of `Target`."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    settings = {"optimizer": optimizer, "loss": _loss, **options}
    return Target(name=type(model).__name__, model=model, batch=batch, **settings)


def _loss(output: torch.Tensor) -> torch.Tensor:
    return functional.mse_loss(output, torch.zeros_like(output))


def on(target: Target, device: torch.device) -> Target:
    """The same target on a device, its optimizer made anew there."""
    model = target.model.to(device)
    batch = tuple(value.to(device) for value in target.batch)
    return replace(target, model=model, batch=batch, optimizer=torch.optim.AdamW(model.parameters(), lr=1e-3))


@dataclass(frozen=True)
class Trained:
    """Losses, gradients, parameters, buffers and random states of every step, on the host; and the peak."""

    results: list[tuple[str, torch.Tensor]]
    peak_bytes: int


def trained(target: Target, *, steps: int = 3, seed: int = 7) -> Trained:
    """Train; the peak counts what the device's allocator has in use, as far as it belongs to this target."""
    device = next(target.model.parameters()).device
    gc.collect()
    strangers = torch.accelerator.memory_allocated(device) - _blocks(target, device)
    torch.accelerator.reset_peak_memory_stats(device)
    torch.manual_seed(seed)
    results = [pair for number in range(steps) for pair in _step(target, device, number)]
    return Trained(results, torch.accelerator.max_memory_allocated(device) - strangers)


def _step(target: Target, device: torch.device, number: int) -> list[tuple[str, torch.Tensor]]:
    assert target.optimizer is not None
    with target.within():
        loss = loss_of(call(target.model, target.batch), target.loss)
    loss.backward()
    named = [("loss", loss)]
    named += [(f"gradient of {n}", p.grad) for n, p in target.model.named_parameters() if p.grad is not None]
    results = [(f"{name} {number}", value.detach().cpu()) for name, value in named]
    del named, loss
    target.optimizer.step()
    target.optimizer.zero_grad()
    after = [*target.model.named_parameters(), *target.model.named_buffers()]
    results += [(f"{name} {number}", value.detach().cpu()) for name, value in after]
    module = torch.get_device_module(device)
    return [*results, (f"random state {number}", module.get_rng_state(device))]


def _blocks(target: Target, device: torch.device) -> int:
    """Bytes of the allocator's blocks behind parameters, buffers and batch."""
    tensors = [*target.model.parameters(), *target.model.buffers(), *target.batch]
    storages = {
        t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors if t.device == device
    }
    return sum(-(-nbytes // 512) * 512 for nbytes in storages.values())


def different(expected: Trained, seen: Trained) -> list[str]:
    """The names of all tensors that are not equal."""
    pairs = zip(expected.results, seen.results, strict=True)
    return [name for (name, one), (_, other) in pairs if not torch.equal(one, other)]


def check(
    target: Target, device: torch.device, *, share: float, steps: int = 3, **options: Any
) -> lowtide.Plan:
    """Train by a plan for a share of eager's peak: equal to eager to the last bit, and within the budget."""
    eager = on(target, device)
    planned = twin(eager)
    expected = trained(eager, steps=steps)
    del eager
    settings = {"optimizer": planned.optimizer, "loss": planned.loss, **options}
    with planned.within():
        plan = lowtide.profile(planned.model, planned.batch, **settings).plan(f"{share:.0%}")
    plan.apply(planned.model)
    seen = trained(planned, steps=steps)
    FIGURES.append((plan.peak_bytes, seen.peak_bytes, plan.budget_bytes))
    assert different(expected, seen) == []
    assert seen.peak_bytes <= plan.budget_bytes, f"{seen.peak_bytes} of {plan.budget_bytes} bytes"
    return plan
