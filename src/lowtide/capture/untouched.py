"""Leave no trace of a capture in what belongs to the user."""

import random
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn


@contextmanager
def untouched(model: nn.Module, *, values: bool) -> Iterator[None]:
    """Give the model's attributes and all random states back as they were.

    A forward pass may keep what it computes (`self.last = x`), which at capture is no real tensor.
    `values`: also what buffers contain, which only a pass over real tensors changes.
    """
    # torch's own: numpy's is seldom drawn from in a forward pass, and lowtide's capture has no numpy
    python = random.getstate()
    attributes = [(module, dict(vars(module)), _registered(module)) for module in model.modules()]
    buffers = [(buffer, buffer.detach().clone()) for buffer in model.buffers()] if values else []
    try:
        with torch.random.fork_rng(devices=_accelerators(model)):
            yield
    finally:
        random.setstate(python)
        for module, before, registered in attributes:
            vars(module).clear()
            vars(module).update(before)
            for current, was in zip(_tables(module), registered, strict=True):
                current.clear()
                current.update(was)
        with torch.no_grad():
            for buffer, contents in buffers:
                buffer.copy_(contents)


def _tables(module: nn.Module) -> tuple[dict[str, object], ...]:
    return module._parameters, module._buffers, module._modules  # type: ignore[return-value]


def _registered(module: nn.Module) -> tuple[dict[str, object], ...]:
    return tuple(dict(table) for table in _tables(module))


def _accelerators(model: nn.Module) -> list[int]:
    devices = {tensor.device for tensor in (*model.parameters(), *model.buffers())}
    return sorted({device.index or 0 for device in devices if device.type == "cuda"})
