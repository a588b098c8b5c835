"""Whatever else models are made of: exact and within the budget, or refused in one line and left unharmed."""

import copy
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
from budgets import between
from nets import said
from torch import nn
from torch.ao import quantization
from torch.nn import functional as F
from torch.nn.utils import parametrizations, parametrize
from torch.utils.checkpoint import checkpoint
from training import differences, measured_peak, train

import lowtide
from lowtide.capture.step import SCALARS_BYTES
from lowtide.zoo.targets import Target

ROWS, WIDTH = 64, 32

pytestmark = pytest.mark.slow


class Two(nn.Module):
    """Two layers, and `middle` between them; `body` is all that forward does with them."""

    def __init__(self, body: Callable[..., Any] | None = None, *, middle: nn.Module | None = None) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.middle = nn.Tanh() if middle is None else middle
        self.body = body
        self.register_buffer("seen", torch.zeros(WIDTH))
        self.generator = torch.Generator().manual_seed(3)
        self.calls = 0

    def forward(self, x: torch.Tensor, **options: Any) -> Any:
        if self.body is not None:
            return self.body(self, x, **options)
        return self.last(self.middle(self.first(x))).square().mean()


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


def _rows() -> torch.Tensor:
    return torch.randn(ROWS, WIDTH)


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


def _quantized() -> nn.Module:
    """Aware of quantization; its observers have seen one batch."""
    model = nn.Sequential(
        quantization.QuantStub(), nn.Linear(WIDTH, WIDTH), nn.ReLU(), quantization.DeQuantStub()
    )
    model.qconfig = quantization.get_default_qat_qconfig("fbgemm")
    return quantization.prepare_qat(model.train())


def _warm(model: nn.Module) -> nn.Module:
    model(_rows())
    return model


Case = tuple[Callable[[], nn.Module], Callable[[], Any], Any]

EXACT: dict[str, Case] = {
    "tensor hook": (lambda: Two(_hooked), _rows, None),
    "parameter hook": (
        lambda: _with(lambda m: m.first.weight.register_hook(lambda g: g / 2)),
        _rows,
        None,
    ),
    "backward hook on the model": (
        lambda: _with(lambda m: m.register_full_backward_hook(lambda *_: None)),
        _rows,
        None,
    ),
    "backward pre-hook": (
        lambda: _with(lambda m: m.register_full_backward_pre_hook(lambda _, grads: (grads[0] * 3,))),
        _rows,
        None,
    ),
    "forward hook": (
        lambda: _with(lambda m: m.first.register_forward_hook(lambda _m, _i, out: out * 2)),
        _rows,
        None,
    ),
    "quantization-aware": (lambda: _warm(_quantized()), _rows, None),
    "autograd function": (lambda: Two(lambda s, x: s.last(Doubled.apply(s.first(x))).mean()), _rows, None),
    "weight norm": (lambda: Two(middle=parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH))), _rows, None),
    "old weight norm": (lambda: Two(middle=nn.utils.weight_norm(nn.Linear(WIDTH, WIDTH))), _rows, None),
    "spectral norm": (
        lambda: Two(middle=parametrizations.spectral_norm(nn.Linear(WIDTH, WIDTH))),
        _rows,
        None,
    ),
    "old spectral norm": (lambda: Two(middle=nn.utils.spectral_norm(nn.Linear(WIDTH, WIDTH))), _rows, None),
    "orthogonal": (lambda: Two(middle=parametrizations.orthogonal(nn.Linear(WIDTH, WIDTH))), _rows, None),
    "own parametrization": (
        lambda: _with(lambda m: parametrize.register_parametrization(m.first, "weight", Symmetric())),
        _rows,
        None,
    ),
    "tied weights": (lambda: _with(lambda m: setattr(m.last, "weight", m.first.weight)), _rows, None),
    "complex parameters": (Waves, lambda: torch.randn(ROWS, WIDTH, dtype=torch.cfloat), None),
    "lists of parameters": (Listed, _rows, None),
    "bags": (lambda: _bag(mode="max"), lambda: torch.randint(0, 100, (ROWS, 4)), None),
    "returns a dataclass": (
        lambda: Two(lambda s, x: Answer(s.last(h := s.first(x).tanh()).mean(), {"h": h})),
        _rows,
        None,
    ),
    "returns a named tuple": (
        lambda: Two(lambda s, x: Pair(s.last(h := s.first(x).tanh()), h)),
        _rows,
        lambda out: out.logits.square().mean(),
    ),
    "returns nested dicts": (
        lambda: Two(lambda s, x: {"a": [s.last(h := s.first(x).tanh()), {"b": (h, 3, None)}]}),
        _rows,
        lambda out: out["a"][0].square().mean(),
    ),
    "returns an object": (
        lambda: Two(lambda s, x: Box(s.last(s.first(x).tanh()))),
        _rows,
        lambda out: out.value.square().mean(),
    ),
    "keywords": (
        lambda: Two(lambda s, x, *, scale: (s.last(s.first(x).tanh()) * scale).mean()),
        lambda: {"x": _rows(), "scale": 3.0},
        None,
    ),
    "counts in Python": (lambda: Two(_counts), _rows, None),
    "average in place": (lambda: Two(_averages), _rows, None),
    "average set anew": (lambda: Two(_replaces), _rows, None),
    "own generator": (lambda: Two(_own_generator), _rows, None),
    "vmap": (lambda: Two(_mapped), _rows, None),
    "func.grad": (lambda: Two(_gradient_inside), _rows, None),
    "einsum": (
        lambda: Two(lambda s, x: torch.einsum("bi,ij,bj->b", s.first(x), s.last.weight, x).square().mean()),
        _rows,
        None,
    ),
    "checkpoint": (lambda: Two(lambda s, x: _checkpointed(s, x, reentrant=False)), _rows, None),
    "reentrant checkpoint": (lambda: Two(lambda s, x: _checkpointed(s, x, reentrant=True)), _rows, None),
    "transposed batch": (Two, lambda: torch.randn(WIDTH, ROWS).T, None),
    "expanded batch": (Two, lambda: torch.randn(1, WIDTH).expand(ROWS, WIDTH), None),
    "float64": (lambda: Two().double(), lambda: _rows().double(), None),
    "bfloat16": (lambda: Two().bfloat16(), lambda: _rows().bfloat16(), None),
    "no_grad block": (lambda: Two(_no_grad_block), _rows, None),
    "autocast blocks": (lambda: Two(_autocast_block), _rows, None),
    "batch with a gradient": (Two, lambda: _rows().requires_grad_(), None),
}


