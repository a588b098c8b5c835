"""The most memory since the last reading, in a loop of one's own: read often, and changing nothing."""

import pytest
import torch
from torch import nn

import lowtide
from lowtide.facts import host_memory

MIB = 1 << 20


@pytest.mark.skipif(not host_memory.HIGH_WATER.exists(), reason="the high-water mark is Linux's")
def test_each_reading_is_of_the_time_since_the_last():
    model = nn.Linear(2, 2)
    lowtide.peak_bytes(model)
    base = lowtide.peak_bytes(model)
    block = torch.ones(64 * MIB, dtype=torch.uint8)
    del block
    high, after = lowtide.peak_bytes(model), lowtide.peak_bytes(model)
    assert high - base > 48 * MIB and high - after > 48 * MIB
    assert after < base + 32 * MIB


def test_a_system_without_the_mark_says_the_most_since_the_start(monkeypatch, tmp_path):
    monkeypatch.setattr(host_memory, "HIGH_WATER", tmp_path / "none" / "clear_refs")
    monkeypatch.setattr(host_memory, "status_bytes", lambda *_: None)
    assert not host_memory.reset_resident_peak()
    first = lowtide.peak_bytes(nn.Linear(2, 2))
    assert 10 * MIB < first <= lowtide.peak_bytes(nn.Linear(2, 2))


def test_readings_change_no_bit_and_no_random_state():
    def train(*, read: bool) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Dropout(0.5), nn.Linear(32, 1))
        optimizer = torch.optim.AdamW(model.parameters())
        lowtide.checkpoint(model, torch.randn(16, 8), budget="90%", optimizer=optimizer)
        for _ in range(3):
            model(torch.randn(16, 8)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            if read:
                lowtide.peak_bytes(model)
        return [*model.parameters(), torch.get_rng_state()]

    assert all(map(torch.equal, train(read=False), train(read=True)))
