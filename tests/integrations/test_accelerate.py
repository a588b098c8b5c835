"""Loops of accelerate need no callback: a prepared model is planned like any other."""

import copy

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

accelerate = pytest.importorskip("accelerate")

import lowtide  # noqa: E402
from lowtide.runtime.apply import plan_of  # noqa: E402

pytestmark = pytest.mark.slow

WIDTH, BATCH = 32, 512


@pytest.fixture(autouse=True)
def as_in_a_new_process() -> None:
    """accelerate remembers the precision of whoever used it first."""
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)


def train(model: nn.Module, budget: str | None) -> list[torch.Tensor]:
    torch.manual_seed(1)
    accelerator = accelerate.Accelerator(cpu=True, mixed_precision="bf16", gradient_accumulation_steps=2)
    data = DataLoader(TensorDataset(torch.randn(4 * BATCH, WIDTH)), batch_size=BATCH, shuffle=True)
    model, optimizer, data = accelerator.prepare(model, torch.optim.AdamW(model.parameters()), data)
    losses = []
    for (batch,) in data:
        # docs/trainers.md: a batch drawn before the loop would move torch's generator
        if budget is not None and plan_of(model) is None:
            lowtide.checkpoint(
                model,
                batch,
                budget=budget,
                optimizer=optimizer,
                loss=lambda y: y.square().mean(),
                accumulate=True,
            )
        with accelerator.accumulate(model):
            loss = model(batch).square().mean()
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.detach())
    return losses


def test_a_prepared_model_is_planned_like_any_other(caplog: pytest.LogCaptureFixture) -> None:
    torch.manual_seed(0)
    blocks = (nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Dropout(0.1)) for _ in range(3))
    plain = nn.Sequential(*blocks, nn.Linear(WIDTH, 1))
    planned = copy.deepcopy(plain)
    assert all(map(torch.equal, train(plain, None), train(planned, "70%")))
    assert all(map(torch.equal, plain.parameters(), planned.parameters()))
    assert plan_of(planned).recompute_seconds > 0
    assert [record.getMessage() for record in caplog.records if record.name == "lowtide"] == []
