"""A resting tensor has true values for everybody, and its slot as long as anything refers to it."""

import errno
import gc
import os
import time

import pytest
import torch

from lowtide.errors import StoreError
from lowtide.offload.disk_store import DiskStore
from lowtide.offload.offload_store import resting_of


@pytest.fixture
def store(tmp_path):
    return DiskStore(str(tmp_path))


def test_the_object_stays_and_has_its_values(store):
    tensor = torch.randn(100, 70).t()
    before, alike = tensor.clone(), tensor
    resting = store.rest(tensor, "state")
    assert torch.equal(tensor, before) and alike is tensor and tensor.stride() == (1, 70)
    assert resting.nbytes == 100 * 70 * 4
    copy = torch.empty(resting.nbytes, dtype=torch.uint8)
    resting.start_read(copy).wait()
    assert torch.equal(resting.layout.over(copy), before)


def test_writes_of_both_sides_are_seen(store):
    tensor = torch.zeros(64, 32)
    resting = store.rest(tensor, "state")
    rows = torch.full((2, 32), 7.0)
    resting.start_write(rows.view(torch.uint8).view(-1), start=5 * 32 * 4).wait()
    assert torch.equal(tensor[5:7], rows) and tensor.sum() == 2 * 32 * 7
    tensor[9] = 3.0  # as a user's own code does
    block = torch.empty(32 * 4, dtype=torch.uint8)
    resting.start_read(block, start=9 * 32 * 4).wait()
    assert torch.equal(block.view(torch.float32), torch.full((32,), 3.0))
    resting.drop_pages()
    assert tensor[9, 0] == 3.0 and torch.equal(tensor[5:7], rows)


def test_a_read_waits_for_the_write_before(store, monkeypatch):
    tensor, plain = torch.zeros(4096), os.pwrite
    resting = store.rest(tensor, "state")
    monkeypatch.setattr(os, "pwrite", lambda *args: (time.sleep(0.05), plain(*args))[1])
    writing = resting.start_write(torch.ones(64).view(torch.uint8), start=256)
    block = torch.empty(16, dtype=torch.uint8)
    resting.start_read(block, start=300).wait()
    assert torch.equal(block.view(torch.float32), torch.ones(4)) and writing.is_done


def test_a_tensor_is_found_by_the_bytes_that_it_has_now(store):
    tensor = torch.randn(4096)
    assert resting_of(tensor) is None
    resting = store.rest(tensor, "state")
    assert resting_of(tensor) is resting
    tensor.data = torch.randn(4096)
    assert resting_of(tensor) is None


def test_a_tensor_returns_to_memory(store):
    tensor = torch.randn(100, 70)
    before, resting = tensor.clone(), store.rest(tensor, "state")
    assert resting.is_of(tensor)
    resting.return_to_memory(tensor, torch.device("cpu"))
    assert torch.equal(tensor, before) and not resting.is_of(tensor)


def test_a_parameter_may_rest(store):
    parameter = torch.nn.Parameter(torch.randn(64, 64))
    before = parameter.detach().clone()
    store.rest(parameter, "weight")
    parameter.sum().backward()
    assert torch.equal(parameter.detach(), before) and torch.equal(parameter.grad, torch.ones(64, 64))


def test_a_slot_is_free_only_when_no_tensor_is_left(store):
    tensor = torch.randn(4096)
    before = tensor.clone()
    resting = store.rest(tensor, "one")
    kept = tensor[10:20]
    end = store._file.slots.end
    del resting, tensor
    gc.collect()
    other = torch.randn(4096)
    resting = store.rest(other, "two")
    assert resting.start > 0 and torch.equal(kept, before[10:20])
    del kept
    gc.collect()
    store.rest(torch.randn(4096), "three")
    assert store._file.slots.end == end + other.nbytes  # the first slot again


def test_a_failed_write_is_said_then_and_ever_after(store, monkeypatch):
    resting = store.rest(torch.randn(4096), "exp_avg of 'weight'")

    def fail(*_):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "pwrite", fail)
    with pytest.raises(StoreError, match=r"could not write .*exp_avg of 'weight'.*last checkpoint"):
        resting.start_write(torch.zeros(4096, dtype=torch.uint8)).wait()
    monkeypatch.undo()
    with pytest.raises(StoreError, match="was not written whole"):
        resting.start_read(torch.zeros(4096, dtype=torch.uint8))


def test_a_full_disk_changes_nothing(store, monkeypatch):
    tensor = torch.randn(4096)
    pointer = tensor.data_ptr()
    monkeypatch.setattr("shutil.disk_usage", lambda _: _Usage)
    with pytest.raises(StoreError, match=r"offloading to .* needs"):
        store.rest(tensor, "state")
    assert tensor.data_ptr() == pointer


class _Usage:
    free = 100


def test_a_fork_reads_values_and_may_not_train(store):
    tensor = torch.randn(4096)
    before, resting = tensor.clone(), store.rest(tensor, "state")
    child = os.fork()
    if child == 0:
        try:
            resting.start_read(torch.zeros(8, dtype=torch.uint8))
        except StoreError:
            os._exit(0 if torch.equal(tensor, before) else 2)
        os._exit(1)
    assert os.waitpid(child, 0)[1] == 0