def _target(name: str) -> Target:
    torch.manual_seed(0)
    build, batch, loss = EXACT[name]
    model = build()
    return Target(name, model, batch(), torch.optim.SGD(model.parameters(), lr=0.1), loss)


@pytest.mark.parametrize("name", EXACT)
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
        model, batch = Two(), _rows()
        _in_backward(model)
        if planned:
            lowtide.checkpoint(model, batch, budget="100%")
        results.append(train(Target("in backward", model, batch)))
    assert differences(*results) == []


class Kind(torch.Tensor):
    """A tensor of the user's own kind."""


def _branches(self: Two, x: torch.Tensor) -> torch.Tensor:
    hidden = self.first(x)
    return torch.cond(hidden.sum() > 0, lambda h: h.tanh(), lambda h: h.relu(), (hidden,)).mean()


def _penalty(self: Two, x: torch.Tensor) -> torch.Tensor:
    x = x.detach().requires_grad_()
    value = self.last(self.first(x).tanh()).square().mean()
    return value + torch.autograd.grad(value, x, create_graph=True)[0].square().sum()


def _hooked_sequence() -> nn.Module:
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))
    model[0].register_full_backward_hook(lambda *_: None)
    return model


REFUSED: dict[str, tuple[Callable[[], nn.Module], Callable[[], Any], str]] = {
    "lazy": (
        lambda: nn.Sequential(nn.LazyLinear(WIDTH), nn.Tanh()),
        _rows,
        r"'0.weight' of a lazy module has no shape yet: call the model once",
    ),
    "unseen observers": (_quantized, _rows, r"is empty until the forward pass has run once: call the model"),
    "kind of tensor": (Two, lambda: _rows().as_subclass(Kind), r"the batch has a Kind.*as_subclass"),
    "branches": (lambda: Two(_branches), _rows, r"'cond' has graphs of its own inside.*torch.where"),
    "gradient penalty": (lambda: Two(_penalty), _rows, "differentiates inside of its own forward"),
    "backward hook in a sequence": (
        _hooked_sequence,
        _rows,
        r"backward hooks: remove the hook.*register_hook",
    ),
    "scripted": (
        lambda: nn.Sequential(torch.jit.script(nn.Linear(WIDTH, WIDTH)), nn.Linear(WIDTH, WIDTH)),
        _rows,
        "Use the module that was scripted",
    ),
    "sparse gradients": (
        lambda: nn.Sequential(nn.Embedding(50, WIDTH, sparse=True), nn.Linear(WIDTH, WIDTH)),
        lambda: torch.randint(0, 50, (ROWS,)),
        "leave sparse gradients out",
    ),
}


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused_is_said_in_one_line_and_leaves_the_model_as_it_was(name: str, caplog: Any) -> None:
    caplog.set_level(logging.WARNING)
    build, make_batch, words = REFUSED[name]
    torch.manual_seed(0)
    model, batch = build(), make_batch()
    plain = copy.deepcopy(model)
    state = torch.get_rng_state()
    with pytest.raises(lowtide.LowtideError, match=words) as caught:
        lowtide.checkpoint(model, batch, budget="60%")
    assert "\n" not in str(caught.value) and len(said(caplog)) <= 1
    assert torch.equal(torch.get_rng_state(), state)
    results = []
    for each in (plain, model):
        torch.manual_seed(1)
        value = each(batch).sum()
        value.backward()
        grads = [
            p.grad.to_dense() if p.grad.is_sparse else p.grad for p in each.parameters() if p.grad is not None
        ]
        results.append([value, *grads, *each.buffers()])
    if name != "scripted":  # which eager itself does not compute twice alike
        assert all(torch.equal(one, other) for one, other in zip(*results, strict=True))
