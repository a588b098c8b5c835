"""The bytes of a loop, from the blocks that its allocator hands out."""

import gc
import threading

import pytest
import torch
from torch import nn

import lowtide
from lowtide.runtime.loop_watch import live_blocks
from lowtide.runtime.runner import runner_of
from lowtide.torch_compat.allocation_record import AllocationRecord
from lowtide.torch_compat.autograd_engine import profiler_is_active


def test_blocks_are_counted_up_to_the_mark() -> None:
    assert live_blocks([100, 40, -40, -7, None, 1000, -100]) == (140, 100)
    assert live_blocks([100]) is None, "no backward pass was seen"


def test_a_record_has_the_blocks_of_its_thread() -> None:
    old = torch.ones(1000)
    record = AllocationRecord(lambda: None)
    assert record.start() and not AllocationRecord(lambda: None).start()
    new = torch.ones(50)
    other = threading.Thread(target=lambda: torch.ones(70))
    other.start()
    other.join()
    record.mark()
    del old, new
    assert record.can_stop
    assert record.stop() == [200, None, -200]
    assert not profiler_is_active()


def test_the_next_call_is_watched_where_a_backward_pass_ran_in_another_thread() -> None:
    model, x = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8)), torch.ones(4, 8)
    lowtide.checkpoint(model, x, budget="1GB")
    loss = model(x).exp().sum()
    thread = threading.Thread(target=loss.backward)
    thread.start()
    thread.join()
    loss = model(x).exp().sum()
    assert profiler_is_active()
    loss.backward()
    model(x)
    assert not profiler_is_active() and runner_of(model) is not None


def test_older_garbage_is_set_aside_while_a_watch_is_on(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8)), torch.ones(4, 8)
    lowtide.checkpoint(model, x, budget="1GB")
    gc.unfreeze()  # the tests' own
    with monkeypatch.context() as patched:
        patched.setattr(gc, "collect", lambda: pytest.fail("a scan of all objects, for every new shape"))
        loss = model(x).exp().sum()
    assert profiler_is_active() and gc.get_freeze_count()
    loss.backward()
    model(x)
    assert not gc.get_freeze_count()
