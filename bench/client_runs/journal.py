"""Every loss, gradient and result of a training, as digests that another process can compare.

Losses are seen where `backward` is called and gradients where an optimizer steps, whoever has the loop: no
client has to hand out anything. Digests need no memory of torch's, so that a peak can be measured meanwhile.
"""

import hashlib
import random
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy
import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from lowtide.trace.model_call import tensors_in

SAME_SIZE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
SEED = 7


class Journal:
    """`entries` are names and digests in the order they came; `on_step(number)` is called after every step
    of the optimizer that stepped first."""

    def __init__(self, on_step: Callable[[int], None]) -> None:
        self.entries: list[tuple[str, str]] = []
        self.optimizers: list[Optimizer] = []
        self.num_steps = 0
        self._on_step = on_step
        self._num_losses = 0

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Losses and gradients of the block."""
        before = register_optimizer_step_pre_hook(self._before_step)
        after = register_optimizer_step_post_hook(self._after_step)
        backward = torch.Tensor.backward

        def noted(loss: torch.Tensor, *args: Any, **kwargs: Any) -> None:
            self._num_losses += 1
            self.note(f"loss {self._num_losses}", [loss])
            backward(loss, *args, **kwargs)

        torch.Tensor.backward = noted  # type: ignore[method-assign]
        try:
            yield
        finally:
            torch.Tensor.backward = backward  # type: ignore[method-assign]
            before.remove()
            after.remove()

    def note(self, name: str, tensors: Iterable[torch.Tensor | None]) -> None:
        self.entries.append((name, digest(tensors)))

    def note_in_any_order(self, name: str, tensors: Iterable[torch.Tensor | None]) -> None:
        """Libraries make groups of parameters from sets, so that their order differs between processes."""
        each = sorted(digest([tensor]) for tensor in tensors)
        self.entries.append((name, hashlib.sha256("".join(each).encode()).hexdigest()))

    def note_results(self, models: Iterable[nn.Module]) -> None:
        """Parameters, buffers, optimizer states and states of random generators, at the end."""
        for model in models:
            for name, tensor in (*model.named_parameters(), *model.named_buffers()):
                self.note(name, [tensor])
        for optimizer in self.optimizers:
            states = tensors_in(list(optimizer.state.values()))
            self.note_in_any_order(f"state of {type(optimizer).__name__}", states)
        self.note("torch's random state", [torch.get_rng_state()])
        states = repr((random.getstate(), numpy.random.get_state(legacy=False)))
        self.entries.append(
            ("random states of Python and numpy", hashlib.sha256(states.encode()).hexdigest())
        )

    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if optimizer not in self.optimizers:
            self.optimizers.append(optimizer)

    def _after_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        parameters = [each for group in optimizer.param_groups for each in group["params"]]
        self.note_in_any_order(f"gradients {self.num_steps + 1}", [each.grad for each in parameters])
        if optimizer is self.optimizers[0]:
            self.num_steps += 1
            self._on_step(self.num_steps)


def seed() -> None:
    torch.manual_seed(SEED)
    random.seed(SEED)
    numpy.random.seed(SEED)


def digest(tensors: Iterable[torch.Tensor | None]) -> str:
    """Of the bits of all of them, and of where there is none."""
    found = hashlib.sha256()
    for tensor in tensors:
        found.update(b"none" if tensor is None else _bits(tensor))
    return found.hexdigest()


def _bits(tensor: torch.Tensor) -> bytes:
    plain = tensor.detach()
    if plain.is_sparse:
        plain = plain.coalesce().values()
    if plain.is_complex():
        plain = torch.view_as_real(plain)
    header = f"{tensor.dtype} {tuple(tensor.shape)}".encode()
    bits: bytes = plain.view(SAME_SIZE[plain.element_size()]).cpu().numpy().tobytes()
    return header + bits
