"""The device that a step's tensors are on, and the bytes that they take there.

The budget of a step is memory of one device. Tensors of the CPU beside an accelerator (step counters, a batch
that the model moves itself) take nothing of it.
"""

from collections.abc import Iterable

import torch
from torch import Tensor

from lowtide.errors import CaptureError
from lowtide.planning.allocator import rounded
from lowtide.torch_compat.dispatch import local

CPU = torch.device("cpu")


def with_index(device: torch.device) -> torch.device:
    """The device that torch takes for `device`: of an accelerator without an index, the current one."""
    index: int | None = device.index
    if device.type in {CPU.type, "meta"} or index is not None:
        return device
    return torch.device(device.type, torch.accelerator.current_device_index())


def devices_beside_cpu(tensors: Iterable[Tensor]) -> list[torch.device]:
    """The devices of these tensors, each with its index, without the CPU."""
    return sorted({tensor.device for tensor in tensors} - {CPU}, key=str)


def common_device(tensors: Iterable[Tensor]) -> torch.device:
    """The accelerator of a step with these tensors; the CPU where none of them is on one.

    Raises a `CaptureError` for tensors on several accelerators: one budget cannot be kept on each of them.
    """
    found = devices_beside_cpu(tensors)
    if len(found) > 1:
        names = ", ".join(map(str, found[:-1])) + f" and {found[-1]}"
        raise CaptureError(
            f"the step has tensors on {names}, and a budget is for one device: move model and batch to one "
            f"of them (`model.to('{found[0]}')`), or plan the part of the model on each device by itself"
        )
    return found[0] if found else CPU


def is_on(device: torch.device, tensor: Tensor) -> bool:
    """Whether a tensor takes memory of a step's device."""
    return device in (CPU, tensor.device)


def block_bytes(device: torch.device, tensor: Tensor, nbytes: int | None = None) -> int:
    """The bytes of a tensor's storage, of `nbytes` where given, in the memory of a step's device: on an
    accelerator, of its block."""
    nbytes = tensor.untyped_storage().nbytes() if nbytes is None else nbytes
    if device == CPU:
        return nbytes
    return rounded(nbytes) if tensor.device == device else 0


def bytes_of_storages(device: torch.device, tensors: Iterable[Tensor]) -> int:
    """The bytes that these tensors take of a step's device; memory that several of them share counts once."""
    sizes = {}
    for tensor in map(local, tensors):
        sizes[str(tensor.device), tensor.untyped_storage().data_ptr()] = block_bytes(device, tensor)
    return sum(sizes.values())
