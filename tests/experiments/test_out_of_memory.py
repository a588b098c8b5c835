"""An out-of-memory error gets a paragraph about what would fit, and nothing else changes."""

import copy
import weakref

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import lowtide
from lowtide.errors import CaptureError, is_out_of_memory
from lowtide.experiments import out_of_memory
from lowtide.experiments.out_of_memory import (
    LastCall,
    largest_modules,
    live_by_path,
    remember,
)
from lowtide.trace.model_call import Arguments

ROWS = 512


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(
            *(nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 32)) for _ in range(4))
        )
        self.head = nn.Linear(32, 4)

    def forward(self, x, scale=1.0):
        return self.head(self.encoder(x)) * scale


@pytest.fixture(scope="module")
def figures():
    """The peak and the floor of the step, in bytes."""
    model = Net()
    profile = lowtide.profile(
        model, torch.randn(ROWS, 32), optimizer=torch.optim.SGD(model.parameters(), lr=0.1)
    )
    return profile.peak_bytes, profile.floor_bytes


def train_until(error: BaseException, budget: int) -> str:
    """Train a step and run out of memory; the notes of the error."""
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with (
        pytest.raises(type(error)) as raised,
        lowtide.explain_out_of_memory(model, optimizer=optimizer, budget=budget),
    ):
        F.cross_entropy(model(torch.randn(ROWS, 32), scale=0.5), torch.randint(4, (ROWS,))).backward()
        raise error
    assert raised.value is error
    return "".join(getattr(error, "__notes__", []))


def test_a_plan_that_fits_is_named(figures):
    peak, floor = figures
    note = train_until(torch.OutOfMemoryError("CUDA out of memory"), (peak + floor) // 2)
    assert note.startswith("lowtide: a step of Net needs") and "Live there: encoder" in note
    assert "A plan fits: +" in note and "lowtide.checkpoint(model, batch, budget=" in note


def test_the_largest_batch_is_named_where_no_plan_fits(figures):
    _, floor = figures
    note = train_until(MemoryError(), floor * 9 // 10)
    assert "No plan fits: the lowest peak is" in note
    assert f"of {ROWS} (predicted)" in note


def test_a_step_that_fits_alone_is_told_so(figures):
    note = train_until(RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory"), 1 << 34)
    assert "The step alone fits" in note


def test_what_the_failed_step_holds_is_freed_where_a_trace_finds_no_memory(monkeypatch):
    held: list[weakref.ref] = []
    alive: list[bool] = []

    def of_step(*_):
        alive.append(held[0]() is not None)
        if len(alive) == 1:
            raise CaptureError("the model cannot be captured") from MemoryError()
        return "a plan fits"

    def forward() -> None:
        activations = torch.zeros(10)
        held.append(weakref.ref(activations))
        raise torch.OutOfMemoryError("out of memory")

    monkeypatch.setattr(out_of_memory, "_of_step", of_step)
    model = Net()
    with (
        pytest.raises(torch.OutOfMemoryError) as raised,
        lowtide.explain_out_of_memory(model, budget=1 << 30),
    ):
        model(torch.randn(2, 32))
        forward()
    assert alive == [True, False] and raised.value.__notes__ == ["lowtide: a plan fits"]


def test_other_errors_are_left_alone():
    assert train_until(ValueError("its own"), 1 << 34) == ""
    assert not is_out_of_memory(RuntimeError("another"))


def test_a_planned_model_is_told_its_plan(figures):
    model = Net()
    x = torch.randn(ROWS, 32)
    with pytest.raises(MemoryError) as raised, lowtide.explain_out_of_memory(model, budget="1GiB"):
        lowtide.checkpoint(model, x, budget="1GiB", loss=lambda y: y.square().mean())
        model(x).square().mean().backward()
        raise MemoryError
    assert lowtide.plan_of(model) is not None
    assert "trains by a plan with a predicted peak" in raised.value.__notes__[0]


def test_results_are_the_models_own_and_nothing_stays():
    model, x = Net(), torch.randn(8, 32)
    expected, before = model(x, scale=2.0), dict(vars(model))
    with lowtide.explain_out_of_memory(model, budget="1GiB"):
        assert torch.equal(model(x, scale=2.0), expected)
        assert torch.equal(copy.deepcopy(model)(x, scale=2.0), expected)
    assert vars(model) == before


def test_the_last_call_keeps_no_tensor():
    model = Net()
    last = LastCall(model)
    assert last.arguments() is None
    kept = torch.randn(2, 32)
    model(kept)
    assert last.arguments().args[0] is kept
    model(torch.randn(3, 32))
    (died,) = last.arguments().args
    assert died.shape == (3, 32) and not died.any()
    last.stop()
    again = remember(Arguments((), {"mask": torch.ones(2, 4, dtype=torch.bool).t(), "mode": "max"}))()
    assert again.kwargs["mask"].stride() == (1, 4) and again.kwargs["mode"] == "max"


def test_bytes_by_module_are_all_that_is_live(figures):
    model = Net()
    profile = lowtide.profile(model, torch.randn(ROWS, 32))
    live = live_by_path(profile.step, profile.timeline)
    assert sum(live.values()) <= profile.peak_bytes < sum(live.values()) + (1 << 20)
    assert [name for name, _ in largest_modules(live)][:2] == ["encoder", "batch"]


def test_a_module_that_has_most_is_looked_into():
    live = {"model.layers.0.mlp": 40, "model.layers.1.mlp": 40, "model.embed": 6, "head": 9, "batch": 1}
    assert largest_modules(live) == [("model.layers", 80), ("head", 9), ("model.embed", 6), ("batch", 1)]
    assert largest_modules({"a": 1}) == [("a", 1)] and largest_modules({}) == []
    assert largest_modules({"": 3, "a.b": 5}) == [("a", 5), ("", 3)]
