"""Time without page faults."""

import mmap

import pytest
import torch

from lowtide.ops.calls import Call
from lowtide.profiling import devices
from lowtide.profiling.devices import Cpu, OpTiming, page_fault_seconds, page_faults, without_faults
from lowtide.profiling.op_trials import timed


@pytest.fixture
def one_microsecond_each(monkeypatch):
    monkeypatch.setattr(devices, "page_fault_seconds", lambda: 1e-6)


def counted(monkeypatch, *, seconds, num_faults):
    """A clock and a count that any run takes on by so much."""
    monkeypatch.setattr(Cpu, "timed", lambda self, run: (run(), OpTiming(seconds, 1)))
    count = iter([100, 100 + num_faults])
    monkeypatch.setattr(devices, "page_faults", lambda: next(count))


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


def test_a_write_to_new_memory_faults():
    with mmap.mmap(-1, 4 << 20, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as area:
        before = page_faults()
        devices._piece_seconds(area)
        first = page_faults() - before
        devices._piece_seconds(area)
        again = page_faults() - before - first
    assert again < first


@pytest.fixture
def forgotten():
    """Measured anew inside, and again after."""
    page_fault_seconds.cache_clear()
    yield
    page_fault_seconds.cache_clear()


@pytest.mark.parametrize(
    ("num_faults", "first", "again", "per_mebibyte"),
    [
        pytest.param(10**6, 3e-3, 1e-3, 2e-3, id="page by page"),
        pytest.param(10**6, 1e-3, 2e-3, 0.0, id="never less than nothing"),
        pytest.param(16, 3e-3, 1e-3, 0.0, id="in larger lots"),
    ],
)
def test_the_cost_of_a_fault(num_faults, first, again, per_mebibyte, forgotten, monkeypatch):
    seconds, count = iter([first, again]), iter([0, num_faults])
    monkeypatch.setattr(devices, "_piece_seconds", lambda area: next(seconds))
    monkeypatch.setattr(devices, "page_faults", lambda: next(count))
    assert page_fault_seconds() * (1 << 20) / mmap.PAGESIZE == pytest.approx(per_mebibyte)
