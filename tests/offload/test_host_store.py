"""The store in the host's memory, as far as that can be seen without an accelerator: what waits for what."""

from types import SimpleNamespace

import pytest
import torch

from lowtide.errors import StoreError
from lowtide.offload import host_store
from lowtide.offload.host_store import HostStore

CPU = torch.device("cpu")


class Stream:
    """Writes down what is asked of it; copies themselves run at once."""

    log: list[tuple[str, ...]]

    def __init__(self, *, device):
        self.device = device
        self.name = {0: "out", 1: "back"}.get(len(Stream.made), "other")
        Stream.made.append(self)

    made: list["Stream"]

    def wait_stream(self, other):
        Stream.log.append((self.name, "waits for all of", other.name))

    def wait_event(self, event):
        Stream.log.append((self.name, "waits for", event))

    def record_event(self):
        return f"copy on {self.name}"

    def __enter__(self):
        Stream.log.append((self.name, "copies"))

    def __exit__(self, *_):
        pass


@pytest.fixture
def log(monkeypatch):
    Stream.log, Stream.made = [], []
    current = Stream(device=CPU)
    current.name = "current"
    Stream.made = []

    def empty(*size, pin_memory=False, device=CPU, **options):
        if pin_memory:
            Stream.log.append(("pinned", str(device)))
        return torch.empty(*size, device=device, **options)

    monkeypatch.setattr(
        host_store,
        "torch",
        SimpleNamespace(
            Stream=Stream,
            empty=empty,
            uint8=torch.uint8,
            accelerator=SimpleNamespace(current_stream=lambda device: current),
        ),
    )
    monkeypatch.setattr(
        torch.Tensor, "record_stream", lambda _, stream: Stream.log.append(("kept for", stream.name))
    )
    return Stream.log


def test_a_value_leaves_and_comes_back_in_order(log):
    value = torch.randn(6, 4).t()[1:]
    before, stride = value.clone(), value.stride()
    handle = HostStore().offload(value)
    assert log == [("pinned", "cpu"), ("out", "waits for all of", "current"), ("out", "copies")]
    log.clear()
    handle.free_value()
    assert log == [("current", "waits for", "copy on out")], "or its memory is written over while it is read"
    log.clear()
    value.zero_()
    prefetch = handle.prefetch()
    assert log == [("back", "waits for all of", "current"), ("back", "copies")]
    log.clear()
    back = prefetch.wait()
    assert log == [("current", "waits for", "copy on back")]
    assert torch.equal(back, before) and back.stride() == stride


def test_streams_belong_to_the_device_of_the_value(log):
    store = HostStore()
    assert store.streams(CPU) is store.streams(CPU)
    other = store.streams(torch.device("meta"))
    assert [stream.device.type for stream in (*store.streams(CPU), *other)] == ["cpu", "cpu", "meta", "meta"]


def test_memory_is_kept_for_a_copy_that_nobody_waited_for(log):
    """The allocator would hand the block out while the copy still reads it, or writes to it."""
    store = HostStore()
    handle = store.offload(torch.randn(4))
    log.clear()
    del handle
    assert log == [("kept for", "out")]
    handle = store.offload(torch.randn(4))
    handle.free_value()
    prefetch = handle.prefetch()
    log.clear()
    del prefetch, handle
    assert log == [("kept for", "back")]


def test_memory_that_was_waited_for_is_free_at_once(log):
    """Or the step would need more than is simulated, until the copies of all other values are done."""
    handle = HostStore().offload(torch.randn(4))
    handle.free_value()
    value = handle.prefetch().wait()
    del handle, value
    assert not [entry for entry in log if entry[0] == "kept for"]


@pytest.mark.parametrize(
    ("free", "is_enough"), [([None], True), ([100], True), ([99, 100], True), ([99, 99], False)]
)
def test_memory_that_the_kernel_would_give_up_counts_as_free(monkeypatch, free, is_enough):
    left, emptied = list(free), []
    monkeypatch.setattr(host_store, "host_bytes", lambda: left.pop(0))
    monkeypatch.setattr(torch.accelerator, "empty_host_cache", lambda: emptied.append(True))
    if is_enough:
        HostStore().reserve(100)
    else:
        with pytest.raises(StoreError, match=r"needs 100 bytes .* 99 bytes"):
            HostStore().reserve(100)
    assert len(emptied) == len(free) - 1


def test_memory_that_cannot_be_pinned_is_told_in_one_line(monkeypatch):
    def refuse(*size, **options):
        raise RuntimeError("CUDA error: out of memory\nat length")

    monkeypatch.setattr(host_store, "torch", SimpleNamespace(empty=refuse, uint8=torch.uint8))
    with pytest.raises(StoreError, match=r"could not pin 8\.0 KiB") as raised:
        HostStore().pinned(8192)
    assert "\n" not in str(raised.value)
