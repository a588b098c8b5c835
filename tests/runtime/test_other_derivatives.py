"""Derivatives and compilers around a planned model: exact where they run, else one line before anything
happens."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.autograd import forward_ad

import lowtide
from lowtide.runtime.runner import runner_of

WIDTH, ROWS = 16, 8


def _model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 1))


def _planned() -> nn.Module:
    return lowtide.checkpoint(_model(), torch.randn(ROWS, WIDTH), budget="1GiB", loss=torch.mean)


def _gradient_penalty(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    x = x.clone().requires_grad_()
    out = model(x)
    (grad,) = torch.autograd.grad(out.sum(), x, create_graph=True)
    return out.mean() + (grad.norm(2, 1) - 1).square().mean()


def _inner_loop(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    parameters = list(model.parameters())
    grads = torch.autograd.grad(model(x).square().mean(), parameters, create_graph=True)
    return torch.stack([(p - g).square().sum() for p, g in zip(parameters, grads, strict=True)]).sum()


def _second_derivative(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    x = x.clone().requires_grad_()
    out = model(x)
    (first,) = torch.autograd.grad(out.sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(first[:, 0].sum(), x, create_graph=True)
    return (second[:, 0] + out[:, 0]).square().mean()


@pytest.mark.parametrize("loss", [_gradient_penalty, _inner_loop, _second_derivative])
def test_gradients_of_gradients_are_refused_before_any_gradient_is_there(loss: Callable[..., Any]) -> None:
    model = _planned()
    x = torch.randn(ROWS, WIDTH)
    with pytest.raises(lowtide.Unsupported, match=r"create_graph=True.*lowtide.remove\(model\)") as caught:
        loss(model, x).backward()
    assert "\n" not in str(caught.value)
    assert all(parameter.grad is None for parameter in model.parameters())
    grads = []
    for each in (_model(), lowtide.remove(model)):
        loss(each, x).backward()
        grads.append([parameter.grad for parameter in each.parameters()])
    assert all(map(torch.equal, *grads))


@pytest.mark.filterwarnings("ignore:Using backward\\(\\) with create_graph=True:UserWarning")
def test_a_graph_of_gradients_that_is_not_differentiated_is_no_harm() -> None:
    results = []
    for model in (_model(), _planned()):
        model(torch.ones(ROWS, WIDTH)).mean().backward(create_graph=True)
        results.append([parameter.grad.detach() for parameter in model.parameters()])
        model.zero_grad()
    assert all(map(torch.equal, *results))


def _per_sample(model: nn.Module, x: torch.Tensor) -> Any:
    def loss(parameters: Any, row: torch.Tensor) -> torch.Tensor:
        return torch.func.functional_call(model, parameters, (row[None],)).mean()

    return torch.func.vmap(torch.func.grad(loss), (None, 0))(dict(model.named_parameters()), x)


def _forward_mode(model: nn.Module, x: torch.Tensor) -> Any:
    with forward_ad.dual_level():
        return model(forward_ad.make_dual(x, x))


@pytest.mark.parametrize(
    "transform",
    [
        _per_sample,
        lambda model, x: torch.func.vmap(model)(x),
        lambda model, x: torch.func.jvp(model, (x,), (x,)),
        lambda model, x: torch.autograd.functional.jacobian(model, x, vectorize=True),
        _forward_mode,
    ],
    ids=["per sample", "vmap", "jvp", "jacobian", "forward mode"],
)
def test_transforms_are_refused_with_their_reason(transform: Callable[..., Any]) -> None:
    model, x = _planned(), torch.randn(ROWS, WIDTH)
    with pytest.raises(lowtide.Unsupported, match=r"inside of a transform.*lowtide.remove\(model\)"):
        transform(model, x)


def test_without_gradients_a_transform_runs_the_models_own_code() -> None:
    model, x = _planned(), torch.randn(ROWS, WIDTH)
    with torch.no_grad():
        assert torch.equal(torch.func.vmap(model)(x), torch.func.vmap(lowtide.remove(model))(x))


def test_a_planned_model_can_be_exported() -> None:
    model, x = _planned(), torch.randn(ROWS, WIDTH)
    exported = torch.export.export(model, (x,)).module()
    assert torch.equal(exported(x), model(x))


def _called(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """Calls a model after a graph break, as trainers do."""
    torch._dynamo.graph_break()
    out: torch.Tensor = nn.Module.__call__(model, x)
    return out


def test_a_plan_runs_where_torch_compile_around_it_calls_the_model() -> None:
    batch, results = torch.ones(ROWS, WIDTH), []
    for model in (_model(), _planned()):
        torch.compile(_called, backend="eager")(model, batch).mean().backward()
        results.append([parameter.grad for parameter in model.parameters()])
    runner = runner_of(model)
    assert runner is not None and runner.observer.num_backwards == 1
    assert all(map(torch.equal, *results))
