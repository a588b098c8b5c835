"""A plan at the first call that trains, and what is imported for it."""

import subprocess
import sys

import pytest
import torch
from torch import nn

from lowtide.integrations.first_call import await_first_call, no_longer_await
from lowtide.torch_compat.modules import route_of
from lowtide.trace.model_call import Arguments


def test_lowtide_itself_imports_no_trainer() -> None:
    code = (
        "import sys, lowtide.api, lowtide.integrations.first_call\n"
        "print([name for name in ('transformers', 'accelerate', 'lightning', 'peft') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_only_the_first_call_that_trains_is_met() -> None:
    met: list[Arguments] = []
    model, batch = nn.Bilinear(2, 2, 1), torch.ones(3, 2)
    await_first_call(model, lambda module, call: met.append(call))
    with torch.no_grad():
        model(batch, batch)
    model.eval()
    model(batch, batch)
    assert met == []
    model.train()
    expected = nn.functional.bilinear(batch, batch, model.weight, model.bias)
    assert torch.equal(model(batch, input2=batch), expected)
    model(batch, batch)
    ((args, kwargs),) = met
    assert args == (batch,) and kwargs == {"input2": batch}
    assert route_of(model) is None


def test_waiting_ends_where_the_plan_fails() -> None:
    def fail(module: nn.Module, call: Arguments) -> None:
        raise ValueError("no")

    model = nn.Linear(2, 2)
    await_first_call(model, fail)
    with pytest.raises(ValueError, match="no"):
        model(torch.ones(1, 2))
    assert route_of(model) is None
    await_first_call(model, fail)
    no_longer_await(model)
    model(torch.ones(1, 2))
