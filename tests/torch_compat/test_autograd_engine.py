"""A function of torch is replaced only as long as an object needs that."""

import gc
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from lowtide.optim import step_in_backward
from lowtide.optim.step_in_backward import StepInBackward
from lowtide.torch_compat.autograd_engine import ProcessPatch


class Holder:
    pass


@pytest.fixture
def module():
    return SimpleNamespace(function=lambda: 1)


@pytest.fixture
def patch(module):
    return ProcessPatch(module, "function", lambda original: lambda: original() + 1)


def test_the_last_holder_gives_the_original_back(module, patch):
    original, first, second = module.function, Holder(), Holder()
    releases = [patch.hold(first), patch.hold(second)]
    assert module.function() == 2
    releases[0]()
    releases[0]()
    assert module.function() == 2
    releases[1]()
    assert module.function is original
    release = patch.hold(first)
    assert module.function() == 2
    release()
    assert module.function is original


def test_a_holder_that_is_collected_gives_the_original_back(module, patch):
    original, holder = module.function, Holder()
    patch.hold(holder)
    del holder
    gc.collect()
    assert module.function is original


def test_two_patches_of_a_function_are_released_in_any_order(module, patch):
    original, over = module.function, ProcessPatch(module, "function", lambda below: lambda: 10 * below())
    holder = Holder()
    releases = [patch.hold(holder), over.hold(holder)]
    assert module.function() == 20
    for release in releases:
        release()
    assert module.function is original


def test_what_others_put_over_it_stays(module, patch):
    holder = Holder()
    release, replacement = patch.hold(holder), module.function
    module.function = over = lambda: replacement() + 1
    release()
    assert module.function is over


@pytest.mark.parametrize("ends", ["closed", "collected"])
def test_scaling_is_watched_only_while_parameters_are_updated_in_backward(ends, monkeypatch):
    class Scaler:  # torch's own may be replaced for models of other tests
        scale = torch.amp.GradScaler.scale

    patch = ProcessPatch(Scaler, "scale", step_in_backward._refusing)
    monkeypatch.setattr(step_in_backward, "_REFUSED_SCALERS", patch)
    original, model = Scaler.scale, nn.Linear(3, 3)
    updates = StepInBackward([torch.optim.SGD(model.parameters())], model, within_parameters=False)
    updates.open()
    assert Scaler.scale is not original
    if ends == "closed":
        updates.close()
    else:
        del updates
        gc.collect()
    assert Scaler.scale is original
