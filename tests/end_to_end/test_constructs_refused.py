"""What cannot be planned is refused in one line, and the model is left unharmed."""

import copy
import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from nets import said
from torch import nn
from two_layers import ROWS, WIDTH, Two, quantized, rows

import lowtide

pytestmark = pytest.mark.slow


class Kind(torch.Tensor):
    """A tensor of the user's own kind."""


def _branches(self: Two, x: torch.Tensor) -> torch.Tensor:
    hidden = self.first(x)
    return torch.cond(hidden.sum() > 0, lambda h: h.tanh(), lambda h: h.relu(), (hidden,)).mean()


def _penalty(self: Two, x: torch.Tensor) -> torch.Tensor:
    x = x.detach().requires_grad_()
    value = self.last(self.first(x).tanh()).square().mean()
    return value + torch.autograd.grad(value, x, create_graph=True)[0].square().sum()


REFUSED: dict[str, tuple[Callable[[], nn.Module], Callable[[], Any], str]] = {
    "lazy": (
        lambda: nn.Sequential(nn.LazyLinear(WIDTH), nn.Tanh()),
        rows,
        r"'0.weight' of a lazy module has no shape yet: call the model once",
    ),
    "unseen observers": (quantized, rows, r"is empty until the forward pass has run once: call the model"),
    "kind of tensor": (Two, lambda: rows().as_subclass(Kind), r"the batch has a Kind.*as_subclass"),
    "branches": (lambda: Two(_branches), rows, r"'cond' has graphs of its own inside.*torch.where"),
    "gradient penalty": (lambda: Two(_penalty), rows, "differentiates inside of its own forward"),
    "scripted": (
        lambda: nn.Sequential(torch.jit.script(nn.Linear(WIDTH, WIDTH)), nn.Linear(WIDTH, WIDTH)),
        rows,
        "Use the module that was scripted",
    ),
    "sparse gradients": (
        lambda: nn.Sequential(nn.Embedding(50, WIDTH, sparse=True), nn.Linear(WIDTH, WIDTH)),
        lambda: torch.randint(0, 50, (ROWS,)),
        "leave sparse gradients out",
    ),
}


@pytest.mark.filterwarnings(
    "ignore::DeprecationWarning",
    "ignore:Full backward hook is firing:UserWarning",
    "ignore:Please use quant_min and quant_max:UserWarning",
    "ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning",
)
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
