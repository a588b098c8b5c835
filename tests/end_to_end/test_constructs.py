"""Whatever else models are made of: exact and within the budget."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
from budgets import between
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations, parametrize
from torch.utils.checkpoint import checkpoint, checkpoint_sequential
from training import differences, measured_peak, train
from two_layers import ROWS, WIDTH, Two, quantized, rows

import lowtide
from lowtide.analyze.captured_step import SCALARS_BYTES
from lowtide.zoo.targets import Target

pytestmark = pytest.mark.slow


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad * 3 * ctx.saved_tensors[0]


@dataclass
class Answer:
    loss: torch.Tensor
    extra: Any = None


class Pair(NamedTuple):
    logits: torch.Tensor
    hidden: torch.Tensor


class Box:
    """A class of the user's, of which torch knows nothing."""

    def __init__(self, value: torch.Tensor) -> None:
        self.value = value


class Symmetric(nn.Module):
    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return weight.triu() + weight.triu(1).T


def _counts(self: Two, x: torch.Tensor) -> torch.Tensor:
    self.calls += 1
    return (self.last(self.first(x).tanh()) / self.calls).square().mean()


def _averages(self: Two, x: torch.Tensor) -> torch.Tensor:
    hidden = self.first(x)
    with torch.no_grad():
        self.seen.mul_(0.9).add_(hidden.mean(0), alpha=0.1)
    return self.last(hidden.tanh() - self.seen).square().mean()


def _replaces(self: Two, x: torch.Tensor) -> torch.Tensor:
    hidden = self.first(x)
    self.seen = self.seen * 0.9 + hidden.detach().mean(0) * 0.1
    return self.last(hidden.tanh() - self.seen).square().mean()


def _own_generator(self: Two, x: torch.Tensor) -> torch.Tensor:
    hidden = self.first(x)
    return self.last(hidden * torch.rand(hidden.shape, generator=self.generator)).square().mean()


def _hooked(self: Two, x: torch.Tensor) -> torch.Tensor:
    hidden = self.first(x)
    hidden.register_hook(lambda grad: grad * 2)
    return self.last(hidden.tanh()).square().mean()


def _checkpointed(self: Two, x: torch.Tensor, *, reentrant: bool) -> torch.Tensor:
    hidden = self.first(x)
    hidden = checkpoint(lambda h: F.dropout(self.last(h.tanh()), 0.3), hidden, use_reentrant=reentrant)
    return self.last(hidden).square().mean()


