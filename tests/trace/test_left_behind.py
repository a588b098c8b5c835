"""Capturing leaves nothing behind: not in the model, not in torch's settings, not in memory."""

import gc
import logging
import random
import types
import warnings
import weakref
from typing import Any

import pytest
import torch
from nets import WIDTH, Net, breaks, rows
from torch import nn
from torch.nn import functional as F

import lowtide
from lowtide import generators
from lowtide.analyze.captured_step import capture
from lowtide.errors import CaptureError
from lowtide.trace import trace_model as segments
from lowtide.trace.user_state import user_state_restored


class Stateful(nn.Module):
    """Leaves traces wherever a forward pass can."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.drop = nn.BatchNorm1d(WIDTH), nn.Dropout(0.5)
        self.first, self.calls = nn.Linear(WIDTH, WIDTH), 0
        self.register_buffer("mean", torch.zeros(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.drop(self.norm(self.first(x)))
        self.calls += 1
        self.last = x
        self.mean = self.mean * 0.9 + x.mean(0).detach() * 0.1
        if x.mean().item() > random.random() - 100:
            x = x + torch.randn_like(x)
        return x


def _settings() -> list[Any]:
    logger = logging.getLogger("torch")
    return [
        torch._dynamo.config.save_config(),
        torch._functorch.config.save_config(),
        list(warnings.filters),
        logger.level,
        torch.is_grad_enabled(),
        torch.get_rng_state().tolist(),
        random.getstate(),
    ]


@pytest.mark.sample(1)
@pytest.mark.parametrize("real", [False, True])
def test_nothing_is_left_behind(real: bool) -> None:
    model = Stateful() if real else nn.Sequential(*list(Stateful().children())[::-1])
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    identities = {name: id(tensor) for name, tensor in model.state_dict(keep_vars=True).items()}
    attributes = {name: list(vars(module)) for name, module in model.named_modules()}
    batch = rows()
    values, settings = batch.clone(), _settings()
    for _ in range(2):
        captured = capture(model, batch, optimizer=torch.optim.Adam(model.parameters()))
    assert ("one real forward" in " ".join(captured.step.notes)) is real
    assert settings == _settings()
    assert torch.equal(batch, values) and not batch.requires_grad
    assert model.training and all(parameter.grad is None for parameter in model.parameters())
    after = model.state_dict(keep_vars=True)
    assert identities == {name: id(tensor) for name, tensor in after.items()}
    assert all(torch.equal(before[name], tensor) for name, tensor in after.items())
    assert attributes == {name: list(vars(module)) for name, module in model.named_modules()}
    assert getattr(model, "calls", 0) == 0


class Remembers(nn.Module):
    """Keeps what it computes in lists and dicts, one inside of another."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.kept: dict[str, Any] = {"losses": [], "masks": {}}
        self.seen = [0]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        masks = self.kept["masks"]
        if len(x) not in masks:
            masks[len(x)] = torch.tril(torch.ones(WIDTH, WIDTH))
        x = self.first(x) @ masks[len(x)]
        self.kept["losses"].append(x.mean())
        self.seen[0] += 1
        return x


def test_lists_and_dicts_of_the_model_keep_their_contents() -> None:
    model = Remembers()
    losses = model.kept["losses"]
    capture(model, rows())
    assert model.kept == {"losses": [], "masks": {}} and model.seen == [0]
    assert model.kept["losses"] is losses
    model(rows()).sum().backward()


def _raises(x: torch.Tensor) -> torch.Tensor:
    raise ValueError("my own trouble\nand more of it")


NAMED: list[torch.Tensor] = []


def test_lists_that_hooks_name_keep_their_contents() -> None:
    model, own = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()), []
    model[0].register_forward_hook(lambda _module, _inputs, output: own.append(output))
    model[1].register_forward_hook(lambda _module, _inputs, output: NAMED.append(output))
    capture(model, rows())
    assert own == [] and NAMED == []


def test_a_failed_capture_leaves_nothing_behind_either() -> None:
    model, batch = Net(_raises), rows()
    settings = _settings()
    with pytest.raises(CaptureError):
        capture(model, batch)
    assert settings == _settings()


def test_a_model_can_be_captured_after_a_failure() -> None:
    model = Net(breaks)
    before = capture(model, rows()).step
    model.tail = _raises
    with pytest.raises(CaptureError):
        capture(model, rows())
    model.tail = breaks
    assert capture(model, rows()).step == before


def test_what_was_captured_goes_with_its_owner(monkeypatch: pytest.MonkeyPatch) -> None:
    collectors = []
    plain = segments.Collector.__init__
    monkeypatch.setattr(
        segments.Collector,
        "__init__",
        lambda self, *a, **k: (collectors.append(weakref.ref(self)), plain(self, *a, **k))[1],
    )
    model = Net(F.gelu)
    capture(model, rows())
    gc.collect()
    assert [reference() for reference in collectors] == [None]


class Broken(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x * 2
        torch._dynamo.graph_break()
        return self.last(self.first(x).tanh())


def test_a_batch_goes_with_its_owner_though_the_model_breaks_into_graphs() -> None:
    model, batch = Broken(), rows()
    lowtide.checkpoint(model, {"x": batch}, budget="1MB")
    model(rows()).sum().backward()
    gone = weakref.ref(batch)
    del batch
    gc.collect()
    assert gone() is None


def test_a_planned_model_goes_with_its_owner() -> None:
    model = Net(F.gelu)
    lowtide.checkpoint(model, rows(), budget="1MB")
    model(rows()).sum().backward()
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None


def test_generators_of_every_accelerator_are_given_back(monkeypatch):
    states = {"cpu": 1, "cuda:0": 2, "xpu:1": 3, "xpu:2": 4}

    class OnAccelerators(nn.Linear):
        def parameters(self, recurse=True):
            devices = ("cpu", "xpu:1", "cuda:0", "xpu:1")
            return iter([types.SimpleNamespace(device=torch.device(device)) for device in devices])

    monkeypatch.setattr(generators, "random_state", states.__getitem__)
    monkeypatch.setattr(generators, "set_random_state", lambda state, device: states.update({device: state}))
    with user_state_restored(OnAccelerators(2, 2)):
        states.update(dict.fromkeys(states, 0))
    assert states == {"cpu": 1, "cuda:0": 2, "xpu:1": 3, "xpu:2": 0}, "no other device is started"
