"""Profiles on a nearly full device: smaller samples, estimated costs with a note, errors of one line."""

import gc
from collections.abc import Callable
from types import ModuleType

import pytest
import torch
from accelerator_cases import CASES, on

import lowtide
from lowtide.errors import LowtideError
from lowtide.facts.plan import OffloadTarget
from lowtide.profiling.devices import Accelerator
from lowtide.profiling.op_costs import measure_calls
from lowtide.profiling.transfer_speed import measure_transfer_speed
from lowtide.zoo.targets import Target

MIB = 1 << 20


@pytest.fixture
def leave_free(standin: ModuleType, device: torch.device) -> Callable[[int], None]:
    """Let the device have no more than so many bytes beyond those in use."""

    def fill(nbytes: int) -> None:
        gc.collect()
        torch.accelerator.empty_cache()
        reserved = torch.accelerator.memory_reserved(device)
        # parts of reserved blocks may be free, whatever earlier cases left
        standin.set_capacity(max(reserved, torch.accelerator.memory_allocated(device) + nbytes), device)

    return fill


def profiled(target: Target, **options: object) -> lowtide.Profile:
    return lowtide.profile(
        target.model, target.batch, optimizer=target.optimizer, loss=target.loss, cache=False, **options
    )


def test_copies_are_timed_with_what_is_free(leave_free: Callable[[int], None], device: torch.device) -> None:
    leave_free(10 * MIB)
    assert Accelerator(device).copy_bytes_per_second() > 0


def test_transfers_are_timed_with_what_is_free(
    leave_free: Callable[[int], None], device: torch.device
) -> None:
    step = profiled(on(CASES["mlp"](), device)).step
    leave_free(22 * MIB)
    speed = measure_transfer_speed(OffloadTarget("host"), step, use_cache=False)
    assert speed.write_bytes_per_second > 0 and speed.read_bytes_per_second > 0


@pytest.mark.parametrize("free_mib", [60, 6])
def test_ops_are_profiled_in_what_is_free(
    free_mib: int, leave_free: Callable[[int], None], standin: ModuleType, device: torch.device
) -> None:
    target = on(CASES["mlp"](), device)
    leave_free(free_mib * MIB)
    profile = profiled(target)
    told = [note for note in profile.step.notes if "free to measure with" in note]
    assert bool(told) == any(node.estimated for node in profile.step.nodes)
    assert told or free_mib == 60
    standin.set_capacity(None, device)
    assert profile.plan("70%").peak_bytes > 0


def test_a_full_device_is_told_in_one_line(leave_free: Callable[[int], None], device: torch.device) -> None:
    leave_free(0)
    blocks = []
    with pytest.raises(torch.OutOfMemoryError):
        while True:
            blocks.append(torch.empty(64 << 10, dtype=torch.uint8, device=device))
    with pytest.raises(LowtideError, match="is full") as raised:
        Accelerator(device).copy_bytes_per_second()
    assert "\n" not in str(raised.value)


def test_memory_that_ends_between_two_runs_of_an_op(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another program may take memory at any time: an op that ran before may not run again."""

    def full(self: object, *, attempts: int) -> None:
        raise torch.OutOfMemoryError("out of memory\nat length")

    monkeypatch.setattr("lowtide.profiling.op_trials.Trial.time", full)
    profile = profiled(on(CASES["mlp"](), device))
    assert all(node.estimated for node in profile.step.nodes if node.seconds)


def test_a_whole_run_that_does_not_fit(leave_free: Callable[[int], None], device: torch.device) -> None:
    target = on(CASES["mlp"](), device)
    leave_free(22 * MIB)
    with pytest.raises(LowtideError, match="profile with mode 'ops'") as raised:
        profiled(target, mode="run")
    assert "\n" not in str(raised.value)


def test_a_limit_is_not_above_what_is_free(leave_free: Callable[[int], None], device: torch.device) -> None:
    leave_free(100 * MIB)
    assert Accelerator(device).within_free(1 << 30) <= 100 * MIB
    assert measure_calls([]).notes == ()
