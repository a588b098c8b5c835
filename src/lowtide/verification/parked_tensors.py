"""Keep a target's tensors in the host's memory while another process uses the device.

A model that is verified would otherwise be on the device twice: here, and in the fresh process. `parked`
copies the memory behind the tensors to the host, and frees it on the device; afterwards it is on the device
again.
Tensors and parameters stay the same objects, with the same views of the same storages.

    with parked(target):          device: 0 bytes of the target      host: a copy
        ...
                                  device: the target as before

Shortcomings: the device's context stays, and so do tensors that neither the model, the batch, the optimizer
nor the loss refers to.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from types import FunctionType
from typing import Any

import torch
from torch import nn

from lowtide.errors import LowtideError
from lowtide.torch_compat.dispatch import is_wrapper, storage_key
from lowtide.trace.model_call import tensors_in
from lowtide.units import size_and_bytes
from lowtide.zoo.targets import Target


@dataclass(frozen=True, slots=True)
class _Parked:
    """A storage without memory, the bytes that it had, and the tensors that are known to view it."""

    storage: torch.UntypedStorage
    on_host: torch.UntypedStorage
    views: list[torch.Tensor]

    def give_back(self) -> None:
        """May be called again after an interruption."""
        self.storage.resize_(self.on_host.nbytes())
        self.storage.copy_(self.on_host, non_blocking=False)

    def stay_on_host(self) -> None:
        """Let the tensors view the host's memory instead."""
        for view in self.views:
            on_host = torch.empty(0, dtype=view.dtype).set_(
                self.on_host, view.storage_offset(), view.shape, view.stride()
            )
            view.data = on_host


@contextmanager
def parked(arguments: Mapping[str, Any]) -> Iterator[None]:
    """Inside the block, the device's tensors of the targets among `arguments` are in the host's memory."""
    taken: list[_Parked] = []
    try:
        for views in _by_storage(arguments):
            storage = views[0].untyped_storage()
            torch.accelerator.synchronize(storage.device)
            taken.append(_Parked(storage, _copy(storage), views))
            storage.resize_(0)
        if torch.accelerator.is_available():
            torch.accelerator.empty_cache()
        yield
    finally:
        _give_back(taken)


def _copy(storage: torch.UntypedStorage) -> torch.UntypedStorage:
    on_host = torch.empty(storage.nbytes(), dtype=torch.uint8).untyped_storage()
    return on_host.copy_(storage, non_blocking=False)


def _give_back(taken: list[_Parked]) -> None:
    """To the last storage, an interruption by Ctrl-C or not."""
    interruption: KeyboardInterrupt | None = None
    lost: list[_Parked] = []
    while taken:
        try:
            try:
                taken[-1].give_back()
            except torch.OutOfMemoryError:
                taken[-1].stay_on_host()
                lost.append(taken[-1])
            taken.pop()
        except KeyboardInterrupt as caught:
            interruption = caught
    if lost:
        nbytes, device = sum(one.on_host.nbytes() for one in lost), lost[0].storage.device
        raise LowtideError(
            f"{size_and_bytes(nbytes)} of the model waited in the host's memory for the fresh process, and "
            f"{device} has no room for them any more: they stay on the host, nothing is lost. Free memory "
            f"there, then model.to('{device}')"
        )
    if interruption is not None:
        raise interruption


def _by_storage(arguments: Mapping[str, Any]) -> list[list[torch.Tensor]]:
    """The tensors on devices, those of one storage together; without storages that cannot be freed."""
    found: dict[int, list[torch.Tensor]] = {}
    for target in arguments.values():
        if isinstance(target, Target):
            for tensor in _tensors_of(target):
                if tensor.device.type not in ("cpu", "meta") and _is_plain(tensor):
                    found.setdefault(storage_key(tensor), []).append(tensor)
    return [list({id(t): t for t in views}.values()) for views in found.values() if _can_be_freed(views[0])]


def _tensors_of(target: Target) -> Iterator[torch.Tensor]:
    for module in target.model.modules():
        for tensor in tensors_in(list(vars(module).values())):
            yield tensor
            if isinstance(tensor, nn.Parameter) and tensor.grad is not None:
                yield tensor.grad
    optimizer = target.optimizer
    yield from tensors_in([target.batch, list(optimizer.state.values()) if optimizer is not None else []])
    yield from tensors_in(_held_by(target.loss))


def _held_by(function: Any) -> list[Any]:
    """What a loss refers to besides its arguments."""
    if isinstance(function, partial):
        return [function.args, function.keywords, *_held_by(function.func)]
    if isinstance(function, FunctionType):
        return [cell.cell_contents for cell in function.__closure__ or ()]
    return [vars(function)] if hasattr(function, "__dict__") else []


def _is_plain(tensor: torch.Tensor) -> bool:
    return tensor.layout is torch.strided and not is_wrapper(tensor)


def _can_be_freed(tensor: torch.Tensor) -> bool:
    """Whether torch owns the memory. Memory of other processes or libraries stays where it is."""
    storage = tensor.untyped_storage()
    return bool(storage.resizable()) and storage.nbytes() > 0 and tensor.device.type != "mps"
