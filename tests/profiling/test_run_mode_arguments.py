"""`mode="run"` takes the same arguments as the other mode, and heeds them."""

import pytest
import torch
from torch import nn

import lowtide
from lowtide.facts.sizes import BadSize
from lowtide.profiling import costing

MODES = ("ops", "run")

pytestmark = pytest.mark.slow


@pytest.fixture
def model() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64), nn.Tanh())


@pytest.mark.parametrize("mode", MODES)
def test_the_memory_limit_is_heeded(model: nn.Module, mode: str) -> None:
    batch = torch.randn(16384, 64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    small = lowtide.profile(model, batch, optimizer=optimizer, mode=mode, memory_limit="2MiB", cache=False)
    (norm,) = [node for node in small.nodes if "batch_norm" in node.op and node.remats]
    whole = lowtide.profile(model, batch, optimizer=optimizer, mode="ops", cache=False)
    assert sum(node.estimated for node in whole.nodes) == 0
    if mode == "ops":
        assert norm.estimated
    with pytest.raises(BadSize):
        lowtide.profile(model, batch, mode=mode, memory_limit="much")


@pytest.mark.parametrize("mode", MODES)
def test_progress_is_told(model: nn.Module, mode: str) -> None:
    told: list[tuple[int, int]] = []
    lowtide.profile(
        model,
        torch.randn(32, 64),
        mode=mode,
        cache=False,
        progress=lambda done, total: told.append((done, total)),
    )
    assert told and told[-1][0] == told[-1][1]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("cache", [True, False])
def test_the_cache_is_left_alone_on_request(
    model: nn.Module, mode: str, cache: bool, monkeypatch: pytest.MonkeyPatch, tmp_path
) -> None:
    monkeypatch.setenv("LOWTIDE_CACHE_DIR", str(tmp_path / "cache"))
    lowtide.profile(model, torch.randn(32, 64), mode=mode, cache=cache)
    assert (tmp_path / "cache").exists() is cache


def test_the_limit_reaches_what_is_measured_op_by_op(
    model: nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits = []
    plain = costing.measure_calls

    def spy(calls, *, memory_limit_bytes, **rest):
        limits.append(memory_limit_bytes)
        return plain(calls, memory_limit_bytes=memory_limit_bytes, **rest)

    monkeypatch.setattr(costing, "measure_calls", spy)
    lowtide.profile(model, torch.randn(32, 64), mode="run", memory_limit=123 << 20)
    assert limits == [123 << 20]
