"""A floor is a promise: it is not above the baseline's peak, a plan for it exists, and a step keeps it.

Twenty small models, most of them odd, at the smallest budgets.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import lowtide
from lowtide.analyze.captured_step import SCALARS_BYTES
from lowtide.profiling.devices import Cpu
from lowtide.trace.model_call import loss_of

ROWS = 64


class Does(nn.Module):
    """A model that is a function of its parts and its input."""

    def __init__(self, function: Callable[[Any, Tensor], Any], **parts: nn.Module | nn.Parameter) -> None:
        super().__init__()
        self.function = function
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, x: Tensor) -> Any:
        return self.function(self, x)


class Kernel(nn.Module):
    """The marginal likelihood of a Gaussian process."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.noise = nn.Parameter(torch.zeros(())), nn.Parameter(torch.zeros(()))
        self.register_buffer("y", torch.randn(48))

    def forward(self, x: Tensor) -> Tensor:
        near = torch.exp(-0.5 * torch.cdist(x / self.scale.exp(), x / self.scale.exp()).square())
        root = torch.linalg.cholesky(near + (self.noise.exp() + 0.1) * torch.eye(48))
        solved = torch.cholesky_solve(self.y[:, None], root)[:, 0]
        return 0.5 * (self.y @ solved) + root.diagonal().log().sum()


class Case(NamedTuple):
    model: Callable[[], nn.Module]
    batch: Callable[[], Tensor]
    loss: Callable[[Any], Tensor] | None = None


def dense(function: Callable[[Tensor], Any], width: int = 200) -> Case:
    return Case(
        lambda: Does(lambda own, x: function(own.layer(x)), layer=nn.Linear(16, width)),
        lambda: torch.randn(ROWS, 16),
    )


def net(*layers: Callable[[], nn.Module], batch: Callable[[], Tensor] | None = None, **loss: Any) -> Case:
    return Case(
        lambda: nn.Sequential(*(make() for make in layers)),
        batch or (lambda: torch.randn(ROWS, 16)),
        **loss,
    )


def two_outputs() -> nn.Module:
    return Does(
        lambda own, x: (own.one(x), own.other(x).tanh()), one=nn.Linear(16, 200), other=nn.Linear(16, 30)
    )


def hidden() -> nn.Module:
    return nn.Linear(16, ROWS)


def scores() -> nn.Module:
    return nn.Linear(ROWS, 300)


def words() -> Tensor:
    return torch.randint(100, (8, 16))


CLASSES = torch.arange(ROWS)

FEW: dict[str, Case] = {
    "classes": net(hidden, nn.ReLU, scores),
    "classes, told": net(hidden, nn.ReLU, scores, loss=lambda o: F.cross_entropy(o, CLASSES)),
    "words": net(lambda: nn.Embedding(100, 32), lambda: nn.Linear(32, 100), batch=words),
    "number": net(hidden, nn.Tanh, lambda: nn.Linear(ROWS, 1)),
    "two outputs": Case(two_outputs, lambda: torch.randn(ROWS, 16)),
    "cumprod": dense(lambda h: (1 + 0.01 * torch.tanh(h)).cumprod(1).mean()),
    "kernel": Case(Kernel, lambda: torch.randn(48, 3)),
    "sort": dense(lambda h: h.sort(1)[0][:, :50].mean()),
}
MORE: dict[str, Case] = {
    "words, told": net(
        lambda: nn.Embedding(100, 32),
        lambda: nn.Linear(32, 100),
        batch=words,
        loss=lambda o: F.cross_entropy(o.flatten(0, 1), torch.zeros(128, dtype=torch.long)),
    ),
    "number, told": net(hidden, nn.Tanh, lambda: nn.Linear(ROWS, 1), loss=lambda o: o.square().mean()),
    "two outputs, told": Case(
        two_outputs, lambda: torch.randn(ROWS, 16), lambda o: o[0].square().mean() + o[1].abs().mean()
    ),
    "linear": net(scores, batch=lambda: torch.randn(ROWS, ROWS)),
    "one number": Case(lambda: nn.Linear(1, 1), lambda: torch.randn(1, 1)),
    "no input": Case(lambda: Does(lambda own, x: own.p * 1, p=nn.Parameter(torch.ones(5))), words),
    "product": dense(lambda h: (1 + 0.01 * h).prod(1).mean()),
    "norm": dense(lambda h: F.normalize(h).norm(p=3)),
    "logits loss": dense(lambda h: F.binary_cross_entropy_with_logits(h, torch.ones(ROWS, 200))),
    "loss beside scores": dense(lambda h: {"loss": h.square().mean(), "logits": h}),
    "spectrum": dense(lambda h: torch.fft.rfft(h).abs().mean()),
    "singular values": dense(lambda h: torch.linalg.svdvals(h).sum(), width=40),
    "scan": dense(lambda h: h.logcumsumexp(1).mean()),
    "image": net(
        lambda: nn.Conv2d(3, 8, 3),
        lambda: nn.BatchNorm2d(8),
        nn.ReLU,
        lambda: nn.Conv2d(8, 4, 3),
        batch=lambda: torch.randn(4, 3, 16, 16),
    ),
    "recurrent": Case(
        lambda: Does(lambda own, x: own.layer(x)[0], layer=nn.LSTM(16, 32, batch_first=True)),
        lambda: torch.randn(4, 9, 16),
    ),
    "attention": Case(
        lambda: nn.TransformerEncoderLayer(32, 4, 64, batch_first=True), lambda: torch.randn(4, 9, 32)
    ),
    "dropout": net(hidden, nn.Dropout, nn.GELU, scores),
}
OPTIMIZERS = {"none": None, "SGD": torch.optim.SGD, "AdamW": torch.optim.AdamW}


def check(case: Case, optimizer_type: Any) -> None:
    torch.manual_seed(0)
    model, batch = case.model(), case.batch()
    optimizer = optimizer_type and optimizer_type(model.parameters(), lr=1e-3)
    found = lowtide.profile(model, batch, optimizer=optimizer, loss=case.loss)
    floor = found.floor_bytes
    assert floor <= found.peak_bytes
    for budget in ("1%", "10%", floor - 1):
        try:
            plan = found.plan(budget)
        except lowtide.BudgetTooSmall as error:
            assert found.plan(error.floor_bytes).peak_bytes <= error.floor_bytes
        else:
            assert plan.peak_bytes <= plan.budget_bytes
    assert found.plan(floor + 1).peak_bytes <= floor + 1
    found.plan("100%")
    found.plan(floor).apply(model)

    def step() -> None:
        output = model(batch)
        loss_of(output, case.loss).backward()
        if optimizer is not None:
            optimizer.step()
        model.zero_grad(set_to_none=True)

    step()
    step()
    assert found.step.static_bytes - SCALARS_BYTES * len(found.step.graphs) + Cpu().measured(step)[1] <= floor


@pytest.mark.sample(2)
@pytest.mark.slow
@pytest.mark.parametrize("name", FEW)
def test_a_floor_can_be_asked_for(name: str) -> None:
    check(FEW[name], torch.optim.AdamW)


@pytest.mark.long
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("name", {**FEW, **MORE})
def test_every_floor_can_be_asked_for(name: str, optimizer: str) -> None:
    check({**FEW, **MORE}[name], OPTIMIZERS[optimizer])
