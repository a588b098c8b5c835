"""Scripts that take only the name of a backend: the environment gives the budget."""

import copy

import pytest
import torch
from torch import nn

import lowtide
from lowtide.errors import BadSize

pytestmark = pytest.mark.slow

WIDTH, ROWS = 16, 512


@pytest.fixture(autouse=True)
def forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LOWTIDE_BUDGET", raising=False)
    torch.compiler.reset()


def network() -> nn.Module:
    torch.manual_seed(0)
    blocks = (nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.GELU()) for _ in range(2))
    return nn.Sequential(*blocks, nn.Linear(WIDTH, 1))


def cause(failed: pytest.ExceptionInfo[BaseException]) -> BaseException:
    """What the backend raised: torch wraps it."""
    return failed.value.__cause__ or failed.value.inner_exception


def test_training_and_evaluation_of_any_shape(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = network()
    planned = copy.deepcopy(plain)
    found = lowtide.profile(copy.deepcopy(plain), torch.randn(ROWS, WIDTH))
    monkeypatch.setenv("LOWTIDE_BUDGET", str((found.peak_bytes + found.floor_bytes) // 2))
    compiled = torch.compile(planned, backend="lowtide")
    for _ in range(2):
        batch = torch.randn(ROWS, WIDTH)
        for model in (plain, compiled):
            model.train()
            model.zero_grad()
            model(batch).square().mean().backward()
        pairs = zip(plain.parameters(), planned.parameters(), strict=True)
        assert all(torch.equal(one.grad, other.grad) for one, other in pairs)
        assert all(map(torch.equal, plain.buffers(), planned.buffers()))
        for rows in (ROWS, 5, 7):
            batch = torch.randn(rows, WIDTH)
            with torch.no_grad():
                assert torch.equal(*(model.eval()(batch) for model in (plain, compiled)))


def test_options_come_before_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOWTIDE_BUDGET", "1KB")
    compiled = torch.compile(network(), backend="lowtide", options={"budget": "1GB"})
    compiled(torch.randn(ROWS, WIDTH)).sum().backward()
    with pytest.raises(Exception, match="cannot fit in 1000 bytes"):
        torch.compile(network(), backend="lowtide")(torch.randn(ROWS, WIDTH))


@pytest.mark.parametrize(
    ("value", "kind", "words"),
    [
        (None, lowtide.LowtideError, ["LOWTIDE_BUDGET=8GiB", 'options={"budget": "8GiB"}']),
        ("", lowtide.LowtideError, ["LOWTIDE_BUDGET=8GiB"]),
        ("8GX", BadSize, ["'8GX'"]),
    ],
)
def test_a_budget_that_is_missing_or_cannot_be_read(
    value: str | None, kind: type[Exception], words: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    if value is not None:
        monkeypatch.setenv("LOWTIDE_BUDGET", value)
    with pytest.raises(Exception) as failed:
        torch.compile(network(), backend="lowtide")(torch.randn(ROWS, WIDTH))
    assert isinstance(cause(failed), kind)
    assert all(word in str(failed.value) for word in words)
    assert "\n" not in str(cause(failed))


def test_training_with_another_shape_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOWTIDE_BUDGET", "1GB")
    compiled = torch.compile(network(), backend="lowtide")
    compiled(torch.randn(ROWS, WIDTH)).sum().backward()
    with pytest.raises(Exception, match="TORCH_DYNAMO_AUTOMATIC_DYNAMIC_SHAPES=0"):
        compiled(torch.randn(9, WIDTH))
