"""Clocks, memory and copy speed of devices; times without page faults."""

import mmap
import subprocess
import sys
from functools import partial
from types import SimpleNamespace

import pytest
import torch

from lowtide.errors import LowtideError
from lowtide.ops.calls import Call
from lowtide.profiling import devices
from lowtide.profiling.devices import (
    Cpu,
    OpTiming,
    device_for,
    page_fault_seconds,
    page_faults,
    peak_of,
    spread_seconds,
    typical_seconds,
    without_faults,
)
from lowtide.profiling.op_trials import timed

CPU = device_for(torch.device("cpu"))


def test_typical_is_the_median_of_the_undisturbed_runs():
    timings = [OpTiming(9.0, 3), OpTiming(1.0, 0), OpTiming(3.0, 0), OpTiming(2.0, 0), OpTiming(0.5, 1)]
    assert typical_seconds(timings) == 2.0
    assert typical_seconds([OpTiming(8.0, 2), OpTiming(9.0, 2), OpTiming(4.0, 5)]) == 4.0


def event(start_us, kind="memory_alloc", *, nbytes=0, name="", thread=1):
    given = {
        "start_us": start_us,
        "kind": kind,
        "cpu_memory_usage": nbytes,
        "name": name,
        "thread_id": thread,
    }
    return SimpleNamespace(**{key: partial(lambda value: value, value) for key, value in given.items()})


def test_peak_is_the_highest_running_sum_over_threads_with_the_ops_that_run_then():
    assert peak_of([]) == (0, [])
    assert peak_of([[event(1, nbytes=-100), event(2, nbytes=50)]]) == (0, [])
    first = [event(0, "push", name="mm"), event(1, nbytes=100), event(3, nbytes=-100), event(4, "pop")]
    second = [event(2, "push", name="add", thread=2), event(2, nbytes=50, thread=2)]
    assert peak_of([first, second]) == (150, ["mm", "add"])


def test_cpu_sees_all_memory_inside():
    def run():
        block = torch.empty(1000, dtype=torch.uint8)
        other = torch.empty(500, dtype=torch.uint8)
        del block
        return torch.cat([other, other])

    result, peak = CPU.measured(run)
    assert result.numel() == 1000
    assert peak == 1500


def test_cpu_times_and_returns(monkeypatch):
    clock, interruptions, worked = iter([10.0, 10.25]), iter([7, 9]), iter([3.0, 3.125])
    monkeypatch.setattr(devices.time, "perf_counter", lambda: next(clock))
    monkeypatch.setattr(devices.time, "process_time", lambda: next(worked))
    monkeypatch.setattr(devices, "_interruptions", lambda: next(interruptions))
    assert CPU.timed(lambda: sum(range(1000))) == (499500, OpTiming(0.25, 2, 0.125))


def test_a_slow_run_may_be_interrupted_but_not_for_long():
    assert not OpTiming(0.5, 9, 0.01).avoidable
    assert OpTiming(0.5, 9, 0.4).avoidable
    assert OpTiming(0.01, 1).avoidable
    assert not OpTiming(0.01, 9, 0.0, 0.49).avoidable  # long, but for what was taken off
    assert not OpTiming(0.5, 0, 0.4).avoidable  # it waited for something of its own


def test_copy_speed_is_of_the_typical_copy(monkeypatch):
    seconds = iter([4.0, 1.0, 2.0, 2.0, 3.0])
    monkeypatch.setattr(Cpu, "timed", lambda self, run: (run(), OpTiming(next(seconds))))
    assert Cpu().copy_bytes_per_second() == devices._COPY_BYTES / 2.0


def test_spread_leaves_out_what_was_interrupted():
    runs = [OpTiming(s) for s in (1.0, 2.0, 3.0, 4.0, 5.0)]
    assert spread_seconds([*runs, OpTiming(0.09, 1)]) == 2.0
    assert spread_seconds([OpTiming(s, 5) for s in (1.0, 2.0, 3.0, 4.0, 5.0)]) == 2.0  # too slow to be spared
    assert spread_seconds(runs[:1]) == spread_seconds([OpTiming(0.01, 1), OpTiming(0.09, 1)]) == 0.0


def test_a_device_that_is_not_there_is_refused_in_one_line():
    with pytest.raises(ValueError, match="no way to measure on device 'meta': this machine has"):
        device_for(torch.device("meta"))


AFTER_A_PROFILER = """
import torch
from lowtide.profiling.devices import device_for
with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):
    torch.ones(3)
print("used", flush=True)
import os, sys
os.dup2(1, 2)
device_for(torch.device("cpu")).measured(lambda: torch.ones(3))
"""


def test_measuring_memory_after_torch_profiler_writes_nothing_to_the_terminal():
    done = subprocess.run(
        [sys.executable, "-c", AFTER_A_PROFILER], capture_output=True, text=True, check=True
    )
    assert done.stdout == "used\n"


def test_inside_torch_profiler_memory_is_refused_in_one_line():
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        torch.ones(3).cos()
        with pytest.raises(LowtideError, match=r"cannot be measured inside a block of torch\.profiler"):
            CPU.measured(lambda: torch.ones(3))
    assert "aten::cos" in {event.key for event in profiler.key_averages()}


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
        devices._chunk_seconds(area)
        first = page_faults() - before
        devices._chunk_seconds(area)
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
    monkeypatch.setattr(devices, "_chunk_seconds", lambda area: next(seconds))
    monkeypatch.setattr(devices, "page_faults", lambda: next(count))
    assert page_fault_seconds() * (1 << 20) / mmap.PAGESIZE == pytest.approx(per_mebibyte)
