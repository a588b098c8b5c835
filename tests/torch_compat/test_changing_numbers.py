"""A Python number that changes from step to step is an input of the graph where that gives eager's bits."""

import copy
import math
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import lowtide
from lowtide.runtime.runner import runner_of
from lowtide.torch_compat.dynamo import own_code

pytestmark = pytest.mark.slow

Forward = Callable[["Annealed", torch.Tensor, float], torch.Tensor]
STEPS = 5


class Annealed(nn.Module):
    """Calls its function with a number that the loop changes; `weight` and `calls` are its own."""

    def __init__(self, function: Forward, dtype: torch.dtype) -> None:
        super().__init__()
        self.function = function
        self.first = nn.Linear(8, 16, dtype=dtype)
        self.last = nn.Linear(16, 4, dtype=dtype)
        self.chance = nn.Dropout()
        self.weight, self.calls = 0.7, 0

    def forward(self, x: torch.Tensor, number: float) -> torch.Tensor:
        return self.function(self, torch.tanh(self.first(x)), number)


def scaled(model: Annealed, h: torch.Tensor, number: float) -> torch.Tensor:
    h = F.dropout(h * number, 0.1) + number
    return model.last(h / number).square().mean() * (1 - number)


def of_the_module(model: Annealed, h: torch.Tensor, number: float) -> torch.Tensor:
    return model.last(h * model.weight).square().mean()


def counted(model: Annealed, h: torch.Tensor, number: float) -> torch.Tensor:
    model.calls += 1
    return model.last(h).square().mean()


def compared(model: Annealed, h: torch.Tensor, number: float) -> torch.Tensor:
    model.calls += 1
    return model.last(h * 2 if model.calls > 3 else h).square().mean()


def of_several_ops(model: Annealed, h: torch.Tensor, number: float) -> torch.Tensor:
    return model.last(h * (number * 0.1 * 3)).square().mean()


def stored(model: Annealed, h: torch.Tensor, number: float) -> torch.Tensor:
    model.weight = model.weight * 0.9
    return model.last(h * model.weight).square().mean()


def of_calls(model: Annealed, h: torch.Tensor, number: float) -> torch.Tensor:
    model.calls += 1
    return model.last(h * min(1.0, model.calls / 7)).square().mean()


def of_shapes(model: Annealed, h: torch.Tensor, number: float) -> torch.Tensor:
    model.calls += 1
    return model.last(h[model.calls :]).square().mean()


def chance(model: Annealed, h: torch.Tensor, number: float) -> torch.Tensor:
    return model.last(F.dropout(h, number)).square().mean()


def times_calls(model: Annealed, h: torch.Tensor, number: float) -> torch.Tensor:
    model.calls += 1
    return model.last(h * model.calls).square().mean()


def of_whole_and_broken(model: Annealed, h: torch.Tensor, number: float) -> torch.Tensor:
    model.calls += 1
    return model.last(h * min(1, model.calls / 7)).square().mean()


def simplified(model: Annealed, h: torch.Tensor, number: float) -> torch.Tensor:
    return model.last(h * (number * 0.1 * 3) + (1 - (1 - number)) + number).square().mean()


def powers(model: Annealed, h: torch.Tensor, number: float) -> torch.Tensor:
    model.calls += 1
    return model.last(h.abs() ** number + h ** (model.calls + 2)).square().mean()


def between(model: Annealed, h: torch.Tensor, number: float) -> torch.Tensor:
    return model.last(torch.lerp(h, h.sin(), number).clamp(-number, number)).square().mean()


def tempered(model: Annealed, h: torch.Tensor, number: float) -> torch.Tensor:
    h = F.gumbel_softmax(h, tau=number) + F.leaky_relu(h, number)
    return model.last(torch.where(h > number, h, number)).square().mean()


def of_modules(model: Annealed, h: torch.Tensor, number: float) -> torch.Tensor:
    model.chance.p = number
    return model.last(model.chance(h)).square().mean()


def of_shape_and_value(model: Annealed, h: torch.Tensor, number: float) -> torch.Tensor:
    return model.last(h[: math.ceil(9 - 5 * number)] * number).square().mean()


