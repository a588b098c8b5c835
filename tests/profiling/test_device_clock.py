"""A device behind its host, by a simulated clock: times of ops are without launches, whatever the op does."""

from types import SimpleNamespace

import pytest

from lowtide.profiling import device_clock
from lowtide.profiling.device_clock import DeviceClock

LAUNCH_SECONDS = 5e-6
FILL_SECONDS = 20e-6


class FakeDevice:
    """A host that launches kernels, and a device that runs them in order; all times are simulated."""

    def __init__(self, *, is_asynchronous: bool = True) -> None:
        self.host = self.free = 0.0
        self.is_asynchronous = is_asynchronous
        self.launched = 0

    def launch(self, seconds: float, *, launch_seconds: float = LAUNCH_SECONDS) -> None:
        self.launched += 1
        self.host += launch_seconds
        self.free = max(self.host, self.free) + seconds
        if not self.is_asynchronous:
            self.wait()

    def wait(self) -> None:
        self.host = max(self.host, self.free)


class FakeEvent:
    def __init__(self, device: FakeDevice) -> None:
        self.device, self.when = device, 0.0

    def record(self) -> None:
        self.when = max(self.device.host, self.device.free)

    def query(self) -> bool:
        return self.device.host >= self.when

    def synchronize(self) -> None:
        self.device.host = max(self.device.host, self.when)

    def elapsed_time(self, other: "FakeEvent") -> float:
        return (other.when - self.when) * 1e3


class FakeClock(DeviceClock):
    def __init__(self, device: FakeDevice) -> None:
        super().__init__("fake")
        self.device = device

    def event(self):
        return FakeEvent(self.device)

    def synchronize(self) -> None:
        self.device.wait()

    def filler(self):
        return lambda: self.device.launch(FILL_SECONDS)


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> FakeDevice:
    made = FakeDevice()
    monkeypatch.setattr(device_clock, "time", SimpleNamespace(perf_counter=lambda: made.host))
    return made


def test_a_small_op_takes_its_kernel_not_its_launch(device: FakeDevice) -> None:
    clock = FakeClock(device)
    for _ in range(2):
        _, seconds = clock.time(lambda: device.launch(2e-6))
        assert seconds == pytest.approx(2e-6)


def test_an_op_of_several_slow_launches(device: FakeDevice) -> None:
    def run() -> None:
        for _ in range(10):
            device.launch(3e-6, launch_seconds=40e-6)

    assert FakeClock(device).time(run)[1] == pytest.approx(30e-6)


def test_an_op_that_waits_for_the_device_has_its_later_launches_in_its_time(device: FakeDevice) -> None:
    def run() -> None:
        device.launch(4e-6)
        device.wait()
        device.launch(6e-6, launch_seconds=50e-6)

    assert FakeClock(device).time(run)[1] == pytest.approx(60e-6)


def test_an_op_runs_once_on_a_device_that_works_at_once(device: FakeDevice) -> None:
    device.is_asynchronous = False
    clock = FakeClock(device)
    clock.time(lambda: device.launch(1e-3))
    before = device.launched
    _, seconds = clock.time(lambda: device.launch(1e-3))
    assert device.launched == before + 1  # nothing is queued
    assert seconds == pytest.approx(1e-3 + LAUNCH_SECONDS)
