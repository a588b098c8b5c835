"""Ways to train: what loops do to the weights themselves, and which of them train."""

from collections.abc import Callable
from functools import partial

import torch
from torch import nn

from .case import STEPS, Training, Values, forward, gradients, step, update
from .net import NET_BYTES, ROW_BYTES, ROWS, WIDTH, Net, training_of


def _freezes_later(training: Training) -> Values:
    yield from step(training)
    for parameter in training.model.first.parameters():
        parameter.requires_grad_(False)
    yield from step(training)


def _toggles(training: Training) -> Values:
    """As a GAN's discriminator: its parameters train in one step and not in the next."""
    inputs = training.batch.clone().requires_grad_()
    for trains in (True, False, True):
        for parameter in training.model.parameters():
            parameter.requires_grad_(trains)
        forward(training, training.batch if trains else inputs).backward()
        yield gradients(training.model)
        if trains:
            update(training)
    training.model.zero_grad(set_to_none=True)


def _loads_a_state(training: Training) -> Values:
    yield from step(training)
    training.model.load_state_dict({k: v * 0.9 for k, v in training.model.state_dict().items()})
    yield from step(training)


def _averages(training: Training) -> Values:
    average = torch.optim.swa_utils.AveragedModel(training.model)
    for _ in range(STEPS):
        yield from step(training)
        average.update_parameters(training.model)
    yield [parameter.detach() for parameter in average.parameters()]


def _adds_noise_to_weights(training: Training) -> Values:
    for _ in range(STEPS):
        with torch.no_grad():
            for parameter in training.model.parameters():
                parameter.add_(torch.randn_like(parameter), alpha=0.01)
        yield from step(training)


def _replaces_a_weight(training: Training) -> Values:
    yield from step(training)
    with torch.no_grad():
        training.model.last[2].weight.data = training.model.last[2].weight.data.clone() * 0.5
    yield from step(training)


def _frozen_first() -> nn.Module:
    model = Net()
    model.first.requires_grad_(False)
    return model


def _low_rank() -> nn.Module:
    """All weights frozen but those of two small matrices beside a layer."""
    model = Net(lambda net, x: x + net.up(net.down(x)))
    model.requires_grad_(False)
    model.down, model.up = nn.Linear(WIDTH, 2, bias=False), nn.Linear(2, WIDTH, bias=False)
    return model


WEIGHTS: dict[str, Callable[[], Training]] = {
    "frozen-part": partial(training_of, model=_frozen_first),
    "low-rank-adapters": partial(training_of, model=_low_rank),
    "frozen-later": partial(training_of, _freezes_later),
    "requires-grad-toggled": partial(training_of, _toggles, loop_bytes=2 * ROWS * ROW_BYTES),
    "load-state-dict": partial(training_of, _loads_a_state),
    "averaged-weights": partial(training_of, _averages, loop_bytes=NET_BYTES),
    "noise-on-weights": partial(training_of, _adds_noise_to_weights),
    "weight-replaced": partial(training_of, _replaces_a_weight),
}
