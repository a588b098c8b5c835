"""Page faults: what taking memory from the system anew costs, and time without it.

An op that is run alone gets its result in memory that the system has just handed out, where that is large:
each page of it is zeroed and mapped at its first write, which takes several times as long as writing it. In a
step the same memory goes from op to op. Which blocks a step takes anew depends on the C library, on small
objects that happen to lie between large blocks, and on what the process did before; it changes from step to
step (`bench/predicted.py` counts). So that costs are of the op alone, faults are counted in every timed run
and taken off at what one costs here.

Shortcomings: a fault is taken to cost the same in every op, and as much as in a write by all threads.
"""

import mmap
import resource
import statistics
import time
from functools import cache

import torch

_AREA_BYTES = 32 << 20
_PIECE_BYTES = 1 << 20
"""Written in less time than a busy machine lets a process run at a time."""

_ALL_PAGES = 0.9
"""Of the pages of an area that is written, how many have to fault one by one for their cost to be known."""

_LEAST_SHARE = 1 / 16
"""Of a run's time that is left at least: faults never were all that an op did."""


def page_faults() -> int:
    """Pages that this process was given so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt


def without_faults(seconds: float, num_faults: int, *, fault_seconds: float) -> float:
    """What a run would have taken in memory that was there before."""
    return max(seconds * _LEAST_SHARE, seconds - num_faults * fault_seconds)


@cache
def page_fault_seconds() -> float:
    """What one fault adds to a write; 0 where the system gives pages in larger lots, whose number does
    not tell how much memory came."""
    with mmap.mmap(-1, _AREA_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as area:
        before = page_faults()
        first = _piece_seconds(area)
        count = page_faults() - before
        again = _piece_seconds(area)
    if count < _ALL_PAGES * _AREA_BYTES / mmap.PAGESIZE:
        return 0.0
    return max(0.0, first - again) * mmap.PAGESIZE / _PIECE_BYTES


def _piece_seconds(area: mmap.mmap) -> float:
    """What it takes to write to one piece of an area; a function of its own, since nothing may look at an
    area that is closed."""
    seconds = []
    for piece in torch.frombuffer(area, dtype=torch.uint8).view(-1, _PIECE_BYTES).unbind():
        start = time.perf_counter()
        piece.fill_(1)
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds)
