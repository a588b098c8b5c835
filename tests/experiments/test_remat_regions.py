"""Blocks of torch_remat: exact by the hook for torch's generators. The package itself is optional."""

import sys
from contextlib import contextmanager, nullcontext
from types import ModuleType

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

from lowtide.experiments import compare_methods
from lowtide.experiments.contenders import Contender, switch_for
from lowtide.verification.measure_step import train_step
from lowtide.zoo.targets import Target


def stand_in():
    """torch_remat's promises in a few lines: hooks are snapshotted in forward and restored at replay, which
    runs the whole function."""
    module, replays = ModuleType("torch_remat"), []

    def wrapped(*, recompute_state_hooks):
        def decorate(function):
            def call(*args):
                states = [hook.snapshot() for hook in recompute_state_hooks]

                @contextmanager
                def replaying():
                    for hook, state in zip(recompute_state_hooks, states, strict=True):
                        hook.restore(state)
                    replays.append(True)
                    yield
                    replays.pop()

                with set_checkpoint_early_stop(False):
                    return checkpoint(
                        function,
                        *args,
                        use_reentrant=False,
                        preserve_rng_state=False,
                        context_fn=lambda: (nullcontext(), replaying()),
                    )

            return call

        return decorate

    module.checkpoint, module.is_recomputing = wrapped, lambda: bool(replays)
    return module


@pytest.fixture
def installed(monkeypatch):
    if "torch_remat" not in sys.modules:
        monkeypatch.setitem(sys.modules, "torch_remat", stand_in())


def make():
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Dropout(0.5)) for _ in range(3)]
    model = nn.Sequential(*blocks)
    return Target(
        name="blocks", model=model, batch=torch.randn(4, 8), optimizer=torch.optim.Adam(model.parameters())
    )


def test_replayed_blocks_are_exact_and_leave_the_generator_where_eager_does(installed):
    found = []
    for kind in ("eager", "regions"):
        target = make()
        switch = switch_for(Contender(name=kind, kind=kind), target)
        switch.on()
        torch.manual_seed(1)
        for _ in range(2):
            train_step(target.model, target.batch, target.optimizer)
        switch.off()
        found.append([*(p.detach() for p in target.model.parameters()), torch.get_rng_state()])
    assert all(map(torch.equal, *found))


@pytest.mark.parametrize("is_there", [True, False])
def test_it_is_a_rival_where_it_is_installed(monkeypatch, is_there):
    monkeypatch.setattr(compare_methods, "find_spec", lambda name: object() if is_there else None)
    assert (compare_methods.REGIONS in compare_methods.rivals()) == is_there
