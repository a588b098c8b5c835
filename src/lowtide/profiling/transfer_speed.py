"""The speed of writes to and reads from an offload store, measured with the store itself.

A sample of `SAMPLE_BYTES` is written and read several times, in a part of the store that an earlier run has
written, as from the second step on. On a disk, a write ends with `fdatasync`, and a read does not use the
page cache. The time of one page is the latency. Matrix products, run with all threads
beside such transfers and alone, show how much of the processor the copies take.
"""

import time
from collections.abc import Callable
from statistics import median
from threading import Thread

import torch
from torch import Tensor

from lowtide.facts import Step, TransferSpeed
from lowtide.facts.plan import OffloadTarget
from lowtide.offload.offload_store import OffloadHandle, OffloadStore, open_store, warn_if_in_memory
from lowtide.ops.calls import OpCost
from lowtide.profiling.cache import CostCache
from lowtide.profiling.devices import Device, device_for

SAMPLE_BYTES = 32 << 20
PAGE_BYTES = 4096
RUNS = 5
MATRIX = 256
PRODUCTS = 40


def measure_transfer_speed(target: OffloadTarget, step: Step, use_cache: bool) -> TransferSpeed:
    """The speed between a step's device and a store; cached on disk, unless `use_cache` is False."""
    warn_if_in_memory(target)
    device = device_for(torch.device(step.device))
    store = open_store(target, step.device)
    cache = CostCache(device) if use_cache else None
    sizes = (PAGE_BYTES, SAMPLE_BYTES)
    names = [f"store {target}: {way} {nbytes} bytes" for nbytes in sizes for way in ("write", "read")]
    page_write, page_read, write, read = _remembered(
        cache, names, lambda: [each for nbytes in sizes for each in _transfer_seconds(store, nbytes, device)]
    )
    slows = f"store {target}: seconds of compute lost in one of transfers"
    [lost] = _remembered(cache, [slows], lambda: [_lost_share(store, device)])
    return TransferSpeed(
        store=str(target),
        write_bytes_per_second=_bandwidth(write, page_write),
        read_bytes_per_second=_bandwidth(read, page_read),
        latency_seconds=max(page_write, page_read),
        slows_compute=lost,
    )


def _remembered(cache: CostCache | None, names: list[str], measure: Callable[[], list[float]]) -> list[float]:
    """The cached numbers of these names, or measured ones."""
    costs = [cache.get(name, memory_limit_bytes=0) for name in names] if cache is not None else []
    known = [cost.seconds for cost in costs if cost is not None]
    if len(known) == len(names):
        return known
    found = measure()
    if cache is not None:
        for name, number in zip(names, found, strict=True):
            cache.put(name, OpCost(number, 0, estimated=False), memory_limit_bytes=0)
        cache.save()
    return found


def _bandwidth(seconds: float, latency_seconds: float) -> float:
    """Bytes per second beyond the latency; at least half of the sample's time counts."""
    return SAMPLE_BYTES / max(seconds - latency_seconds, seconds / 2)


def _transfer_seconds(store: OffloadStore, nbytes: int, device: Device) -> tuple[float, float]:
    """The median time of a write and of a read, after one warm-up.

    On a device without memory for a sample and a copy of it, times of a smaller sample are scaled up.
    """
    numbers = torch.Generator().manual_seed(0)
    sample = device.scratch(nbytes, times=2)
    sample.copy_(torch.empty(len(sample), dtype=torch.uint8).random_(generator=numbers))
    times = [_round_trip(store, sample, device) for _ in range(1 + RUNS)][1:]
    scale = nbytes / len(sample)
    return median(write for write, _ in times) * scale, median(read for _, read in times) * scale


def _round_trip(store: OffloadStore, sample: Tensor, device: Device) -> tuple[float, float]:
    def write() -> OffloadHandle:
        handle = store.offload(sample)
        handle.free_value()
        return handle

    handle, there = device.timed(write)
    _, back = device.timed(lambda: handle.prefetch().wait())
    return there.seconds, back.seconds


def _lost_share(store: OffloadStore, device: Device) -> float:
    """The share of a second that compute loses beside a second of transfers; 0 to 1.

    Copies from an accelerator do not slow its compute.
    """
    if device.torch_device.type != "cpu":
        return 0.0
    matrix = torch.ones(MATRIX, MATRIX)
    out = torch.empty_like(matrix)

    def rate(beside: Thread | None = None) -> float:
        begin, done = time.perf_counter(), 0
        while done == 0 or (done < PRODUCTS if beside is None else beside.is_alive()):
            torch.mm(matrix, matrix, out=out)
            done += 1
        return done / (time.perf_counter() - begin)

    sample = torch.ones(SAMPLE_BYTES, dtype=torch.uint8)
    rate()
    shares = []
    for _ in range(RUNS):
        alone = rate()
        copies = Thread(target=_round_trip, args=(store, sample, device))
        copies.start()
        shares.append(1 - rate(copies) / alone)
        copies.join()
    return min(1.0, max(0.0, median(shares)))
