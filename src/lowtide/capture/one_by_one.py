"""Whether an optimizer can take its step for one parameter at a time, and what each of these holds inside."""

import warnings
from collections.abc import Iterable
from typing import Any

import torch

from lowtide.capture.doubles import double_of, fake_like
from lowtide.capture.optimizer import recorded_bytes
from lowtide.capture.stand_ins import small_one
from lowtide.errors import LowtideError, Unsupported
from lowtide.torchside.hooks import FakeTensorMode
from lowtide.torchside.optimizers import each_of
from lowtide.torchside.updates import step_for

Optimizer = torch.optim.Optimizer

TRIED_STEPS = 3


def updates_of(optimizer: Optimizer | None) -> dict[int, int]:
    """For every parameter of `optimizer`, by identity, the most that the step for it alone holds inside.

    Refuses an optimizer whose parameters do not go their own ways.
    """
    if optimizer is None:
        raise LowtideError("step_in_backward=True needs to know the optimizer: pass optimizer=")
    every = each_of(optimizer)
    for each in every:
        _refuse_dependent(each)
    return inside_bytes(every)


def inside_bytes(optimizers: Iterable[Optimizer]) -> dict[int, int]:
    """The same for optimizers that are known to allow it."""
    return {key: nbytes for each in optimizers for key, nbytes in _inside_bytes(each).items()}


def _refuse_dependent(optimizer: Optimizer) -> None:
    """Take some steps of a small one of its kind at once and one by one: they must leave the same behind."""
    name = type(optimizer).__name__
    every = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    try:
        with torch.random.fork_rng(devices=[]), torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            together = _trained(optimizer, every, one_by_one=False)
            apart = _trained(optimizer, every, one_by_one=True)
    except Exception as error:  # whatever the optimizer's own code raises
        what = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise Unsupported(
            f"{name} cannot take its step for one parameter at a time ({what}): leave step_in_backward out"
        ) from error
    if not _equal(together, apart):
        raise Unsupported(
            f"{name} updates its parameters together: one at a time gives other values. "
            "Leave step_in_backward out"
        )


def _trained(optimizer: Optimizer, every: set[int], *, one_by_one: bool) -> list[Any]:
    """Parameters, state and settings of a small optimizer after some steps."""
    torch.manual_seed(0)
    small, parameters = small_one(optimizer, every)
    for _ in range(TRIED_STEPS):
        grads = [torch.randn(parameter.shape).to(parameter.dtype) for parameter in parameters]
        if one_by_one:
            # the last layers' gradients come first
            for parameter, grad in reversed(list(zip(parameters, grads, strict=True))):
                parameter.grad = grad
                step_for(small, parameter)
                parameter.grad = None
        else:
            for parameter, grad in zip(parameters, grads, strict=True):
                parameter.grad = grad
        small.step()
        for parameter in parameters:
            parameter.grad = None
    settings = [{k: v for k, v in group.items() if k != "params"} for group in small.param_groups]
    return [parameters, [small.state[parameter] for parameter in parameters], settings]


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return isinstance(other, torch.Tensor) and torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(_equal(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(_equal(a, b) for a, b in zip(one, other, strict=True))
    return bool(one == other)


def _inside_bytes(optimizer: Optimizer) -> dict[int, int]:
    """What the step for each parameter holds, traced once for every layout of every group."""
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    fakes = {
        id(parameter): fake_like(parameter, mode)
        for group in optimizer.param_groups
        for parameter in group["params"]
    }
    double = double_of(optimizer, fakes, mode)
    known: dict[Any, int] = {}
    found: dict[int, int] = {}
    for number, group in enumerate(optimizer.param_groups):
        for parameter in group["params"]:
            layout = (number, parameter.shape, parameter.stride(), parameter.dtype, parameter.device)
            if layout not in known:
                known[layout] = _traced_bytes(double, fakes[id(parameter)], mode)
            found[id(parameter)] = known[layout]
    return found


def _traced_bytes(double: Optimizer, fake: torch.Tensor, mode: FakeTensorMode) -> int:
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        fake.grad = torch.empty_like(fake, requires_grad=False)
        step_for(double, fake)
        inside_bytes = recorded_bytes(lambda: step_for(double, fake), mode)
        fake.grad = None
    return inside_bytes
