"""The callback of Lightning's Trainer: whatever the Trainer does, as without it, to the last bit."""

import copy
import logging
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

lightning = pytest.importorskip("lightning.pytorch")

import lowtide  # noqa: E402
from lowtide.integrations.lightning import Lowtide  # noqa: E402
from lowtide.runtime.runner import runner_of  # noqa: E402
from lowtide.torch_compat.inductor import has_compiler  # noqa: E402
from lowtide.verification.measure_step import peak_above_start, static_bytes  # noqa: E402

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:.*:UserWarning", "ignore:.*LeafSpec.*:FutureWarning"),
]

WIDTH, CLASSES, ROWS, BATCH = 32, 5, 240, 64


def network() -> nn.Module:
    blocks = (
        nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.GELU(), nn.Dropout(0.1))
        for _ in range(3)
    )
    return nn.Sequential(*blocks, nn.Linear(WIDTH, CLASSES))


class Module(lightning.LightningModule):
    """What training_step calls: itself, a `part` of itself beside a frozen teacher, or two parts."""

    def __init__(self, calls: str) -> None:
        super().__init__()
        self.calls, self.losses, self.peak = calls, [], 0
        self.parts = nn.ModuleList([network()])
        if calls == "a part":
            self.teacher = network().requires_grad_(False)
        if calls == "two parts":
            self.parts.append(nn.Linear(CLASSES, CLASSES))
        self.criterion = nn.CrossEntropyLoss()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.parts[0](x) + 0.0

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        x, y = batch
        if self.calls == "itself":
            loss = self.criterion(self(x), y)
        elif self.calls == "a part":
            logits = self.parts[0](x)
            loss = self.criterion(logits, y) + F.mse_loss(logits, self.teacher(x).detach())
        else:
            loss = self.criterion(self.parts[1](self.parts[0](x)), y)
        self.log("loss", loss)
        self.losses.append(loss.detach().clone())
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("validation", self.criterion(self(batch[0]), batch[1]))

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.Adam(self.parameters(), lr=1e-3)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1)]


def fit(
    calls: str, budget: str | int | None, *, module: Any = None, options: Any = None, **settings: Any
) -> tuple[Any, Any]:
    lightning.seed_everything(0, verbose=False)
    module = Module(calls) if module is None else module
    data = TensorDataset(torch.randn(ROWS, WIDTH), torch.randint(0, CLASSES, (ROWS,)))
    callbacks = [] if budget is None else [Lowtide(budget, **(options or {}))]
    trainer = lightning.Trainer(
        accelerator="cpu",
        max_epochs=2,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=callbacks,
        **{"logger": False} | settings,
    )
    trainer.fit(module, DataLoader(data, batch_size=BATCH, shuffle=True), DataLoader(data, batch_size=BATCH))
    return module, callbacks[0].plan if callbacks else None


SETTINGS: dict[str, tuple[str, dict[str, Any]]] = {
    "itself, in bf16": ("itself", {"precision": "bf16-mixed"}),
    "a part, accumulated and clipped": ("a part", {"accumulate_grad_batches": 2, "gradient_clip_val": 0.5}),
}


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", SETTINGS)
def test_as_without_it(name: str, caplog: pytest.LogCaptureFixture) -> None:
    calls, settings = SETTINGS[name]
    with caplog.at_level(logging.INFO, "lowtide"):
        (plain, _), (planned, plan) = (fit(calls, budget, **settings) for budget in (None, "80%"))
    assert len(plain.losses) == 8 and all(map(torch.equal, plain.losses, planned.losses))
    assert list(plain.state_dict()) == list(planned.state_dict())
    assert all(map(torch.equal, plain.state_dict().values(), planned.state_dict().values()))
    assert plan.recompute_seconds > 0, "the budget asks for nothing"
    line = next(record.getMessage() for record in caplog.records if record.name == "lowtide")
    assert line.startswith("predicted peak ") and f"float32[{BATCH}x{WIDTH}]" in line
    assert all(runner_of(module) is None for module in planned.modules()), "it is the plain one again"
    if calls == "a part":
        teacher = sum(t.nbytes for t in (*plain.teacher.parameters(), *plain.teacher.buffers()))
        assert plan.solution.static_bytes > static_bytes(plain.parts, []) + teacher


