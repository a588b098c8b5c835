"""Ways to train: what loops do around a model, and with its gradients."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn

from .batches import BATCHES
from .case import STEPS, Case, Training, Values, forward, gradients, step, update
from .net import (
    GENERATOR_BYTES,
    NOISE,
    ROW_BYTES,
    ROWS,
    WIDTH,
    classes_loss,
    training_of,
)
from .weights import WEIGHTS


def _state(training: Training) -> Values:
    """The whole step, before it is taken."""
    yield [*gradients(training.model)]


def _accumulate(training: Training) -> Values:
    for _ in range(2):
        for _ in range(2):
            (forward(training) / 2).backward()
        yield from _state(training)
        update(training)


def _accumulate_sums(training: Training) -> Values:
    (forward(training) + forward(training)).backward()
    yield from _state(training)
    update(training)


def _clip(training: Training, *, by: Callable[..., Any]) -> Values:
    for _ in range(STEPS):
        forward(training).backward()
        by(training.model.parameters(), 0.1)
        yield from _state(training)
        update(training)


def _autocast(training: Training, *, dtype: torch.dtype = torch.bfloat16) -> Values:
    for _ in range(STEPS):
        with torch.autocast("cpu", dtype=dtype):
            value = forward(training)
        value.backward()
        yield from _state(training)
        update(training)


def _scaled(training: Training) -> Values:
    scaler = torch.amp.GradScaler("cpu")
    assert training.optimizer is not None
    for _ in range(STEPS):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            value = forward(training)
        scaler.scale(value).backward()
        scaler.unscale_(training.optimizer)
        yield from _state(training)
        scaler.step(training.optimizer)
        scaler.update()
        training.model.zero_grad(set_to_none=True)


def _scheduled(training: Training, *, make: Callable[[Any], Any]) -> Values:
    schedule = make(training.optimizer)
    for _ in range(STEPS):
        yield from step(training)
        schedule.step()


def _evaluates(training: Training) -> Values:
    for _ in range(STEPS):
        yield from step(training)
        training.model.eval()
        with torch.no_grad():
            yield [training.model(training.batch)]
        training.model.train()


def _without_gradients_in_training_mode(training: Training) -> Values:
    yield from step(training)
    with torch.no_grad():
        yield [training.model(training.batch)]
    yield from step(training)


def _inference_mode(training: Training) -> Values:
    yield from step(training)
    with torch.inference_mode():
        found = training.model(training.batch)
    yield [found.clone()]
    yield from step(training)


def _gan(training: Training) -> Values:
    """The model is the discriminator; a generator outside trains through it."""
    torch.manual_seed(1)
    generator = nn.Linear(NOISE, WIDTH)
    outer = torch.optim.SGD(generator.parameters(), lr=0.1)
    for _ in range(STEPS):
        forward(training, generator(torch.randn(ROWS, NOISE)).detach()).backward()
        yield from _state(training)
        update(training)
        forward(training, generator(torch.randn(ROWS, NOISE))).backward()
        yield [parameter.grad for parameter in generator.parameters()]
        outer.step()
        outer.zero_grad()
        training.model.zero_grad(set_to_none=True)


def _several_losses(training: Training) -> Values:
    for _ in range(STEPS):
        output = training.model(training.batch)
        value = classes_loss(output) + 0.1 * output.square().mean() + output.abs().max()
        value.backward()
        yield from _state(training)
        update(training)


def _two_backwards(training: Training) -> Values:
    for _ in range(STEPS):
        output = training.model(training.batch)
        classes_loss(output).backward(retain_graph=True)
        output.square().mean().backward()
        yield from _state(training)
        update(training)


def _other_losses(training: Training) -> Values:
    yield from step(training)
    training.model(training.batch).square().sum().backward()
    yield from _state(training)
    update(training)


def _grad_function(training: Training) -> Values:
    parameters = list(training.model.parameters())
    for _ in range(STEPS):
        yield list(torch.autograd.grad(forward(training), parameters))


def _penalty_on_inputs(training: Training) -> Values:
    inputs = training.batch.clone().requires_grad_()
    forward(training, inputs).backward()
    yield [inputs.grad]
    training.model.zero_grad(set_to_none=True)


def _hooks_on_gradients(training: Training) -> Values:
    handles = [p.register_hook(lambda grad: grad * 0.5) for p in training.model.parameters()]
    yield from step(training)
    for handle in handles:
        handle.remove()
    yield from step(training)


def _step_in_hooks(training: Training) -> Values:
    def descend(parameter: torch.Tensor) -> None:
        assert parameter.grad is not None
        with torch.no_grad():
            parameter.sub_(parameter.grad, alpha=0.1)
        parameter.grad = None

    handles = [p.register_post_accumulate_grad_hook(descend) for p in training.model.parameters()]
    for _ in range(STEPS):
        forward(training).backward()
        yield [p.detach() for p in training.model.parameters()]
    for handle in handles:
        handle.remove()


def _forward_hooks(training: Training) -> Values:
    seen: list[torch.Tensor] = []
    handle = training.model.first.register_forward_hook(lambda m, args, output: seen.append(output.detach()))
    yield from step(training)
    handle.remove()
    yield seen


def _raises_once(training: Training) -> Values:
    yield from step(training)
    try:
        training.model(torch.randn(ROWS, WIDTH + 1))
    except RuntimeError:
        yield [torch.tensor(1)]
    yield from step(training)


def _skips_what_is_not_finite(training: Training) -> Values:
    for number in range(STEPS):
        value = forward(training, training.batch * (float("inf") if number == 1 else 1))
        if torch.isfinite(value):
            value.backward()
            yield from _state(training)
        del value  # or its activations would still be there in the next forward pass
        update(training)


def _zeroes_instead_of_none(training: Training) -> Values:
    assert training.optimizer is not None
    for _ in range(STEPS):
        forward(training).backward()
        yield from _state(training)
        training.optimizer.step()
        training.optimizer.zero_grad(set_to_none=False)


def _closure(training: Training) -> Values:
    assert training.optimizer is not None

    def evaluate() -> torch.Tensor:
        training.model.zero_grad(set_to_none=True)
        value = forward(training)
        value.backward()
        return value

    for _ in range(2):
        yield [training.optimizer.step(evaluate)]


def _only_now_and_then(training: Training) -> Values:
    for number in range(4):
        forward(training).backward()
        if number % 2:
            yield from _state(training)
            update(training)


def _anomalies(training: Training) -> Values:
    with torch.autograd.detect_anomaly(check_nan=True):
        yield from step(training)


def _threads(training: Training) -> Values:
    before = torch.get_num_threads()
    yield from step(training)
    torch.set_num_threads(1)
    try:
        yield from step(training)
    finally:
        torch.set_num_threads(before)


def _sgd(model: nn.Module, **options: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, **options)


class CopiedLBFGS(torch.optim.LBFGS):
    """One that still has its parameters after `copy.deepcopy`."""

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._params, self._numel_cache = self.param_groups[0]["params"], None


def _optimizer(kind: Any, **options: Any) -> Callable[[nn.Module], torch.optim.Optimizer]:
    return lambda model: kind([p for p in model.parameters() if p.requires_grad], **options)


def _groups(model: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(
        [{"params": model.first.parameters(), "lr": 1e-2}, {"params": model.last.parameters()}], lr=1e-3
    )


schedulers = torch.optim.lr_scheduler
LOOP: dict[str, Callable[[], Training]] = {
    "plain": training_of,
    "no-optimizer": partial(training_of, optimizer=lambda model: None),
    "sgd-momentum": partial(training_of, optimizer=partial(_sgd, momentum=0.9, nesterov=True)),
    "adam-one-by-one": partial(training_of, optimizer=_optimizer(torch.optim.Adam, foreach=False)),
    "adam-fused": partial(training_of, optimizer=_optimizer(torch.optim.Adam, fused=True)),
    "adamw-amsgrad": partial(training_of, optimizer=_optimizer(torch.optim.AdamW, amsgrad=True)),
    "rmsprop": partial(training_of, optimizer=_optimizer(torch.optim.RMSprop, lr=1e-3)),
    "adagrad": partial(training_of, optimizer=_optimizer(torch.optim.Adagrad, lr=1e-2)),
    "adafactor": partial(training_of, optimizer=_optimizer(torch.optim.Adafactor)),
    "lbfgs": partial(training_of, _closure, optimizer=_optimizer(CopiedLBFGS, max_iter=2)),
    "parameter-groups": partial(training_of, optimizer=_groups),
    "accumulation": partial(training_of, _accumulate, accumulate=True),
    "accumulation-not-told": partial(training_of, _accumulate),
    "accumulation-in-one-backward": partial(training_of, _accumulate_sums),
    "update-every-other-step": partial(training_of, _only_now_and_then, accumulate=True),
    "clip-norm": partial(training_of, partial(_clip, by=nn.utils.clip_grad_norm_)),
    "clip-value": partial(training_of, partial(_clip, by=nn.utils.clip_grad_value_)),
    "autocast-bfloat16": partial(training_of, _autocast),
    "autocast-float16": partial(training_of, partial(_autocast, dtype=torch.float16)),
    "grad-scaler": partial(training_of, _scaled),
    "cosine-schedule": partial(
        training_of, partial(_scheduled, make=lambda opt: schedulers.CosineAnnealingLR(opt, 10))
    ),
    "one-cycle": partial(
        training_of, partial(_scheduled, make=lambda opt: schedulers.OneCycleLR(opt, 0.1, total_steps=10))
    ),
    "evaluation-between": partial(training_of, _evaluates),
    "no-grad-in-training-mode": partial(training_of, _without_gradients_in_training_mode),
    "inference-mode-between": partial(training_of, _inference_mode),
    "gan": partial(training_of, _gan, loop_bytes=ROWS * ROW_BYTES + GENERATOR_BYTES),
    "several-losses": partial(training_of, _several_losses),
    "two-backward-passes": partial(training_of, _two_backwards),
    "another-loss-later": partial(training_of, _other_losses),
    "autograd-grad": partial(training_of, _grad_function),
    "gradient-of-the-batch": partial(training_of, _penalty_on_inputs),
    "gradient-hooks": partial(training_of, _hooks_on_gradients),
    "step-in-backward": partial(training_of, _step_in_hooks, optimizer=lambda model: None),
    "forward-hooks": partial(training_of, _forward_hooks),
    "bad-batch-caught": partial(training_of, _raises_once),
    "infinite-loss-skipped": partial(training_of, _skips_what_is_not_finite, loop_bytes=ROWS * ROW_BYTES),
    "zeroed-gradients": partial(training_of, _zeroes_instead_of_none, accumulate=True),
    "anomaly-detection": partial(training_of, _anomalies),
    "other-number-of-threads": partial(training_of, _threads),
    **BATCHES,
    **WEIGHTS,
}
LOOPS = [Case(name, "loop", build) for name, build in LOOP.items()]