def typed(model: Annealed, h: torch.Tensor, number: float) -> torch.Tensor:
    model.calls += 1
    whole = torch.arange(16) * max(2, model.calls / 1.5)  # whole at first
    return model.last(h * (1 + whole // 2)).square().mean()


def in_c(model: Annealed, h: torch.Tensor, number: float) -> torch.Tensor:
    return F.huber_loss(model.last(h), torch.zeros(12, 4), delta=number)


def train(function: Forward, dtype: torch.dtype) -> list[int]:
    """Steps of a planned model, each equal to eager's; how many graphs there were after each."""
    torch.manual_seed(0)
    # numbers are told by the code that reads them
    kind = type("Annealed", (Annealed,), {"forward": own_code(Annealed.forward)})
    model, x = kind(function, dtype), torch.randn(12, 8, dtype=dtype)
    planned = copy.deepcopy(model)
    lowtide.checkpoint(planned, {"x": x, "number": 0.3}, budget="1MB")
    graphs = []
    for step in range(STEPS):
        found = []
        for one in (model, planned):
            torch.manual_seed(step)
            one.zero_grad()
            if function is not stored:
                one.weight = 0.7 - 0.0731 * step
            loss = one(x=x, number=0.3 + 0.0917 * step)
            loss.backward()
            found.append([loss.detach(), *(p.grad for p in one.parameters())])
        assert all(map(torch.equal, *found))
        assert (model.weight, model.calls) == (planned.weight, planned.calls)
        assert (type(planned.weight), type(planned.calls)) == (float, int)
        graphs.append(runner_of(planned).backend.num_graphs)
    return graphs


@pytest.mark.sample(3)
@pytest.mark.parametrize(
    ("function", "dtype"),
    [
        (scaled, torch.float32),
        (scaled, torch.bfloat16),
        (scaled, torch.float64),
        (of_the_module, torch.float32),
        (counted, torch.float32),
        (of_several_ops, torch.float32),
        (stored, torch.float32),
        (of_calls, torch.float32),
        (times_calls, torch.float32),
        (times_calls, torch.bfloat16),
        (of_whole_and_broken, torch.float32),
        (simplified, torch.float32),
        (simplified, torch.bfloat16),
        (powers, torch.float32),
        (powers, torch.bfloat16),
        (between, torch.bfloat16),
        (tempered, torch.float32),
        (chance, torch.float32),
        (of_modules, torch.bfloat16),
    ],
)
def test_one_graph_for_all_values_after_the_first(function: Forward, dtype: torch.dtype) -> None:
    assert train(function, dtype) == [1, 2, 2, 2, 2]


def test_a_counter_that_is_compared_has_a_graph_for_each_answer() -> None:
    assert train(compared, torch.float32) == [1, 2, 2, 3, 3]


@pytest.mark.sample(1)
@pytest.mark.parametrize("function", [of_shapes, of_shape_and_value, in_c])
def test_a_number_that_decides_a_shape_or_that_torch_reads_in_c_is_fixed(function: Forward) -> None:
    assert train(function, torch.float32) == [1, 2, 3, 4, 5]


def test_a_number_whose_type_decides_the_type_of_a_tensor_is_fixed() -> None:
    assert train(typed, torch.float32) == [1, 1, 1, 2, 3]


class Scaled(nn.Module):
    def __init__(self, number: float) -> None:
        super().__init__()
        self.layer, self.number = nn.Linear(8, 8), number

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x) * self.number


@pytest.mark.parametrize("build", [Scaled, lambda number: nn.Sequential(nn.Linear(8, 8), nn.Dropout(number))])
def test_each_model_of_a_class_may_have_its_own_constant(build: Callable[[float], nn.Module]) -> None:
    x = torch.ones(4, 8)
    inputs = [
        [node.name for node in lowtide.profile(build(number), x).nodes if node.op == "placeholder"]
        for number in (0.1, 0.2, 0.3)
    ]
    assert inputs[0] == inputs[1] == inputs[2], "no number is an input of a graph"