class Memory(lightning.loggers.logger.DummyLogger):
    """Keeps what it is given, as TensorBoard's logger would write it."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[dict[str, float]] = []

    def log_metrics(self, metrics: Any, step: int | None = None) -> None:
        self.seen.append(dict(metrics))


@pytest.mark.sample(1)
@pytest.mark.parametrize("log_peak", [True, False])
def test_loggers_get_the_measured_peak_beside_the_loss(log_peak: bool) -> None:
    logger = Memory()
    fit("itself", "auto", options={"log_peak": log_peak}, logger=logger, log_every_n_steps=2)
    trained = [metrics for metrics in logger.seen if "loss" in metrics]
    assert trained and all(("lowtide/resident_peak_gib" in metrics) is log_peak for metrics in trained)
    assert not log_peak or all(0.05 < metrics["lowtide/resident_peak_gib"] < 100 for metrics in trained)


@pytest.mark.long
@pytest.mark.skipif(not has_compiler(), reason="Inductor needs a C++ compiler")
def test_another_executor() -> None:
    (plain, _), (planned, plan) = (
        fit("itself", budget, options={"executor": "inductor"}) for budget in ("200%", "80%")
    )
    assert plan.solution.executor == "inductor" and plan.recompute_seconds > 0
    assert len(plain.losses) == 8 and all(map(torch.equal, plain.losses, planned.losses))
    assert all(map(torch.equal, plain.state_dict().values(), planned.state_dict().values()))


class Measured(Module):
    """Measures what each later step holds, from the start of training_step to the end of backward."""

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, closure: Any = None) -> None:
        if self.trainer.global_step < 2:
            super().optimizer_step(epoch, batch_idx, optimizer, closure)
            return
        batch = [torch.empty(BATCH, WIDTH), torch.empty(BATCH, dtype=torch.int64)]
        there = static_bytes(self, batch, optimizer.optimizer)
        assert all(parameter.grad is None for parameter in self.parameters())
        own = super().optimizer_step
        self.peak = max(
            self.peak, there + peak_above_start(lambda: own(epoch, batch_idx, optimizer, closure))
        )


def test_the_budget_is_kept() -> None:
    module, plan = fit("itself", "80%", module=Measured("itself"))
    assert 0.9 * plan.peak_bytes <= module.peak <= plan.budget_bytes


class Holding(Module):
    """Returns the logits beside the loss, or lets go of them."""

    def __init__(self, *, returns: bool) -> None:
        torch.manual_seed(0)
        super().__init__("itself")
        self.returns = returns
        self.parts.append(nn.Linear(CLASSES, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.parts[1](self.parts[0](x))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        logits = self(batch[0])
        loss = self.criterion(logits, batch[1])
        self.losses.append(loss.detach().clone())
        return {"loss": loss, "logits": logits} if self.returns else loss


@pytest.mark.sample(1)
@pytest.mark.parametrize("returns", [True, False])
def test_outputs_that_training_step_lets_go_of_are_found_out(returns: bool) -> None:
    (plain, _), (planned, plan) = (fit("", b, module=Holding(returns=returns)) for b in (None, "80%"))
    assert plan.recompute_seconds > 0 or not returns
    assert plan.solution.holds_outputs is returns
    assert all(map(torch.equal, plain.losses, planned.losses))
    assert all(map(torch.equal, plain.state_dict().values(), planned.state_dict().values()))


class Rivals(Module):
    """Trains one network while another is frozen for as long, as a GAN does."""

    def __init__(self) -> None:
        super().__init__("itself")
        self.automatic_optimization = False
        self.rival = nn.Linear(CLASSES, 1)

    def training_step(self, batch: Any, batch_idx: int) -> None:
        first, _ = self.optimizers()
        self.toggle_optimizer(first)
        self.manual_backward(self.rival(self.parts[0](batch[0])).mean())

    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(network.parameters(), lr=0.1) for network in (self.parts, self.rival)]


def test_a_network_that_is_frozen_for_a_moment_is_trained_as_well() -> None:
    with pytest.raises(lowtide.LowtideError, match=r"'rival.weight' outside of it is trained as well"):
        fit("", "1GB", module=Rivals())


@pytest.mark.long
def test_what_cannot_be_planned_is_refused_before_the_first_step() -> None:
    module = Module("two parts")
    before = copy.deepcopy(module.state_dict())
    with pytest.raises(lowtide.LowtideError, match=r"'parts.1.weight' outside of it is trained as well"):
        fit("", "1GB", module=module)
    with pytest.raises(lowtide.BudgetTooSmall):
        fit("", "1KB", module=Module("itself"))
    assert all(map(torch.equal, before.values(), module.state_dict().values()))
    with pytest.raises(lowtide.LowtideError, match="there is no executor 'fast'"):
        Lowtide("1GB", executor="fast")
    compiled = Module("itself")
    compiled.compile(backend="eager")
    with pytest.raises(lowtide.LowtideError, match="is compiled"):
        fit("", "1GB", module=compiled)
