"""The seam: clocks, memory and copy speed."""

import subprocess
import sys

import pytest
import torch

from lowtide.profiling import device
from lowtide.profiling.device import Cpu, Cuda, OpTiming, device_for, peak_of, spread_seconds, typical_seconds

CPU = device_for(torch.device("cpu"))


def test_typical_is_the_median_of_the_undisturbed_runs():
    timings = [OpTiming(9.0, 3), OpTiming(1.0, 0), OpTiming(3.0, 0), OpTiming(2.0, 0), OpTiming(0.5, 1)]
    assert typical_seconds(timings) == 2.0
    assert typical_seconds([OpTiming(8.0, 2), OpTiming(9.0, 2), OpTiming(4.0, 5)]) == 4.0


def test_peak_is_the_highest_running_sum():
    assert peak_of([]) == 0
    assert peak_of([(1, 100), (2, 50), (3, -100), (4, 60)]) == 150
    assert peak_of([(1, -100), (2, 50)]) == 0


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
    clock, interruptions = iter([10.0, 10.25]), iter([7, 9])
    monkeypatch.setattr(device.time, "perf_counter", lambda: next(clock))
    monkeypatch.setattr(device, "_interruptions", lambda: next(interruptions))
    assert CPU.timed(lambda: sum(range(1000))) == (499500, OpTiming(0.25, 2))


def test_copy_speed_is_of_the_typical_copy(monkeypatch):
    seconds = iter([4.0, 1.0, 2.0, 2.0, 3.0])
    monkeypatch.setattr(Cpu, "timed", lambda self, run: (run(), OpTiming(next(seconds))))
    assert Cpu().copy_bytes_per_second() == device._COPY_BYTES / 2.0


def test_spread_leaves_out_what_was_interrupted():
    runs = [OpTiming(s) for s in (1.0, 2.0, 3.0, 4.0, 5.0)]
    assert spread_seconds([*runs, OpTiming(0.09, 1)]) == 2.0
    assert spread_seconds([OpTiming(s, 5) for s in (1.0, 2.0, 3.0, 4.0, 5.0)]) == 2.0  # too slow to be spared
    assert spread_seconds(runs[:1]) == spread_seconds([OpTiming(0.01, 1), OpTiming(0.09, 1)]) == 0.0


def test_devices_are_found_by_type():
    assert isinstance(device_for(torch.device("cuda", 0)), Cuda)
    with pytest.raises(ValueError, match="meta"):
        device_for(torch.device("meta"))


def test_measuring_memory_writes_nothing_to_the_terminal():
    code = (
        "import torch; from lowtide.profiling.device import device_for;"
        "device_for(torch.device('cpu')).measured(lambda: torch.ones(3))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == done.stderr == ""
