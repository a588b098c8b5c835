"""Values on a disk come back bit for bit, nothing of them stays elsewhere, and slots never overlap."""

import errno
import gc
import os
import signal
import subprocess
import sys
import threading
import weakref

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lowtide.errors import StoreError
from lowtide.offload.disk_store import PAGE_BYTES, DiskStore, Slots, whole_pages
from lowtide.offload.offload_store import (
    bytes_of,
    finish_offload,
    finish_prefetch,
    start_offload,
    start_prefetch,
    store_number,
)


@pytest.fixture
def store(tmp_path):
    return DiskStore(str(tmp_path))


def offloaded(store, value):
    handle = store.offload(value)
    handle.free_value()
    return handle


@pytest.fixture
def going(monkeypatch):
    """An event that lets writes go on."""
    going, plain = threading.Event(), os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda *args: (going.wait(30), plain(*args))[1])
    return going


def failing(number):
    def fail(*_):
        raise OSError(number, os.strerror(number))

    return fail


VALUES = {
    "float": lambda: torch.randn(33, 7),
    "bfloat16": lambda: torch.randn(129, 3).bfloat16(),
    "truth values": lambda: torch.rand(1001) > 0.5,
    "indices": lambda: torch.randint(0, 1 << 60, (17, 5)),
    "complex": lambda: torch.randn(5, 5, dtype=torch.complex64),
    "not contiguous": lambda: torch.randn(4, 5, 6).permute(2, 0, 1),
    "channels last": lambda: torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
    "part of a storage": lambda: torch.randn(10, 10)[3:, 2:5],
    "expanded": lambda: torch.randn(6, 1).expand(6, 9),
    "one number": lambda: torch.tensor(3.5),
    "not a number": lambda: torch.tensor([float("nan"), float("-inf"), -0.0]),
    "empty": lambda: torch.empty(0, 3),
    "several pages": lambda: torch.randn(40_001),
}


@pytest.mark.parametrize("name", VALUES)
def test_a_value_comes_back_as_it_was(store, name):
    value = VALUES[name]()
    handle = offloaded(store, value)
    back = handle.prefetch().wait()
    assert (back.dtype, back.shape, back.stride()) == (value.dtype, value.shape, value.stride())
    assert torch.equal(bytes_of(back), bytes_of(value))


def test_a_value_is_freed_when_it_is_let_go(store):
    value = torch.randn(100_000)
    block, handle = weakref.ref(value), store.offload(value)
    del value
    assert block() is not None
    handle.free_value()
    assert block() is None


def test_many_come_back_in_any_order_and_twice(store):
    values = [torch.randn(1000 * (i % 7 + 1)) for i in range(20)]
    handles = [store.offload(value) for value in values]
    for handle in handles:
        handle.free_value()
    for _ in range(2):
        prefetches = [handle.prefetch() for handle in reversed(handles)]
        assert all(torch.equal(a.wait(), v) for a, v in zip(prefetches, reversed(values), strict=True))


def test_what_is_on_its_way_back_keeps_its_place(store):
    values = [torch.randn(5000) for _ in range(8)]
    for value in values:
        handle = offloaded(store, value)
        prefetch = handle.prefetch()
        del handle
        store.offload(torch.zeros(5000)).free_value()
        assert torch.equal(prefetch.wait(), value)


def test_places_are_used_again(store):
    store.reserve(1 << 20)
    reserved = store.file_bytes
    assert reserved >= 1 << 20
    for step in range(20):
        handles = [store.offload(torch.randn(10_000 + 100 * (step % 5))) for _ in range(5)]
        for handle in handles:
            handle.free_value()
    assert store.file_bytes == reserved


def test_more_than_was_reserved_makes_the_file_grow(store):
    store.reserve(4096)
    value = torch.randn(100_000)
    handle = offloaded(store, value)
    assert torch.equal(handle.prefetch().wait(), value)
    assert store.file_bytes >= value.nbytes


