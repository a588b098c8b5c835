"""The canonical training step, and the bytes that are there before it starts."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from lowtide.errors import LowtideError


def train_step(
    model: nn.Module,
    batch: Any,
    optimizer: torch.optim.Optimizer | None = None,
    loss: Callable[[Any], torch.Tensor] | None = None,
) -> torch.Tensor:
    """Forward, loss, backward, optimizer step, gradients dropped. Returns the loss, detached.

    The model's output is held to the end, as in a loop that logs it. Gradients are expected to be
    None at the start. A dict is passed as keywords, a tuple or list as positional arguments.
    """
    output = call(model, batch)
    value = loss_of(output, loss)
    value.backward()  # type: ignore[no-untyped-call]
    if optimizer is not None:
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    model.zero_grad(set_to_none=True)
    return value.detach()


def call(model: nn.Module, batch: Any) -> Any:
    """`model` on a batch: a dict as keywords, a tuple or list as positional arguments, else one argument."""
    if isinstance(batch, Mapping):
        return model(**batch)
    return model(*batch) if isinstance(batch, tuple | list) else model(batch)


def loss_of(output: Any, loss: Callable[[Any], torch.Tensor] | None = None) -> torch.Tensor:
    """What a step differentiates: `loss(output)`, else the output's own loss, else a one-element
    output, else the sum of the floating outputs."""
    if loss is not None:
        return loss(output)
    own = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    if isinstance(own, torch.Tensor):
        return own
    if isinstance(output, torch.Tensor) and output.numel() == 1:
        return output
    sums = [tensor.sum() for tensor in tensors_in(output) if tensor.is_floating_point()]
    if not sums:
        raise LowtideError("the model returns no floating tensor: pass `loss=` a function of its output")
    return torch.stack(sums).sum() if len(sums) > 1 else sums[0]


def static_bytes(model: nn.Module, batch: Any, optimizer: torch.optim.Optimizer | None = None) -> int:
    """Bytes of parameters, buffers, batch and optimizer state. Shared memory counts once."""
    state = list(optimizer.state.values()) if optimizer is not None else []
    sizes = {}
    for tensor in tensors_in([list(model.parameters()), list(model.buffers()), batch, state]):
        storage = tensor.untyped_storage()
        sizes[(str(tensor.device), storage.data_ptr())] = storage.nbytes()
    return sum(sizes.values())


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """All tensors in nested dicts, lists and tuples, in their order."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from tensors_in(item)
    elif isinstance(value, tuple | list):
        for item in value:
            yield from tensors_in(item)


def device_of(model: nn.Module, batch: Any) -> torch.device:
    """Where the step runs: the device of the first parameter, else of the batch, else the CPU."""
    for tensor in tensors_in([list(model.parameters()), batch]):
        return tensor.device
    return torch.device("cpu")
