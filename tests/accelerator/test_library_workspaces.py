"""Workspaces that libraries keep from a thread's first product on are counted, wherever they were made."""

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from types import ModuleType

import pytest
import torch
from accelerator_cases import CASES, on, trained

import lowtide
from lowtide.ops import packing
from lowtide.planning.decisions import LIBRARY_WORKSPACES
from lowtide.profiling import library_workspaces
from lowtide.verification.measure_step import train_step
from lowtide.verification.verify_plan import verify
from lowtide.zoo.targets import Target

WORKSPACE_BYTES = 4 << 20


@contextmanager
def keeping_workspaces() -> Iterator[None]:
    """As torch does for cuBLAS, in this process and in fresh ones."""
    if not getattr(torch.standin, "keeps", False):
        torch.standin.keeps = True
        torch.standin.set_matmul_workspace(WORKSPACE_BYTES)
    yield


@pytest.fixture
def workspaces(standin: ModuleType) -> Iterator[Callable[[], int]]:
    """Bytes live on the device beyond those live before the case."""
    gc.collect()
    before = torch.accelerator.memory_allocated()
    library_workspaces._KEPT.clear()  # as in a fresh process
    packing._bytes_of_bits.cache_clear()
    standin.set_matmul_workspace(WORKSPACE_BYTES)
    yield lambda: before
    standin.reset()
    library_workspaces._KEPT.clear()


def planned(target: Target) -> lowtide.Plan:
    settings = {"optimizer": target.optimizer, "loss": target.loss}
    return lowtide.profile(target.model, target.batch, **settings).plan("65%")


def kept_bytes(plan: lowtide.Plan) -> int:
    step = plan.step
    assert step is not None
    return sum(storage.nbytes for storage in step.storages if storage.name == LIBRARY_WORKSPACES)


@pytest.mark.sample(2)
@pytest.mark.parametrize("trains_before", [False, True])
@pytest.mark.parametrize("model", ["mlp", "cnn"])
def test_in_budget_with_all_that_is_kept(
    model: str, trains_before: bool, workspaces: Callable[[], int], device: torch.device
) -> None:
    """The CNN's signs of ReLUs are packed by a table, which is cached as well and is no workspace."""
    target = on(CASES[model](), device)
    if trains_before:  # both threads have their workspace: a third one shows its size
        trained(on(CASES[model](), device), steps=1)
    plan = planned(target)
    assert kept_bytes(plan) >> 20 == (3 if trains_before else 2) * WORKSPACE_BYTES >> 20
    plan.apply(target.model)
    gc.collect()
    torch.accelerator.reset_peak_memory_stats()
    for _ in range(2):
        train_step(target.model, target.batch, target.optimizer, target.loss)
    peak_bytes = torch.accelerator.max_memory_allocated() - workspaces()
    assert abs(peak_bytes / plan.peak_bytes - 1) < 0.005, (peak_bytes, plan.peak_bytes)
    assert peak_bytes <= plan.budget_bytes


def test_a_second_profile_counts_them_too(workspaces: Callable[[], int], device: torch.device) -> None:
    plans = [planned(on(CASES[name](), device)) for name in ("mlp", "cnn")]
    # the CNN unpacks bits, and a table for that stays as well
    assert [kept_bytes(plan) >> 20 for plan in plans] == [2 * WORKSPACE_BYTES >> 20] * 2


def test_workspaces_that_were_freed_are_measured_anew(
    workspaces: Callable[[], int], standin: ModuleType, device: torch.device
) -> None:
    first = planned(on(CASES["mlp"](), device))
    standin.set_matmul_workspace(WORKSPACE_BYTES // 2)  # frees those of before
    second = planned(on(CASES["mlp"](), device))
    assert [kept_bytes(first), kept_bytes(second)] == [2 * WORKSPACE_BYTES, WORKSPACE_BYTES]


@pytest.mark.long
def test_verify_shows_them(workspaces: Callable[[], int], device: torch.device) -> None:
    target = replace(on(CASES["mlp"](), device), within=keeping_workspaces)
    found = verify(target, planned(target), timed_runs=0, resident=False)
    assert found.exact and found.fits and found.fresh_process
    for predicted, measured in (
        (found.predicted_peak_bytes, found.measured_peak_bytes),
        (found.baseline_predicted_peak_bytes, found.baseline_measured_peak_bytes),
    ):
        assert abs(measured / predicted - 1) < 0.005


def test_nothing_is_kept_where_libraries_keep_nothing(standin: ModuleType, device: torch.device) -> None:
    assert kept_bytes(planned(on(CASES["mlp"](), device))) == 0