def test_the_folder_shows_no_file(store, tmp_path):
    handle = offloaded(store, torch.randn(10_000))
    assert handle.start == 0
    assert list(tmp_path.iterdir()) == []


def test_a_store_lives_as_long_as_what_is_in_it(tmp_path):
    store = DiskStore(str(tmp_path))
    handle = offloaded(store, torch.randn(10_000))
    file = weakref.ref(store._file)
    number = store._file.file.fileno()
    del store
    assert torch.equal(handle.prefetch().wait(), handle.prefetch().wait())
    del handle
    gc.collect()
    assert file() is None
    with pytest.raises(OSError):
        os.fstat(number)


def test_a_full_disk_is_found_before_anything_is_written(store, tmp_path):
    with pytest.raises(StoreError, match=f"'disk:{tmp_path}' needs .* there, and .* free .*make room"):
        store.reserve(1 << 60)
    assert store.file_bytes == 0
    store.reserve(4096)


def test_a_disk_that_is_full_in_a_step_loses_that_step_alone(store, monkeypatch):
    with monkeypatch.context() as broken:
        broken.setattr(os, "posix_fallocate", failing(errno.ENOSPC))
        with pytest.raises(StoreError, match="are free \\(No space left on device\\)"):
            store.offload(torch.randn(100_000))
    value = torch.randn(100_000)
    handle = offloaded(store, value)
    assert torch.equal(handle.prefetch().wait(), value)


