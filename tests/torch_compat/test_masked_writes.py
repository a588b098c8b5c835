"""Trained values written to where a mask says: the graph ends there, and is not made in vain before."""

import copy
from typing import Any

import pytest
import torch
from torch import nn

import lowtide
from lowtide.torch_compat import aot_autograd

WIDTH = 8


class Words(nn.Embedding):
    def __init__(self) -> None:
        super().__init__(10, WIDTH)
        self.special = nn.Parameter(torch.randn(WIDTH))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        found = super().forward(ids) * 2
        found[ids == 3] = self.special.sin()
        return found


class Inner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.layer = Words(), nn.Linear(WIDTH, WIDTH)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.layer(self.words(ids)).relu()


class Outer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.layer = Inner(), nn.Linear(WIDTH, WIDTH)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.layer(self.inner(ids)).square().sum()


def test_no_graph_is_made_in_vain(monkeypatch: pytest.MonkeyPatch) -> None:
    failed: list[BaseException] = []
    plain = aot_autograd.compile_graph

    def watch(*args: Any, **options: Any) -> Any:
        try:
            return plain(*args, **options)
        except BaseException as error:
            failed.append(error)
            raise

    monkeypatch.setattr(aot_autograd, "compile_graph", watch)
    torch.manual_seed(0)
    planned, ids = Outer(), torch.arange(12).reshape(3, 4) % 5
    eager = copy.deepcopy(planned)
    found = lowtide.profile(planned, ids)
    found.plan(found.peak_bytes).apply(planned)
    for batch in (ids, ids.flip(0)):
        planned(batch).backward()
        eager(batch).backward()
    assert not failed
    for ours, plain_one in zip(planned.parameters(), eager.parameters(), strict=True):
        assert torch.equal(ours.grad, plain_one.grad)
