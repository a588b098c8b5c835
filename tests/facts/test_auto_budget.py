"""The budget `auto`: free memory, what the step already has, and a reserve."""

import pytest

from lowtide.errors import LowtideError
from lowtide.facts import auto_budget as module
from lowtide.facts import host_memory as host_memory_module
from lowtide.facts.auto_budget import FreeMemory, auto_budget, gpu_budget, host_memory
from lowtide.facts.gpus import GPUS
from lowtide.facts.sizes import check_budget, is_auto, parse_size, split_reserved

GIB = 1 << 30


def memory(free_gib: float, held_gib: float = 0, machine: str = "") -> FreeMemory:
    return FreeMemory(
        device="cpu", free_bytes=int(free_gib * GIB), held_bytes=int(held_gib * GIB), machine=machine
    )


@pytest.mark.parametrize(
    ("processes", "gib", "terms"),
    [
        ([memory(20)], 18, "20.0 GiB free on cpu - 2.0 GiB reserve"),
        ([memory(20, 4)], 21.6, "20.0 GiB free on cpu + 4.0 GiB this step already has - 2.4 GiB reserve"),
        ([memory(2)], 1.5, "2.0 GiB free on cpu - 512.0 MiB reserve"),
        ([memory(40, 1), memory(20, 1)], 18.9, "20.0 GiB free on cpu + 1.0 GiB this step"),
        ([memory(40, 1, "a"), memory(40, 1, "a")], 18.9, "40.0 GiB free on cpu / 2 processes + 1.0 GiB this"),
        ([memory(40, 0, "a"), memory(20, 0, "b")], 18, "20.0 GiB free on cpu - 2.0"),
    ],
)
def test_the_sum(processes, gib, terms):
    found = auto_budget(processes)
    assert abs(found.nbytes - gib * GIB) <= 1
    assert found.line.startswith("budget auto: ") and terms in found.line


def test_what_is_allocated_already_changes_nothing():
    assert auto_budget([memory(20)]).nbytes == auto_budget([memory(17, 3)]).nbytes


def test_a_gpu_that_is_not_here():
    found = gpu_budget(GPUS["a100-40g"])
    assert found.nbytes == 39.5 * GIB - int(39.5 * GIB) // 10
    assert "40.0 GiB of a100-40g - 512.0 MiB CUDA context - 3.9 GiB reserve" in found.line
    assert all(gpu_budget(gpu).nbytes < gpu.memory_bytes for gpu in GPUS.values())


def test_too_little_is_refused_in_one_line():
    with pytest.raises(
        LowtideError, match=r"leaves nothing: 409.6 MiB free .* - 512.0 MiB reserve"
    ) as caught:
        auto_budget([memory(0.4)])
    assert "\n" not in str(caught.value)


def test_tensors_that_are_in_no_memory_yet_are_not_counted(monkeypatch):
    monkeypatch.setattr(module, "host_bytes", lambda: 20 * GIB)
    monkeypatch.setattr(module, "resident_bytes", lambda: GIB)
    assert host_memory(5 * GIB).held_bytes == GIB and host_memory(5).held_bytes == 5
    monkeypatch.setattr(module, "resident_bytes", lambda: None)
    assert host_memory(5 * GIB).held_bytes == 5 * GIB
    monkeypatch.setattr(module, "host_bytes", lambda: None)
    with pytest.raises(LowtideError, match="does not say how much memory is free: write a size"):
        host_memory()


@pytest.mark.parametrize(
    ("asked", "of_reserved"), [(" AUTO ", False), ("auto", False), ("auto reserved", True)]
)
def test_how_it_is_written(asked, of_reserved):
    assert is_auto(asked)
    check_budget(asked)
    text = auto_budget([memory(20)]).text(asked)
    assert split_reserved(text)[1] is of_reserved and parse_size(split_reserved(text)[0]) == 18 * GIB
    assert not any(map(is_auto, ("automatic", "8GiB", 8, "")))


@pytest.mark.parametrize("number", range(len(host_memory_module.LIMITS)))
def test_a_limit_of_the_process_is_less_than_the_machine_has(number, monkeypatch):
    limit, field = host_memory_module.LIMITS[number]
    used = host_memory_module.status_bytes(field)
    if used is None:
        pytest.skip("the system does not tell what a process takes")
    limits = {limit: (used + 100 * (1 << 20), -1)}
    monkeypatch.setattr(host_memory_module.resource, "getrlimit", lambda which: limits.get(which, (-1, -1)))
    (left,) = host_memory_module.left_to_process()
    assert 0 <= left < 200 << 20 and host_memory_module.host_bytes() < 200 << 20
