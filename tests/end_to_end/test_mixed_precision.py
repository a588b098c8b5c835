"""Autocast and gradient scaling: equal to eager to the last bit, and within the budget."""

import logging
from contextlib import nullcontext

import pytest
import torch
from torch import nn
from training import twin

import lowtide
from lowtide.verification.measure_step import peak_above_start, static_bytes
from lowtide.zoo.targets import Target

ROWS, LENGTH, WIDTH = 4, 24, 32

pytestmark = pytest.mark.slow


class Attention(nn.Module):
    """Dropout on attention, whose backward runs ops of its own in float32."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(WIDTH, 4, 64, dropout=0.1, batch_first=True) for _ in range(2)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.float().square().mean()


class Shared(nn.Module):
    """Weights that are used several times, one of them in its own type, too."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.norm = nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH)
        self.last = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(4):
            x = torch.tanh(self.norm(self.layer(x)))
        return self.last(x).float().square().mean() + self.layer.weight.square().sum() * 1e-3


class ByHand(nn.Module):
    """Casts a weight itself, twice: such casts are two."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) / 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(3):
            x = torch.tanh(x @ self.weight.to(torch.bfloat16).mul(1))
        return x.float().square().mean()


class OwnBlock(nn.Module):
    """Has an autocast block of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Shared()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return self.inner(x)


class Convolutions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        norms = (nn.BatchNorm2d(8), nn.GroupNorm(2, 8), nn.BatchNorm2d(8))
        blocks = [nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), norm, nn.ReLU()) for norm in norms]
        self.blocks, self.drop = nn.Sequential(*blocks), nn.Dropout(0.2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        image = x.view(ROWS, 8, LENGTH // 2, WIDTH // 4)
        return self.drop(self.blocks(image)).float().square().mean()


MODELS = {kind.__name__: kind for kind in (Attention, Shared, ByHand, OwnBlock, Convolutions)}


def step(target: Target, dtype: torch.dtype, scaler: torch.amp.GradScaler | None = None) -> None:
    ambient = not isinstance(target.model, OwnBlock)
    with torch.autocast("cpu", dtype, enabled=ambient):
        loss = target.model(target.batch)
    if scaler is None:
        loss.backward()
        target.optimizer.step()
    else:
        scaler.scale(loss).backward()
        scaler.step(target.optimizer)
        scaler.update()
    target.optimizer.zero_grad(set_to_none=True)


def pair(model: nn.Module, dtype: torch.dtype) -> tuple[Target, Target, lowtide.Plan]:
    torch.manual_seed(0)
    batch = torch.randn(ROWS, LENGTH, WIDTH)
    plain = Target("model", model, batch, torch.optim.AdamW(model.parameters(), lr=1e-3))
    planned = twin(plain)
    with torch.autocast("cpu", dtype, enabled=not isinstance(model, OwnBlock)):
        found = lowtide.profile(planned.model, planned.batch, optimizer=planned.optimizer)
    plan = found.plan(found.floor_bytes)
    plan.apply(planned.model)
    return plain, planned, plan


def train(target: Target, dtype: torch.dtype, *, scaled: bool) -> list[torch.Tensor]:
    torch.manual_seed(3)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10) if scaled else None
    for _ in range(3):
        step(target, dtype, scaler)
    tensors = [*target.model.parameters(), *target.model.buffers()]
    return [tensor.detach().clone() for tensor in tensors] + [torch.get_rng_state()]


CASES = [(name, torch.bfloat16) for name in MODELS]
CASES += [("Attention", torch.float16)]
CASES += [
    pytest.param(name, torch.float16, marks=pytest.mark.long)
    for name in ("Convolutions", "Shared", "ByHand", "OwnBlock")
]


@pytest.mark.sample(1)
@pytest.mark.parametrize(("name", "dtype"), CASES, ids=str)
def test_training_is_equal_to_the_last_bit_and_within_the_budget(
    name: str, dtype: torch.dtype, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "lowtide"):
        plain, planned, plan = pair(MODELS[name](), dtype)
    assert "costed by its bytes" not in caplog.text
    scaled = dtype is torch.float16
    expected, seen = train(plain, dtype, scaled=scaled), train(planned, dtype, scaled=scaled)
    assert all(tensor.isfinite().all() for tensor in expected)
    assert all(torch.equal(one, other) for one, other in zip(expected, seen, strict=True))
    above = peak_above_start(lambda: step(planned, dtype))
    measured = static_bytes(planned.model, planned.batch, planned.optimizer) + above
    assert measured <= plan.budget_bytes


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    "dtype", [torch.bfloat16, pytest.param(torch.float16, marks=pytest.mark.long)], ids=str
)
@pytest.mark.parametrize("in_one_block", [True, False])
def test_several_calls_before_a_backward_pass_are_equal(dtype: torch.dtype, in_one_block: bool) -> None:
    """Eager sums the gradients of one cast in a block, and those of as many casts over several blocks."""
    plain, planned, _ = pair(Attention(), dtype)
    gradients = []
    for target in (plain, planned):
        torch.manual_seed(3)
        with torch.autocast("cpu", dtype) if in_one_block else nullcontext():
            losses = []
            for number in range(3):
                with torch.autocast("cpu", dtype):
                    losses.append(target.model(target.batch + number))
        sum(losses).backward()
        gradients.append([parameter.grad for parameter in target.model.parameters()])
    assert all(torch.equal(one, other) for one, other in zip(*gradients, strict=True))


class InBothTypes(nn.Module):
    """A weight that is used in the type that autocast casts it to, and in its own."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x).float().square().mean() + self.layer.weight.square().sum() * 1e-3


@pytest.mark.parametrize("module", [Shared, InBothTypes])
def test_a_weight_that_is_used_several_times_in_each_of_two_calls_is_told(
    module: type[nn.Module], caplog: pytest.LogCaptureFixture
) -> None:
    _, planned, _ = pair(module(), torch.bfloat16)
    with caplog.at_level(logging.WARNING, "lowtide"):
        step(planned, torch.bfloat16)
        step(planned, torch.bfloat16)
        assert "called twice" not in caplog.text
        with torch.autocast("cpu", torch.bfloat16):
            loss = planned.model(planned.batch) + planned.model(planned.batch)
        loss.backward()
    assert caplog.text.count("called twice before a backward pass and uses 'layer.weight'") == 1


def test_a_step_inside_of_a_block_that_goes_on_is_told(caplog: pytest.LogCaptureFixture) -> None:
    _, planned, _ = pair(Attention(), torch.bfloat16)
    with caplog.at_level(logging.WARNING, "lowtide"):
        step(planned, torch.bfloat16)
        with torch.autocast("cpu", torch.bfloat16):
            step(planned, torch.bfloat16)
        assert "weights have changed" not in caplog.text
        with torch.autocast("cpu", torch.bfloat16):
            for _ in range(3):
                step(planned, torch.bfloat16)
    assert caplog.text.count("weights have changed since this block of autocast began") == 1
