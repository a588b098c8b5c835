"""Discrete decisions on an accelerator: routes are made once; levers for masks and indices still apply."""

from functools import partial
from typing import Any

import pytest
import torch
from accelerator_cases import as_target, check
from torch import nn

import lowtide


class Experts(nn.Module):
    """Each row goes to its best two experts of four."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(32, 4)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32)) for _ in range(4)
        )

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        weights, chosen = self.gate(rows).softmax(-1).topk(2)
        total = rows
        for number, expert in enumerate(self.experts):
            share = (weights * (chosen == number)).sum(-1, keepdim=True)
            best = share.flatten().topk(len(rows) // 2).indices
            total = total.index_add(0, best, share[best] * expert(rows[best]))
        return total


class Choices(nn.Module):
    """Sorts, compares and searches, and reads by what it finds."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer, self.table = nn.Linear(32, 32), nn.Linear(32, 32), nn.Embedding(3, 32)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        value = self.inner(rows).relu()
        order = value.sum(-1).argsort()
        rank = (value.mean(-1) > 0.1).long() + (value.mean(-1) > 0.3).long()
        kept = torch.where(value > 0.2, value, value * 0.5)
        return self.outer(kept[order]).sort(-1).values + self.table(rank)


def recomputed(plan: lowtide.Plan) -> set[str]:
    runs = plan.solution.schedule.runs
    return {plan.step.nodes[run.rank].op for run in runs if not run.is_first and _recomputes(plan, run)}


def _recomputes(plan: lowtide.Plan, run: Any) -> bool:
    return run.rule not in ("bits", "sign", "narrow", "swap")


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("kind", "decisions"),
    [(Experts, {"aten.topk.default"}), (Choices, {"aten.sort.default", "aten.argsort.default"})],
)
def test_routes_are_made_once(kind: type[nn.Module], decisions: set[str], device: torch.device) -> None:
    model = nn.Sequential(*(kind() for _ in range(2)))
    plan = check(as_target(model, torch.randn(1024, 32)), device, share=0.65, steps=2)
    again = recomputed(plan)
    assert again and not again & decisions
    fixed = {node.fixed for node in plan.step.nodes if node.op in decisions}
    assert fixed == {"a discrete decision: made once, since a recomputed one could differ"}


def test_a_comparison_that_chooses_rows_is_made_once(device: torch.device) -> None:
    target = as_target(Choices(), torch.randn(4096, 32))
    model = target.model.to(device)
    profile = lowtide.profile(model, tuple(value.to(device) for value in target.batch), loss=target.loss)
    greater = [node for node in profile.step.nodes if node.op == "aten.gt.Scalar"]
    rules = [{remat.rule for remat in node.remats} for node in greater]
    assert [("again" in names) for names in rules] == [False, False, True]


def test_the_cpu_has_the_same_rule() -> None:
    profile = lowtide.profile(Experts(), (torch.randn(256, 32),), loss=squares)
    topks = [node for node in profile.step.nodes if node.op == "aten.topk.default"]
    assert topks and not any(node.remats for node in topks)


def squares(output: torch.Tensor) -> torch.Tensor:
    return output.float().square().mean()


def convolutions() -> nn.Module:
    def block(inputs: int) -> list[nn.Module]:
        return [nn.Conv2d(inputs, 16, 3, padding=1), nn.GroupNorm(4, 16), nn.ReLU(), nn.Dropout(0.1)]

    return nn.Sequential(*block(3), nn.MaxPool2d(2), *block(16), nn.SiLU(), *block(16), nn.MaxPool2d(2))


def words() -> nn.Module:
    layers = [nn.LayerNorm(64), nn.Linear(64, 64), nn.GELU(), nn.Dropout(0.1), nn.SiLU(), nn.Dropout(0.3)]
    return nn.Sequential(nn.Embedding(100, 64), *(layer for _ in range(3) for layer in layers))


@pytest.mark.parametrize("dtype", [pytest.param(None, marks=pytest.mark.long), torch.bfloat16])
@pytest.mark.parametrize("make", [convolutions, words])
def test_masks_and_indices_are_packed(make: Any, dtype: torch.dtype | None, device: torch.device) -> None:
    batch = torch.randn(16, 3, 32, 32) if make is convolutions else torch.randint(0, 100, (32, 64))
    autocast = partial(torch.autocast, device.type, dtype or torch.bfloat16, enabled=dtype is not None)
    target = as_target(make(), batch, within=autocast, loss=squares)
    plan = check(target, device, share=0.6, cache=False)
    rules = {remat.rule for node in plan.step.nodes for remat in node.remats}
    assert "bits" in rules
    assert ({"sign", "narrow"} <= rules) == (make is convolutions)