def test_a_failing_write_is_told_where_the_value_is_let_go(store, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", failing(errno.EIO))
        handle = store.offload(torch.randn(1000))
        with pytest.raises(StoreError, match=r"could not write 3.9 KiB .*\(Input/output error\)"):
            handle.free_value()
    again = store.offload(torch.ones(1000))
    again.free_value()
    assert torch.equal(again.prefetch().wait(), torch.ones(1000))


def test_a_failing_read_is_told_to_its_reader(store, monkeypatch):
    handle = offloaded(store, torch.ones(1000))
    with monkeypatch.context() as patch:
        patch.setattr(os, "preadv", failing(errno.EIO))
        prefetch = handle.prefetch()
        with pytest.raises(StoreError, match="could not read"):
            prefetch.wait()
    assert torch.equal(handle.prefetch().wait(), torch.ones(1000))


def test_a_folder_that_is_not_there_is_made(tmp_path):
    value = torch.arange(5)
    handle = DiskStore(str(tmp_path / "new" / "inside")).offload(value)
    handle.free_value()
    assert torch.equal(handle.prefetch().wait(), value)


def test_a_folder_that_cannot_be_made_is_named(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(StoreError, match=r"file/inside' .*\(Not a directory\): make it writable, or choose"):
        DiskStore(str(tmp_path / "file" / "inside"))


def test_a_fork_has_a_file_of_its_own(store):
    value = torch.randn(5000)
    handle = offloaded(store, value)
    child = os.fork()
    if child == 0:
        own = store.offload(torch.zeros(5000))
        own.free_value()
        good = torch.equal(own.prefetch().wait(), torch.zeros(5000))
        try:
            handle.prefetch()
        except StoreError:
            os._exit(0 if good else 1)
        os._exit(2)
    assert os.waitpid(child, 0)[1] == 0
    assert torch.equal(handle.prefetch().wait(), value)


def test_a_fork_that_drops_what_is_on_its_way_does_not_wait(store, going):
    handle = store.offload(torch.ones(5000))

    def work():
        nonlocal handle
        handle = None
        return True

    child = child_of(work)
    assert os.waitpid(child, 0)[1] == 0
    going.set()
    handle.free_value()
    assert torch.equal(handle.prefetch().wait(), torch.ones(5000))


def test_what_nobody_waits_for_holds_no_memory(store, going):
    values = [torch.ones(5000) for _ in range(3)]
    blocks = [weakref.ref(value.untyped_storage()) for value in values]
    handles = [store.offload(value) for value in values]
    del values
    threading.Timer(0.05, going.set).start()
    handles.clear()
    gc.collect()
    assert [block() for block in blocks] == [None] * 3
    assert store._file.slots.take(3 * 20_480) == 0


def test_a_handle_stands_for_a_value_and_gives_its_place_back(store):
    number = store_number(store)
    assert store_number(store) == number
    value = torch.randn(1000)
    handle = finish_offload(start_offload(number, value))
    for _ in range(2):  # as in a second backward pass
        assert torch.equal(finish_prefetch(start_prefetch(handle)), value)
    same_memory = handle.detach()
    del handle
    assert torch.equal(finish_prefetch(start_prefetch(same_memory)), value)
    copied = same_memory.clone()
    del same_memory
    with pytest.raises(StoreError, match="something copied the tensor"):
        start_prefetch(copied)
    assert store._file.slots.take(4000) == 0


def child_of(work):
    """A process that forks from here and does `work`; its exit code tells whether that was good.

    It must not touch large tensors: the threads that share such work do not fork.
    """
    child = os.fork()
    if child == 0:
        try:
            os._exit(0 if work() else 1)
        finally:
            os._exit(2)
    return child


def test_processes_share_a_folder(tmp_path):
    def work(seed):
        store, numbers = DiskStore(str(tmp_path)), torch.Generator().manual_seed(seed)
        for _ in range(10):
            values = [torch.rand(3000, generator=numbers) for _ in range(3)]
            handles = [store.offload(value) for value in values]
            for handle in handles:
                handle.free_value()
            prefetches = [handle.prefetch() for handle in handles]
            if not all(torch.equal(a.wait(), v) for a, v in zip(prefetches, values, strict=True)):
                return False
        return True

    children = [child_of(lambda seed=seed: work(seed)) for seed in range(3)]
    assert [os.waitpid(child, 0)[1] for child in children] == [0, 0, 0]


OFFLOADS_AND_WAITS = """
import signal, sys
import torch
from lowtide.offload.disk_store import DiskStore
handle = DiskStore(sys.argv[1]).offload(torch.ones(100_000))
handle.free_value()
print("sent", flush=True)
signal.pause()
"""


@pytest.mark.parametrize(
    "number",
    [
        signal.SIGKILL,
        pytest.param(signal.SIGTERM, marks=pytest.mark.long),
        pytest.param(signal.SIGINT, marks=pytest.mark.long),
    ],
)
def test_a_killed_process_leaves_no_file(tmp_path, number):
    command = [sys.executable, "-c", OFFLOADS_AND_WAITS, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == b"sent\n"
        child.send_signal(number)
        assert child.wait(timeout=60) != 0
    assert list(tmp_path.iterdir()) == []


@given(st.lists(st.tuples(st.integers(1, 5 * PAGE_BYTES), st.integers(0, 3)), max_size=40))
def test_parts_never_overlap_and_the_end_covers_them(wanted):
    slots, held = Slots(), []
    for nbytes, drop in wanted:
        start = slots.take(nbytes)
        mine = (start, start + nbytes)
        assert all(mine[1] <= low or high <= mine[0] for low, high in held)
        held.append(mine)
        assert slots.end >= max(high for _, high in held)
        for _ in range(min(drop, len(held))):
            low, high = held.pop(len(held) // 2)
            slots.give_back(low, high - low)


def test_gaps_are_joined_and_taken_again():
    slots = Slots()
    sizes = [PAGE_BYTES, 3 * PAGE_BYTES, 2 * PAGE_BYTES]
    starts = [slots.take(nbytes) for nbytes in sizes]
    for start, nbytes in zip(starts, sizes, strict=True):
        slots.give_back(start, nbytes)
    assert slots.take(sum(sizes)) == 0
    assert slots.end == sum(sizes)


def test_a_gap_at_the_end_grows():
    slots = Slots()
    slots.give_back(slots.take(100), 100)
    assert slots.take(3 * PAGE_BYTES) == 0
    assert slots.end == whole_pages(3 * PAGE_BYTES)