class Experts(nn.Module):
    """The loop over experts as it is written by hand: each gets the rows that the router picks for it."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.router, self.last = (nn.Linear(WIDTH, n) for n in (WIDTH, 4, WIDTH))
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.SiLU()) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x).tanh()
        weights, chosen = self.router(x).softmax(-1).topk(2, -1)
        mask = F.one_hot(chosen, len(self.experts)).permute(2, 1, 0)
        total = torch.zeros_like(x)
        for number in range(len(self.experts)):
            place, top = torch.where(mask[number])
            total.index_add_(0, top, self.experts[number](x[top]) * weights[top, place, None])
        return self.last(total.tanh()).square().mean()


def _checkpointed_sequence(*, reentrant: bool) -> nn.Module:
    layers = nn.Sequential(*(Two(lambda s, x: s.last(s.first(x).tanh())) for _ in range(4)))
    return Two(
        lambda s, x: checkpoint_sequential(s.middle, 2, s.first(x), use_reentrant=reentrant).mean(),
        middle=layers,
    )


def _no_grad_block(self: Two, x: torch.Tensor) -> torch.Tensor:
    hidden = self.first(x)
    with torch.no_grad():
        wanted = self.last(hidden).softmax(-1)
    return -(wanted * self.last(hidden.tanh()).log_softmax(-1)).sum(-1).mean()


def _autocast_block(self: Two, x: torch.Tensor) -> torch.Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        hidden = self.first(x)
        with torch.autocast("cpu", enabled=False):
            hidden = self.last(hidden.float().tanh())
        hidden = self.last(hidden)
    return hidden.float().square().mean()


def _mapped(self: Two, x: torch.Tensor) -> torch.Tensor:
    return torch.vmap(lambda row: self.last(self.first(row).tanh()).square().sum())(x).mean()


def _gradient_inside(self: Two, x: torch.Tensor) -> torch.Tensor:
    return torch.func.grad(lambda rows: self.last(self.first(rows).tanh()).square().sum())(x).square().mean()


def _with(change: Callable[[Two], Any], **options: Any) -> Two:
    model = Two(**options)
    change(model)
    return model


def _bag(**options: Any) -> nn.Module:
    return nn.Sequential(nn.EmbeddingBag(100, WIDTH, **options), nn.Linear(WIDTH, WIDTH))


def _in_backward(model: nn.Module) -> None:
    optimizers = {p: torch.optim.SGD([p], lr=0.1) for p in model.parameters()}

    def step(parameter: torch.Tensor) -> None:
        optimizers[parameter].step()
        optimizers[parameter].zero_grad()

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(step)


class Waves(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH, dtype=torch.cfloat)
        self.last = nn.Linear(WIDTH, WIDTH, dtype=torch.cfloat)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.first(x).tanh()).abs().square().mean()


class Listed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ParameterList([torch.randn(WIDTH, WIDTH) for _ in range(3)])
        self.more = nn.ParameterDict({"scale": torch.randn(WIDTH)})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for weight in self.layers:
            x = (x @ weight).tanh()
        return (x * self.more["scale"]).square().mean()


def _warm(model: nn.Module) -> nn.Module:
    model(rows())
    return model


Case = tuple[Callable[[], nn.Module], Callable[[], Any], Any]

EXACT: dict[str, Case] = {
    "tensor hook": (lambda: Two(_hooked), rows, None),
    "parameter hook": (
        lambda: _with(lambda m: m.first.weight.register_hook(lambda g: g / 2)),
        rows,
        None,
    ),
    "backward hook on the model": (
        lambda: _with(lambda m: m.register_full_backward_hook(lambda *_: None)),
        rows,
        None,
    ),
    "backward pre-hook": (
        lambda: _with(lambda m: m.register_full_backward_pre_hook(lambda _, grads: (grads[0] * 3,))),
        rows,
        None,
    ),
    "forward hook": (
        lambda: _with(lambda m: m.first.register_forward_hook(lambda _m, _i, out: out * 2)),
        rows,
        None,
    ),
    "quantization-aware": (lambda: _warm(quantized()), rows, None),
    "autograd function": (lambda: Two(lambda s, x: s.last(Doubled.apply(s.first(x))).mean()), rows, None),
    "weight norm": (lambda: Two(middle=parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH))), rows, None),
    "old weight norm": (lambda: Two(middle=nn.utils.weight_norm(nn.Linear(WIDTH, WIDTH))), rows, None),
    "spectral norm": (
        lambda: Two(middle=parametrizations.spectral_norm(nn.Linear(WIDTH, WIDTH))),
        rows,
        None,
    ),
    "old spectral norm": (lambda: Two(middle=nn.utils.spectral_norm(nn.Linear(WIDTH, WIDTH))), rows, None),
    "orthogonal": (lambda: Two(middle=parametrizations.orthogonal(nn.Linear(WIDTH, WIDTH))), rows, None),
    "own parametrization": (
        lambda: _with(lambda m: parametrize.register_parametrization(m.first, "weight", Symmetric())),
        rows,
        None,
    ),
    "tied weights": (lambda: _with(lambda m: setattr(m.last, "weight", m.first.weight)), rows, None),
    "complex parameters": (Waves, lambda: torch.randn(ROWS, WIDTH, dtype=torch.cfloat), None),
    "lists of parameters": (Listed, rows, None),
    "bags": (lambda: _bag(mode="max"), lambda: torch.randint(0, 100, (ROWS, 4)), None),
    "returns a dataclass": (
        lambda: Two(lambda s, x: Answer(s.last(h := s.first(x).tanh()).mean(), {"h": h})),
        rows,
        None,
    ),
    "returns a named tuple": (
        lambda: Two(lambda s, x: Pair(s.last(h := s.first(x).tanh()), h)),
        rows,
        lambda out: out.logits.square().mean(),
    ),
    "returns nested dicts": (
        lambda: Two(lambda s, x: {"a": [s.last(h := s.first(x).tanh()), {"b": (h, 3, None)}]}),
        rows,
        lambda out: out["a"][0].square().mean(),
    ),
    "returns an object": (
        lambda: Two(lambda s, x: Box(s.last(s.first(x).tanh()))),
        rows,
        lambda out: out.value.square().mean(),
    ),
    "keywords": (
        lambda: Two(lambda s, x, *, scale: (s.last(s.first(x).tanh()) * scale).mean()),
        lambda: {"x": rows(), "scale": 3.0},
        None,
    ),
    "counts in Python": (lambda: Two(_counts), rows, None),
    "average in place": (lambda: Two(_averages), rows, None),
    "average set anew": (lambda: Two(_replaces), rows, None),
    "own generator": (lambda: Two(_own_generator), rows, None),
    "vmap": (lambda: Two(_mapped), rows, None),
    "func.grad": (lambda: Two(_gradient_inside), rows, None),
    "einsum": (
        lambda: Two(lambda s, x: torch.einsum("bi,ij,bj->b", s.first(x), s.last.weight, x).square().mean()),
        rows,
        None,
    ),
    "checkpoint": (lambda: Two(lambda s, x: _checkpointed(s, x, reentrant=False)), rows, None),
    "reentrant checkpoint": (lambda: Two(lambda s, x: _checkpointed(s, x, reentrant=True)), rows, None),
    "checkpointed sequence": (lambda: _checkpointed_sequence(reentrant=False), rows, None),
    "reentrant checkpointed sequence": (lambda: _checkpointed_sequence(reentrant=True), rows, None),
    "experts by hand": (Experts, rows, None),
    "transposed batch": (Two, lambda: torch.randn(WIDTH, ROWS).T, None),
    "expanded batch": (Two, lambda: torch.randn(1, WIDTH).expand(ROWS, WIDTH), None),
    "float64": (lambda: Two().double(), lambda: rows().double(), None),
    "bfloat16": (lambda: Two().bfloat16(), lambda: rows().bfloat16(), None),
    "no_grad block": (lambda: Two(_no_grad_block), rows, None),
    "autocast blocks": (lambda: Two(_autocast_block), rows, None),
    "batch with a gradient": (Two, lambda: rows().requires_grad_(), None),
}


def _target(name: str) -> Target:
    torch.manual_seed(0)
    build, batch, loss = EXACT[name]
    model = build()
    return Target(name, model, batch(), torch.optim.SGD(model.parameters(), lr=0.1), loss)


TESTED_ELSEWHERE = {
    *("old weight norm", "old spectral norm", "spectral norm", "tied weights", "returns nested dicts"),
    *("float64", "bfloat16", "average in place"),
}
"""The like of them is among the models written for trouble and in the sample of the coverage table."""


@pytest.mark.sample(8)
@pytest.mark.filterwarnings(
    "ignore:Full backward hook is firing:UserWarning",
    "ignore:torch.ao.quantization is deprecated:DeprecationWarning",
    "ignore:Please use quant_min and quant_max:UserWarning",
    "ignore:`torch.nn.utils.weight_norm` is deprecated:FutureWarning",
)
@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.long if name in TESTED_ELSEWHERE else ()) for name in EXACT],
)
def test_what_models_are_made_of_is_exact_and_within_the_budget(name: str) -> None:
    plain, planned = _target(name), _target(name)
    found = lowtide.profile(
        planned.model, planned.batch, optimizer=planned.optimizer, loss=planned.loss, cache=False
    )
    budget = between(found, 0.0)
    found.plan(budget).apply(planned.model)
    assert differences(train(plain), train(planned)) == []
    assert measured_peak(planned) <= budget


@pytest.mark.parametrize("name", ["transposed batch", "func.grad", "einsum", "complex parameters", "vmap"])
def test_eager_holds_what_a_formula_of_autograd_reads_to_its_end(name: str) -> None:
    target = _target(name)
    found = lowtide.profile(target.model, target.batch, optimizer=target.optimizer, loss=target.loss)
    assert found.peak_bytes == pytest.approx(measured_peak(target), abs=SCALARS_BYTES + 64)


def test_an_optimizer_in_the_backward_pass_is_exact() -> None:
    results = []
    for planned in (False, True):
        torch.manual_seed(0)
        model, batch = Two(), rows()
        _in_backward(model)
        if planned:
            lowtide.checkpoint(model, batch, budget="100%")
        results.append(train(Target("in backward", model, batch)))
    assert differences(*results) == []
