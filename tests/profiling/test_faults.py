"""Time without page faults."""

import mmap

import pytest
import torch

from lowtide.profiling import device, faults
from lowtide.profiling.device import Cpu, OpTiming
from lowtide.profiling.faults import page_fault_seconds, page_faults, without_faults
from lowtide.profiling.trials import timed
from lowtide.torchside.calls import Call


@pytest.fixture
def one_microsecond_each(monkeypatch):
    monkeypatch.setattr(device, "page_fault_seconds", lambda: 1e-6)


def counted(monkeypatch, *, seconds, num_faults):
    """A clock and a count that any run takes on by so much."""
    monkeypatch.setattr(Cpu, "timed", lambda self, run: (run(), OpTiming(seconds, 1)))
    count = iter([100, 100 + num_faults])
    monkeypatch.setattr(device, "page_faults", lambda: next(count))


def test_faults_are_taken_off_what_a_run_took():
    assert without_faults(5e-3, 4000, fault_seconds=1e-6) == pytest.approx(1e-3)
    assert without_faults(5e-3, 0, fault_seconds=1e-6) == 5e-3
    assert without_faults(5e-3, 4000, fault_seconds=0.0) == 5e-3


def test_something_is_always_left():
    assert 0 < without_faults(1e-3, 4000, fault_seconds=1e-6) < 1e-3


def test_an_op_is_timed_without_its_faults(monkeypatch, one_microsecond_each):
    counted(monkeypatch, seconds=5e-3, num_faults=4000)
    timing = timed(Call(torch.ops.aten.relu.default, (torch.empty(4),)), Cpu())
    assert timing.seconds == pytest.approx(1e-3)
    assert timing.interruptions == 1


def test_a_write_to_new_memory_faults_on_every_page():
    nbytes = 4 << 20
    with mmap.mmap(-1, nbytes) as area:
        block = torch.frombuffer(area, dtype=torch.uint8)
        before = page_faults()
        block.fill_(1)
        first = page_faults() - before
        block.fill_(1)
        second = page_faults() - before - first
        del block
    assert first > 0
    assert second < first


def test_the_cost_of_a_fault_is_never_negative(monkeypatch):
    page_fault_seconds.cache_clear()
    assert 0 <= page_fault_seconds() < 1e-3
    monkeypatch.setattr(faults, "_one_try", lambda: -1e-9)
    page_fault_seconds.cache_clear()
    assert page_fault_seconds() == 0.0
    page_fault_seconds.cache_clear()


def test_pages_in_larger_lots_are_not_counted_as_small_ones(monkeypatch):
    count = iter(range(0, 100, 1))
    monkeypatch.setattr(faults, "page_faults", lambda: next(count))  # one fault for the whole area
    assert faults._one_try() == 0.0
