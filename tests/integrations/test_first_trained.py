"""The first model that a script trains is found, and nothing of the search stays behind."""

import pytest
import torch
from torch import nn

from lowtide.integrations.first_trained import TrainedModel, first_trained

CALL, CONSTRUCT = nn.Module.__call__, torch.optim.Optimizer.__init__


@pytest.fixture
def found(monkeypatch):
    """The models that were found; torch's own functions are there again at the end of each test."""
    models: list[TrainedModel] = []
    yield models
    assert nn.Module.__call__ is CALL and torch.optim.Optimizer.__init__ is CONSTRUCT


def test_the_outermost_module_of_an_optimizers_parameters(found):
    with first_trained(found.append):
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
        optimizer = torch.optim.SGD(model.parameters())
        other = torch.optim.Adam(nn.Linear(2, 2).parameters())
        output = model(torch.ones(3, 4))
        assert nn.Module.__call__ is CALL, "the search ends with the first model"
        nn.MSELoss()(output, torch.zeros(3, 2)).backward()
    (trained,) = found
    assert trained.module is model and trained.optimizers == (optimizer,) and trained.others == (other,)
    assert torch.equal(trained.call.args[0], torch.ones(3, 4)) and trained.num_outside == 0


def test_calls_that_do_not_train_are_passed_over(found):
    with first_trained(found.append):
        frozen, model = nn.Linear(4, 4).requires_grad_(False), nn.Linear(4, 2)
        model(torch.ones(3, 4))  # before there is an optimizer, as to set up lazy layers
        torch.optim.SGD([*frozen.parameters(), *model.parameters()])  # dies at once
        optimizer = torch.optim.SGD([*model.parameters(), nn.Parameter(torch.zeros(3))])
        with torch.no_grad():
            model(torch.ones(3, 4))
        model.eval()(torch.ones(3, 4))
        model.train()
        assert not found
        model(input=frozen(torch.ones(3, 4)))
    (trained,) = found
    assert trained.module is model and trained.optimizers == (optimizer,)
    assert list(trained.call.kwargs) == ["input"] and trained.num_outside == 1


def test_results_and_errors_of_calls_are_the_modules_own(found):
    model = nn.Linear(4, 2)
    with first_trained(found.append):
        assert torch.equal(model(torch.ones(1, 4)), CALL(model, torch.ones(1, 4)))
        with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
            model(torch.ones(1, 5))
    with pytest.raises(ZeroDivisionError), first_trained(found.append):
        raise ZeroDivisionError
    assert not found


def test_a_refused_plan_ends_the_call_and_the_search(found):
    def refuse(trained: TrainedModel) -> None:
        raise ValueError("too small")

    model = nn.Linear(4, 2)
    with first_trained(refuse):
        optimizer = torch.optim.SGD(model.parameters())
        with pytest.raises(ValueError, match="too small"):
            model(torch.ones(1, 4))
        assert nn.Module.__call__ is CALL and optimizer.param_groups
        model(torch.ones(1, 4))
