"""Hooks of the user collect in training what they collect in eager, and nothing while a step is planned."""

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from budgets import between
from torch import nn
from torch.nn.modules import module as everywhere
from training import differences, measured_peak, train
from two_layers import WIDTH, Two, rows

import lowtide
from lowtide.zoo.targets import Target

pytestmark = pytest.mark.slow

Log = list[torch.Tensor]


def _sequence() -> nn.Sequential:
    return nn.Sequential(*(Two(lambda s, x: s.last(s.first(x).tanh())) for _ in range(2)), nn.Tanh())


class Counter:
    """A hook with a state of its own."""

    def __init__(self, log: Log) -> None:
        self.log, self.calls = log, 0

    def __call__(self, *given: Any) -> None:
        self.calls += 1
        self.log.append(given[-1][0].norm() * self.calls)

    def after_forward(self, _module: nn.Module, _inputs: Any, output: torch.Tensor) -> None:
        self.calls += 1
        self.log.append(output.detach().norm() * self.calls)


def _counted(log: Log) -> Callable[..., None]:
    calls = 0

    def hook(_module: nn.Module, _inputs: Any, output: torch.Tensor) -> None:
        nonlocal calls
        calls += 1
        log.append(output.detach().norm() * calls)

    return hook


def _append(log: Log, _module: nn.Module, _inputs: Any, output: torch.Tensor) -> None:
    log.append(output.detach().norm())


def _half(_module: nn.Module, inputs: Any, _outputs: Any) -> Any:
    return tuple(None if grad is None else grad / 2 for grad in inputs)


HOOKS: dict[str, Callable[[nn.Sequential, Log], Any]] = {
    "full backward": lambda m, log: m[1].register_full_backward_hook(lambda *g: log.append(g[-1][0].norm())),
    "values": lambda m, log: m[0].register_full_backward_hook(
        lambda *given: log.append(torch.tensor(given[-1][0].norm().item()))
    ),
    "on every module": lambda m, log: [
        each.register_full_backward_hook(lambda *given: log.append(given[-1][0].norm()))
        for each in m.modules()
    ],
    "object": lambda m, log: m[1].last.register_full_backward_hook(Counter(log)),
    "pre-hook": lambda m, log: m[1].register_full_backward_pre_hook(lambda _, g: log.append(g[0].norm())),
    "changes gradients": lambda m, log: (
        m[1].first.register_full_backward_hook(_half),
        m[0].register_full_backward_hook(Counter(log)),
    ),
    "of the older kind": lambda m, log: m[1].last.register_backward_hook(Counter(log)),
    "of a parameter": lambda m, log: (
        m[0].first.weight.register_hook(lambda grad: log.append(grad.norm())),
        m[1].register_full_backward_hook(lambda *_: None),
    ),
    "after accumulation": lambda m, log: (
        m[0].first.weight.register_post_accumulate_grad_hook(lambda p: log.append(p.grad.norm())),
        m[1].register_full_backward_hook(lambda *_: None),
    ),
    "forward": lambda m, log: m[1].register_forward_hook(_counted(log)),
    "forward of an object": lambda m, log: m[1].first.register_forward_hook(Counter(log).after_forward),
    "forward of a partial": lambda m, log: m[0].register_forward_hook(functools.partial(_append, log)),
    "before forward": lambda m, log: m[1].register_forward_pre_hook(lambda _, g: log.append(g[0].norm())),
}


@torch._dynamo.disable
def _between_graphs(x: torch.Tensor) -> torch.Tensor:
    return x.sigmoid() * x


def _case(name: str, log: Log, *, uncaptured: bool) -> Target:
    torch.manual_seed(0)
    model = _sequence()
    if uncaptured:
        model[0].body = lambda s, x: s.last(_between_graphs(s.first(x)))
    HOOKS[name](model, log)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return Target(name, model, rows(), optimizer, lambda out: out.square().mean())


@pytest.mark.sample(4)
@pytest.mark.filterwarnings(
    "ignore:Full backward hook is firing:UserWarning",
    "ignore:Using a non-full backward hook:FutureWarning",
    "ignore:For backward hooks to be called:UserWarning",
)
@pytest.mark.parametrize("uncaptured", [False, True], ids=["", "with code between graphs"])
@pytest.mark.parametrize("name", HOOKS)
def test_hooks_collect_what_they_collect_in_eager(name: str, uncaptured: bool) -> None:
    logs: tuple[Log, Log] = ([], [])
    plain, planned = (_case(name, log, uncaptured=uncaptured) for log in logs)
    found = lowtide.profile(
        planned.model, planned.batch, optimizer=planned.optimizer, loss=planned.loss, cache=False
    )
    plan = found.plan(between(found, 0.0))
    plan.apply(planned.model)
    assert logs[1] == [], "no hook runs for the user's eyes while a step is planned"
    assert differences(train(plain), train(planned)) == []
    assert logs[0] and len(logs[0]) == len(logs[1])
    assert all(type(b) is torch.Tensor and torch.equal(a, b) for a, b in zip(*logs, strict=True))
    if not uncaptured:  # a hook that counts its calls makes a new graph in every call there
        assert measured_peak(planned) <= plan.budget_bytes


@pytest.mark.filterwarnings("ignore:Full backward hook is firing:UserWarning")
def test_global_hooks() -> None:
    results: list[tuple[Any, Log]] = []
    for is_planned in (False, True):
        log: Log = []
        target = _case("forward", [], uncaptured=False)
        handles = [
            everywhere.register_module_full_backward_hook(lambda *g, log=log: log.append(g[-1][0].norm())),
            everywhere.register_module_forward_hook(lambda *g, log=log: log.append(g[-1].detach().norm())),
        ]
        try:
            if is_planned:
                lowtide.checkpoint(target.model, target.batch, budget="1GiB", loss=target.loss)
                assert log == []
            results.append((train(target), log))
        finally:
            for handle in handles:
                handle.remove()
    (eager, collected), (planned, too) = results
    assert differences(eager, planned) == []
    assert len(collected) == len(too) and all(map(torch.equal, collected, too))


def test_hooks_that_the_forward_registers_are_not_left_behind() -> None:
    def forward(self: Two, x: torch.Tensor) -> torch.Tensor:
        self.first.weight.register_hook(lambda grad: None)
        return self.last(_between_graphs(self.first(x))).square().mean()

    model = Two(forward)
    lowtide.checkpoint(model, rows(), budget="1GiB")
    assert not model.first.weight._backward_hooks


def test_a_sequence_with_a_hook_keeps_its_graphs_after_one_without_ops() -> None:
    """torch traces the code of nn.Sequential no more once a run of it has no ops."""
    nums = []
    for hooked in ((2,), (0, 1, 2), (2,)):
        model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(4)), nn.Tanh())
        for place in hooked:
            model[place].register_full_backward_hook(lambda *_: None)
        found = lowtide.profile(model, rows(), cache=False)
        nums.append(sum(graph.in_model for graph in found.step.graphs))
    assert nums == [3, 4, 3]
