"""The first call of a mathematical function runs on one thread."""

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from lowtide.runtime.call_schedules import Schedules
from lowtide.runtime.runner import Runner, install
from lowtide.torch_compat.dispatch import FUNCTIONS, make_first_calls
from lowtide.verification.fresh_process import run_fresh


class Recorder(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.calls: set[tuple[str, torch.dtype, int]] = set()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if isinstance(args[0], torch.Tensor):
            self.calls.add((function.overloadpacket.__name__, args[0].dtype, args[0].numel()))
        return function(*args, **(kwargs or {}))


def test_every_function_is_called_with_one_value_and_only_once() -> None:
    make_first_calls.cache_clear()
    with Recorder() as recorder:
        make_first_calls()
    assert recorder.calls >= {
        (name, dtype, 1) for name in FUNCTIONS for dtype in (torch.float32, torch.float64)
    }
    with Recorder() as recorder:
        make_first_calls()
    assert recorder.calls == set()


def calls_made() -> int:
    return make_first_calls.cache_info().currsize


def test_they_are_made_before_anything_is_measured_or_planned() -> None:
    assert run_fresh("test_dispatch:calls_made") == 1
    make_first_calls.cache_clear()
    install(Runner(torch.nn.Linear(1, 1), Schedules()))
    assert calls_made() == 1
