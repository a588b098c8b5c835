"""An exception in forward comes through unchanged, and the next step works as if it had not been."""

import copy
import gc
import weakref
from collections.abc import Callable

import pytest
import torch
from torch import nn

import lowtide
from lowtide.runtime.runner import runner_of

WIDTH = 24

pytestmark = pytest.mark.slow


class Picky(nn.Module):
    """Raises for a batch of five rows, or when told to."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            *(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Dropout(0.1)) for _ in range(3))
        )
        self.bad = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.shape[0] == 5:
            raise KeyError("five rows")
        hidden = self.layers(x)
        if self.bad:
            raise ValueError("told to")
        return hidden.square().sum()


def batch(rows: int = 32, width: int = WIDTH) -> torch.Tensor:
    return torch.randn(rows, width, generator=torch.Generator().manual_seed(rows))


def gradients(model: nn.Module) -> list[torch.Tensor]:
    model.zero_grad(set_to_none=True)
    torch.manual_seed(2)
    model(batch()).backward()
    return [parameter.grad for parameter in model.parameters()]


@pytest.fixture
def models() -> tuple[Picky, Picky]:
    plain = Picky()
    planned = copy.deepcopy(plain)
    found = lowtide.profile(planned, batch())
    found.plan(found.floor_bytes).apply(planned)
    return plain, planned


def fail_by_shape(model: Picky) -> None:
    with pytest.raises(KeyError, match="five rows"):
        model(batch(5))


def fail_by_value(model: Picky) -> None:
    model.bad = True
    with pytest.raises(ValueError, match="told to"):
        model(batch())
    model.bad = False


def fail_in_an_op(model: Picky) -> None:
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied") as caught:
        model(batch(width=WIDTH - 1))
    assert type(caught.value) is RuntimeError


def fail_in_the_call(model: Picky) -> None:
    with pytest.raises(TypeError, match="unexpected keyword"):
        model(batch(), more=1)


FAILS = (fail_by_shape, fail_by_value, fail_in_an_op, fail_in_the_call)


def check_after(fail: Callable[[Picky], None], plain: Picky, planned: Picky) -> None:
    for model in (plain, planned):
        model.zero_grad()  # gradients that are live at a call are counted from then on
        fail(model)
        fail(model)
    pairs = zip(gradients(plain), gradients(planned), strict=True)
    assert all(torch.equal(one, other) for one, other in pairs)
    runner = runner_of(planned)
    (graph,) = runner.schedules.first
    compiled = [segment.fingerprint for segment, *_ in runner.backend.graphs]
    assert compiled.count(graph.fingerprint) == 1, "the planned graph was compiled once"


@pytest.mark.parametrize(
    "fail",
    [
        *(fail_by_shape, fail_in_an_op),
        *(pytest.param(fail, marks=pytest.mark.long) for fail in (fail_by_value, fail_in_the_call)),
    ],
)
def test_the_first_step_works_after_a_call_that_failed(models: tuple[Picky, Picky], fail) -> None:
    check_after(fail, *models)


def test_the_next_step_works(models: tuple[Picky, Picky]) -> None:
    gradients(models[1])
    for fail in FAILS:
        check_after(fail, *models)


def test_a_failed_batch_is_let_go_of_at_once(models: tuple[Picky, Picky]) -> None:
    planned = models[1]
    bad = batch(width=WIDTH + 1)
    alive = weakref.ref(bad.untyped_storage())
    gc.collect()
    gc.disable()  # which would find it in its own time
    try:
        with pytest.raises(RuntimeError):
            planned(bad)
        del bad
        assert alive() is None
    finally:
        gc.enable()
