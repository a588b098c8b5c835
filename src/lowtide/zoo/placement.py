"""The devices of this machine, and a target moved to one of them.

`--on` names a device as torch does: `cpu`, `cuda`, `cuda:1`. What a target draws at random is drawn before it
is moved: the same seed gives the same weights and the same batch on every device.
"""

import copy
from collections import deque
from collections.abc import Iterator, MutableMapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from lowtide.errors import TargetError
from lowtide.facts.gpus import GPUS
from lowtide.generators import generators_kept


def devices_here() -> list[torch.device]:
    """The CPU, and every accelerator that torch shows."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None:
        return [torch.device("cpu")]
    count = torch.accelerator.device_count()
    return [torch.device("cpu"), *(torch.device(accelerator.type, index) for index in range(count))]


def device_named(text: str) -> torch.device:
    """The device of this machine that `text` names; TargetError, with all that are here, for another one."""
    here = devices_here()
    wanted = text.strip().lower()
    if wanted in {device.type for device in here} | {str(device) for device in here}:
        return torch.device(wanted)
    hint = ""
    if wanted in GPUS:
        hint = f"; for a GPU that is not here, say --device {wanted}"
    elif wanted.startswith("cuda") and not torch.backends.cuda.is_built():  # type: ignore[no-untyped-call]
        hint = "; this torch is built without CUDA"
    raise TargetError(f"no device '{text}' here: this machine has {', '.join(map(str, here))}{hint}")


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Every generator of torch starts from `seed`, and has its own state again afterwards."""
    with generators_kept(devices_here()):
        torch.manual_seed(seed)
        yield


def move_model(model: nn.Module, optimizer: torch.optim.Optimizer | None, device: torch.device) -> nn.Module:
    """The model on `device`, and its optimizer with the parameters and the state that it has there.

    A counter of steps stays where torch keeps it: on the CPU, unless the optimizer is fused or capturable.
    """
    before = list(model.parameters())
    model = model.to(device)
    # torch moves most parameters in place, and makes others anew
    there = dict(zip(before, model.parameters(), strict=True))
    for group in [] if optimizer is None else optimizer.param_groups:
        assert optimizer is not None
        keeps_counter = not (group.get("fused") or group.get("capturable"))
        for index, parameter in enumerate(group["params"]):
            if parameter not in there:  # of a loss, say
                parameter.data = parameter.data.to(device)
            group["params"][index] = now = there.get(parameter, parameter)
            state = optimizer.state.pop(parameter, {})
            for key, value in state.items():
                if not (keeps_counter and isinstance(value, torch.Tensor) and value.dim() == 0):
                    state[key] = moved(value, device)
            if state:
                optimizer.state[now] = state
    return model


def moved(value: Any, device: torch.device) -> Any:
    """`value` with every tensor in it on `device`: in mappings, sequences and attributes of objects."""
    if callable(getattr(value, "to", None)) and not isinstance(value, type):
        return value.to(device)
    if isinstance(value, MutableMapping):
        copied = copy.copy(value)
        for key, part in value.items():
            copied[key] = moved(part, device)
        return copied
    if isinstance(value, tuple | list | set | deque):
        parts = [moved(part, device) for part in value]
        return type(value)(*parts) if hasattr(value, "__match_args__") else type(value)(parts)
    if getattr(value, "__dict__", None) and not callable(value) and not isinstance(value, type):
        copied = copy.copy(value)
        for key, part in vars(value).items():
            object.__setattr__(copied, key, moved(part, device))
        return copied
    return value
