"""Offloading on streams: exact and free of races, and the stand-in tells where it is not.

Each way to break the store must be noticed, or the cases that find no race say nothing.
"""

from collections.abc import Callable
from types import ModuleType

import pytest
import torch
from accelerator_cases import as_target, different, on, trained
from offload_plans import offload_plan
from torch import nn
from training import twin

import lowtide
from lowtide.offload.host_store import HostStore
from lowtide.plans import Plan
from lowtide.zoo.targets import Target


def no_waiting(patch: pytest.MonkeyPatch) -> None:
    """Nobody waits for copies."""
    patch.setattr(HostStore, "wait", lambda *_: None)


def no_ordering(patch: pytest.MonkeyPatch) -> None:
    """Copies do not wait for the op that made the value."""

    def copy(
        self: HostStore, target: torch.Tensor, source: torch.Tensor, stream: torch.Stream
    ) -> torch.Event:
        with stream:
            target.copy_(source, non_blocking=True)
        return stream.record_event()

    patch.setattr(HostStore, "copy", copy)


BROKEN: dict[str, Callable[[pytest.MonkeyPatch], None]] = {
    "no waiting": no_waiting,
    "no ordering": no_ordering,
}


@pytest.fixture(scope="module")
def offloaded(device: torch.device) -> tuple[Target, Plan]:
    """A target, and a plan that offloads all it can."""
    torch.manual_seed(0)
    layers = [layer for _ in range(4) for layer in (nn.Linear(128, 128), nn.GELU())]
    target = on(as_target(nn.Sequential(*layers), torch.randn(512, 128)), device)
    known = twin(target)
    profile = lowtide.profile(
        known.model, known.batch, optimizer=known.optimizer, loss=known.loss, offload="host"
    )
    plan = offload_plan(profile, delay=2, ahead=2)
    assert plan.solution.offload is not None
    assert plan.solution.offload.store_bytes > 4 * 512 * 128 * 4
    return target, plan


def differences(offloaded: tuple[Target, Plan]) -> list[str]:
    """What differs between eager training and training by the plan."""
    target, plan = offloaded
    eager, planned = twin(target), twin(target)
    plan.apply(planned.model)
    return different(trained(eager), trained(planned))


@pytest.mark.parametrize("is_lazy", [False, True], ids=["at once", "lazy"])
def test_offloading_is_exact_and_free_of_races(
    is_lazy: bool, offloaded: tuple[Target, Plan], standin: ModuleType
) -> None:
    standin.set_lazy(is_lazy)
    assert differences(offloaded) == []
    assert standin.take_races() == []


@pytest.mark.parametrize("name", BROKEN)
@pytest.mark.parametrize("is_lazy", [False, True], ids=["at once", "lazy"])
def test_a_broken_store_is_noticed(
    name: str,
    is_lazy: bool,
    offloaded: tuple[Target, Plan],
    standin: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    BROKEN[name](monkeypatch)
    standin.set_lazy(is_lazy)
    assert bool(differences(offloaded)) is is_lazy  # at once, all is over before anybody could come too early
    assert standin.take_races() != []
