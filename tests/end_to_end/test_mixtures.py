"""Mixtures of experts: routes are made once, and other token counts plan nothing anew."""

import copy
import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from budgets import between
from torch import nn
from torch.nn import functional
from training import Results, differences, measured_peak
from transformers import (
    MixtralConfig,
    MixtralForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

import lowtide
import lowtide.remat
from lowtide.runtime.runner import runner_of
from lowtide.zoo.targets import Target

pytestmark = pytest.mark.slow

WIDTH, EXPERTS, CHOSEN, WORDS, STEPS = 32, 4, 2, 50, 6
DECIDING = ("topk", "sort", "argsort", "argmax", "multinomial", "nonzero", "max")


class Router(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, EXPERTS, bias=False)

    def forward(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        weights, chosen = torch.topk(functional.softmax(self.gate(rows), -1), CHOSEN)
        return weights / weights.sum(-1, keepdim=True), chosen


class OneByOne(Router):
    """Experts of their own, and a loop over them."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.SiLU(), nn.Linear(2 * WIDTH, WIDTH))
            for _ in range(EXPERTS)
        )

    def forward(self, rows: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        weights, chosen = super().forward(rows)
        return self.mixed(rows, weights, chosen)

    def mixed(self, rows: torch.Tensor, weights: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError


class ByWhere(OneByOne):
    def mixed(self, rows: torch.Tensor, weights: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
        result = torch.zeros_like(rows)
        for number, expert in enumerate(self.experts):
            tokens, place = torch.where(chosen == number)
            made = expert(rows[tokens]) * weights[tokens, place, None]
            result.index_add_(0, tokens, made.to(result.dtype))
        return result


class OnlyHit(OneByOne):
    """A loop over as many experts as were chosen at all."""

    def mixed(self, rows: torch.Tensor, weights: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
        result = torch.zeros_like(rows)
        with torch.no_grad():
            mask = functional.one_hot(chosen, EXPERTS).permute(2, 1, 0)
            hit = mask.sum((-1, -2)).greater(0).nonzero()
        for number in hit:
            place, tokens = torch.where(mask[number[0]])
            made = self.experts[int(number)](rows[tokens]) * weights[tokens, place, None]
            result.index_add_(0, tokens, made.to(result.dtype))
        return result


class BySplit(OneByOne):
    def counts(self, chosen: torch.Tensor) -> Any:
        return torch.bincount(chosen.view(-1), minlength=EXPERTS).tolist()

    def mixed(self, rows: torch.Tensor, weights: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
        order = chosen.view(-1).argsort(stable=True)
        parts = torch.split(rows[order // CHOSEN], self.counts(chosen))
        made = torch.cat([expert(part) for expert, part in zip(self.experts, parts, strict=True)])
        made = made * weights.view(-1)[order][:, None]
        return torch.zeros_like(rows).index_add_(0, order // CHOSEN, made.to(rows.dtype))


class BySlices(OneByOne):
    def mixed(self, rows: torch.Tensor, weights: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
        order = chosen.view(-1).argsort(stable=True)
        sorted_rows, made, start = rows[order // CHOSEN], [], 0
        counts = functional.one_hot(chosen, EXPERTS).sum((0, 1)).numpy()
        for number, count in enumerate(counts):
            if count:
                made.append(self.experts[number](sorted_rows[start : start + count]))
                start += count
        weighted = torch.cat(made) * weights.view(-1)[order][:, None]
        return torch.zeros_like(rows).index_add_(0, order // CHOSEN, weighted.to(rows.dtype))


class Grouped(Router):
    """All experts in one op."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(EXPERTS, WIDTH, 2 * WIDTH) / WIDTH**0.5)
        self.down = nn.Parameter(torch.randn(EXPERTS, 2 * WIDTH, WIDTH) / WIDTH**0.5)

    def counts(self, chosen: torch.Tensor) -> torch.Tensor:
        return torch.histc(chosen.float(), bins=EXPERTS, min=0, max=EXPERTS - 1)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        weights, chosen = super().forward(rows)
        order = chosen.view(-1).argsort()
        ends = self.counts(chosen.view(-1)).cumsum(0).to(torch.int32)
        inner = functional.silu(functional.grouped_mm(rows[order // CHOSEN], self.up, offs=ends))
        made = functional.grouped_mm(inner, self.down, offs=ends) * weights.view(-1)[order][:, None]
        return torch.zeros_like(rows).index_add_(0, order // CHOSEN, made)


class Counted(Grouped):
    def counts(self, chosen: torch.Tensor) -> torch.Tensor:
        return torch.bincount(chosen, minlength=EXPERTS)


class Net(nn.Module):
    def __init__(self, kind: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.layers = nn.ModuleList(kind() for _ in range(2))
        self.last = nn.Linear(WIDTH, WORDS)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        rows = self.words(words).flatten(0, 1)
        for layer in self.layers:
            rows = rows + layer(functional.layer_norm(rows, (WIDTH,)))
        return self.last(rows)


def other_tokens() -> list[torch.Tensor]:
    """Batches of fewer and fewer different words, so that the last ones leave experts without a token."""
    torch.manual_seed(1)
    return [torch.randint(WORDS, (4, 32)) % (1 + 40 // 3**step) for step in range(STEPS)]


def squares(output: Any) -> torch.Tensor:
    return getattr(output, "logits", output).float().square().mean()


def target_of(model: nn.Module) -> Target:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    return Target("mixture", model, (other_tokens()[0],), optimizer, squares)


def trained(target: Target, batches: list[torch.Tensor]) -> Results:
    """Losses, gradients and parameters of one step with each batch."""
    found: Results = []
    assert target.optimizer is not None
    for number, batch in enumerate(batches):
        target.optimizer.zero_grad()
        loss = squares(target.model(batch))
        loss.backward()
        found.append((f"loss {number}", loss.detach().clone()))
        for name, parameter in target.model.named_parameters():
            found.append((f"gradient of {name} {number}", copy.deepcopy(parameter.grad)))
        target.optimizer.step()
        found += [(f"{name} {number}", tensor.detach().clone()) for name, tensor in
                  target.model.named_parameters()]  # fmt: skip
    return found


def check_steps(model: nn.Module, caplog: pytest.LogCaptureFixture, *, share: float) -> lowtide.Plan:
    """Train with other tokens in every step: as in eager, by the graphs and the plan of the first step."""
    plain, planned = target_of(copy.deepcopy(model)), target_of(model)
    expected = trained(plain, other_tokens())
    found = lowtide.profile(planned.model, planned.batch, optimizer=planned.optimizer, loss=planned.loss)
    plan = found.plan(between(found, share))
    plan.apply(planned.model)
    with caplog.at_level(logging.INFO, logger="lowtide"):
        seen = trained(planned, other_tokens()[:1])
        num_graphs = runner_of(planned.model).compiled.num_graphs
        seen += [
            (f"{name.rpartition(' ')[0]} {int(name.rpartition(' ')[2]) + 1}", value)
            for name, value in trained(planned, other_tokens()[1:])
        ]
    assert differences(expected, seen) == []
    assert not [record for record in caplog.records if "a new graph (" in record.getMessage()]
    assert runner_of(planned.model).compiled.num_graphs == num_graphs, "traced again"
    assert measured_peak(planned) <= plan.budget_bytes
    return plan


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("kind", "dtype", "most_graphs"),
    [
        (ByWhere, torch.float32, 7),
        (OnlyHit, torch.bfloat16, 7),
        (BySplit, torch.float32, 9),
        (BySlices, torch.bfloat16, 7),
        (Grouped, torch.float32, 1),
        (Grouped, torch.bfloat16, 1),
        (Counted, torch.float32, 1),
    ],
)
def test_other_token_counts_plan_nothing_anew(
    kind: type[Router], dtype: torch.dtype, most_graphs: int, caplog: pytest.LogCaptureFixture
) -> None:
    torch.manual_seed(0)
    plan = check_steps(Net(kind).to(dtype), caplog, share=0.3)
    assert len([graph for graph in plan.step.graphs if graph.in_model]) <= most_graphs


SIZES: dict[str, Any] = {
    "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2,
    "vocab_size": WORDS, "intermediate_size": 64, "use_cache": False,
}  # fmt: skip


def mixtral() -> nn.Module:
    return MixtralForCausalLM(MixtralConfig(**SIZES, num_local_experts=EXPERTS))


def qwen3() -> nn.Module:
    sizes = {**SIZES, "moe_intermediate_size": 32, "num_experts": EXPERTS, "head_dim": 16}
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(**sizes, num_experts_per_tok=2))


@pytest.mark.long
@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("make", "experts"),
    [(mixtral, "eager"), (mixtral, "grouped_mm"), (qwen3, "grouped_mm")],
)
def test_mixtures_of_transformers(
    make: Callable[[], Any], experts: str, caplog: pytest.LogCaptureFixture
) -> None:
    torch.manual_seed(0)
    model = make().train()
    model.set_experts_implementation(experts)
    plan = check_steps(model, caplog, share=0.3)
    graphs = [graph for graph in plan.step.graphs if graph.in_model]
    assert len(graphs) == 1 or experts == "eager"


def recomputed(plan: lowtide.Plan) -> set[str]:
    """The ops that the backward pass runs again, chunks and replays included."""
    nodes = plan.step.nodes
    runs = plan.solution.schedule.runs
    again = [run for run in runs if not run.is_first and run.rule not in ("bits", "sign", "narrow", "swap")]
    return {nodes[run.rank].op.split(".")[1] for run in again if "." in nodes[run.rank].op}


class Drawn(Grouped):
    """Experts are drawn, and the order of tokens is not stable."""

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        number = torch.multinomial(functional.softmax(self.gate(rows), -1), 1).view(-1)
        order = number.argsort()
        ends = self.counts(number).cumsum(0).to(torch.int32)
        inner = functional.silu(functional.grouped_mm(rows[order], self.up, offs=ends))
        made = functional.grouped_mm(inner, self.down, offs=ends)
        return torch.zeros_like(rows).index_add_(0, order, made)


@pytest.mark.parametrize("kind", [Grouped, Counted, Drawn])
def test_routes_are_made_once(kind: type[Router]) -> None:
    plan = plan_of(Net(kind), 0.0)
    again = recomputed(plan)
    assert again and not again & set(DECIDING)


def test_the_rule_is_what_keeps_routes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lowtide.remat, "is_decision", lambda _node: False)
    assert recomputed(plan_of(Net(Grouped), 0.0)) & set(DECIDING)


def plan_of(model: nn.Module, share: float) -> lowtide.Plan:
    torch.manual_seed(0)
    target = target_of(model)
    found = lowtide.profile(
        target.model, target.batch, optimizer=target.optimizer, loss=target.loss, cache=False
    )
    return found.plan(between(found, share))
