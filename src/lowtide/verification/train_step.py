"""The canonical training step, and the bytes that are there before it starts."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import nn

from lowtide.torch_compat.fsdp2 import local
from lowtide.trace.model_call import Loss, call, loss_of, tensors_in


def train_step(
    model: nn.Module,
    batch: Any,
    optimizer: torch.optim.Optimizer | None = None,
    loss: Loss | None = None,
    *,
    holds_outputs: bool = True,
    within: Callable[[], AbstractContextManager[Any]] = nullcontext,
) -> torch.Tensor:
    """Forward, loss, backward, optimizer step, gradients dropped. Returns the loss, detached.

    The model's output is held to the end, as in a loop that logs it, unless told otherwise.
    Forward pass and loss run inside of what `within` makes.
    Gradients are expected to be None at the start. A dict is passed as keywords, a tuple or list as
    positional arguments.
    """
    with within():
        output = call(model, batch)
        value = loss_of(output, loss)
    if not holds_outputs:
        del output
    value.backward()  # type: ignore[no-untyped-call]
    if optimizer is not None:
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    model.zero_grad(set_to_none=True)
    return value.detach()


def autocast_here(device: torch.device) -> Callable[[], AbstractContextManager[Any]]:
    """Makes blocks of autocast like the one that is on here, one for each forward pass; none without."""
    if not torch.is_autocast_enabled(device.type):
        return nullcontext
    dtype, cached = torch.get_autocast_dtype(device.type), torch.is_autocast_cache_enabled()
    return partial(torch.autocast, device.type, dtype, cache_enabled=cached)


def static_bytes(model: nn.Module, batch: Any, optimizer: torch.optim.Optimizer | None = None) -> int:
    """Bytes that this process has of parameters, buffers, batch and optimizer state.

    Shared memory counts once.
    """
    state = list(optimizer.state.values()) if optimizer is not None else []
    sizes = {}
    for tensor in tensors_in([list(model.parameters()), list(model.buffers()), batch, state]):
        storage = local(tensor).untyped_storage()
        sizes[(str(tensor.device), storage.data_ptr())] = storage.nbytes()
    return sum(sizes.values())


def device_of(model: nn.Module, batch: Any) -> torch.device:
    """Where the step runs: the device of the first parameter, else of the batch, else the CPU."""
    for tensor in tensors_in([list(model.parameters()), batch]):
        return tensor.device
    return torch.device("cpu")
