"""Values on a disk come back bit for bit, and nothing of them stays anywhere else."""

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

from lowtide.errors import StoreError
from lowtide.offload import arrived, begin_to_leave, fetch, leave, number_of
from lowtide.offload.disk_store import DiskStore
from lowtide.offload.store import bytes_of


@pytest.fixture
def store(tmp_path):
    return DiskStore(str(tmp_path))


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
    parcel = store.send(value)
    parcel.let_go()
    back = parcel.fetch().value()
    assert (back.dtype, back.shape, back.stride()) == (value.dtype, value.shape, value.stride())
    assert torch.equal(bytes_of(back), bytes_of(value))


def test_a_value_is_freed_when_it_is_let_go(store):
    value = torch.randn(100_000)
    block, parcel = weakref.ref(value), store.send(value)
    del value
    assert block() is not None
    parcel.let_go()
    assert block() is None


def test_many_come_back_in_any_order_and_twice(store):
    values = [torch.randn(1000 * (i % 7 + 1)) for i in range(20)]
    parcels = [store.send(value) for value in values]
    for parcel in parcels:
        parcel.let_go()
    for _ in range(2):
        arrivals = [parcel.fetch() for parcel in reversed(parcels)]
        assert all(torch.equal(a.value(), v) for a, v in zip(arrivals, reversed(values), strict=True))


def test_what_is_on_its_way_back_keeps_its_place(store):
    values = [torch.randn(5000) for _ in range(8)]
    for value in values:
        parcel = store.send(value)
        parcel.let_go()
        arrival = parcel.fetch()
        del parcel
        store.send(torch.zeros(5000)).let_go()
        assert torch.equal(arrival.value(), value)


def test_places_are_used_again(store):
    store.reserve(1 << 20)
    reserved = store.file_bytes
    assert reserved >= 1 << 20
    for step in range(20):
        parcels = [store.send(torch.randn(10_000 + 100 * (step % 5))) for _ in range(5)]
        for parcel in parcels:
            parcel.let_go()
    assert store.file_bytes == reserved


def test_more_than_was_reserved_makes_the_file_grow(store):
    store.reserve(4096)
    value = torch.randn(100_000)
    parcel = store.send(value)
    parcel.let_go()
    assert torch.equal(parcel.fetch().value(), value)
    assert store.file_bytes >= value.nbytes


def test_the_folder_shows_no_file(store, tmp_path):
    parcel = store.send(torch.randn(10_000))
    parcel.let_go()
    assert list(tmp_path.iterdir()) == []


def test_a_store_lives_as_long_as_what_is_in_it(tmp_path):
    store = DiskStore(str(tmp_path))
    parcel = store.send(torch.randn(10_000))
    parcel.let_go()
    file = weakref.ref(store._file)
    number = store._file.file.fileno()
    del store
    assert torch.equal(parcel.fetch().value(), parcel.fetch().value())
    del parcel
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
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as broken:
        broken.setattr(os, "posix_fallocate", full)
        with pytest.raises(StoreError, match="are free \\(No space left on device\\)"):
            store.send(torch.randn(100_000))
    value = torch.randn(100_000)
    parcel = store.send(value)
    parcel.let_go()
    assert torch.equal(parcel.fetch().value(), value)


def test_a_failing_write_is_told_where_the_value_is_let_go(store, monkeypatch):
    def broken(*_):
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", broken)
        parcel = store.send(torch.randn(1000))
        with pytest.raises(StoreError, match=r"could not write 3.9 KiB .*\(Input/output error\)"):
            parcel.let_go()
    again = store.send(torch.ones(1000))
    again.let_go()
    assert torch.equal(again.fetch().value(), torch.ones(1000))


def test_a_failing_read_is_told_to_its_reader(store, monkeypatch):
    def broken(*_):
        raise OSError(errno.EIO, "Input/output error")

    parcel = store.send(torch.ones(1000))
    parcel.let_go()
    with monkeypatch.context() as patch:
        patch.setattr(os, "preadv", broken)
        arrival = parcel.fetch()
        with pytest.raises(StoreError, match="could not read"):
            arrival.value()
    assert torch.equal(parcel.fetch().value(), torch.ones(1000))


def test_a_folder_that_is_not_there_is_named(tmp_path):
    with pytest.raises(StoreError, match=r"missing.*No such file or directory.*make the folder"):
        DiskStore(str(tmp_path / "missing"))


def test_a_fork_has_a_file_of_its_own(store):
    value = torch.randn(5000)
    parcel = store.send(value)
    parcel.let_go()
    child = os.fork()
    if child == 0:
        own = store.send(torch.zeros(5000))
        own.let_go()
        good = torch.equal(own.fetch().value(), torch.zeros(5000))
        try:
            parcel.fetch()
        except StoreError:
            os._exit(0 if good else 1)
        os._exit(2)
    assert os.waitpid(child, 0)[1] == 0
    assert torch.equal(parcel.fetch().value(), value)


def test_a_fork_that_drops_what_is_on_its_way_does_not_wait(store, monkeypatch):
    going, plain = threading.Event(), os.pwrite

    def slow(*args):
        going.wait(30)
        return plain(*args)

    monkeypatch.setattr(os, "pwrite", slow)
    parcel = store.send(torch.ones(5000))

    def work():
        nonlocal parcel
        parcel = None
        return True

    child = child_of(work)
    assert os.waitpid(child, 0)[1] == 0
    going.set()
    parcel.let_go()
    assert torch.equal(parcel.fetch().value(), torch.ones(5000))


def test_what_nobody_waits_for_holds_no_memory(store, monkeypatch):
    going, plain = threading.Event(), os.pwrite

    def slow(*args):
        going.wait(30)
        return plain(*args)

    monkeypatch.setattr(os, "pwrite", slow)
    values = [torch.ones(5000) for _ in range(3)]
    blocks = [weakref.ref(value.untyped_storage()) for value in values]
    parcels = [store.send(value) for value in values]
    del values
    threading.Timer(0.05, going.set).start()
    parcels.clear()
    gc.collect()
    assert [block() for block in blocks] == [None] * 3
    assert store._file.slots.take(3 * 20_480) == 0


def test_a_handle_stands_for_a_value_and_gives_its_place_back(store):
    number = number_of(store)
    assert number_of(store) == number
    value = torch.randn(1000)
    handle = leave(begin_to_leave(number, value))
    for _ in range(2):  # as in a second backward pass
        assert torch.equal(arrived(fetch(handle)), value)
    same_memory = handle.detach()
    del handle
    assert torch.equal(arrived(fetch(same_memory)), value)
    copied = same_memory.clone()
    del same_memory
    with pytest.raises(StoreError, match="something copied the tensor"):
        fetch(copied)
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
            parcels = [store.send(value) for value in values]
            for parcel in parcels:
                parcel.let_go()
            arrivals = [parcel.fetch() for parcel in parcels]
            if not all(torch.equal(a.value(), v) for a, v in zip(arrivals, values, strict=True)):
                return False
        return True

    children = [child_of(lambda seed=seed: work(seed)) for seed in range(3)]
    assert [os.waitpid(child, 0)[1] for child in children] == [0, 0, 0]


SENDS_AND_WAITS = """
import signal, sys
import torch
from lowtide.offload.disk_store import DiskStore
parcel = DiskStore(sys.argv[1]).send(torch.ones(100_000))
parcel.let_go()
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
    command = [sys.executable, "-c", SENDS_AND_WAITS, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == b"sent\n"
        child.send_signal(number)
        assert child.wait(timeout=60) != 0
    assert list(tmp_path.iterdir()) == []
