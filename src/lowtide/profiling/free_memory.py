"""The memory that a device has free for a step of which tensors exist already."""

import torch

from lowtide.facts.auto_budget import FreeMemory, host_memory
from lowtide.ops.device_memory import bytes_of_storages
from lowtide.profiling.devices import device_for
from lowtide.trace.model_call import Loop


def free_memory(device: str, loop: Loop | None) -> FreeMemory:
    """What `device` has free now, and the bytes there of the step's tensors that exist (`loop`).

    On an accelerator, blocks that torch's allocator has cached are free.
    """
    torch_device = torch.device(device)
    held_bytes = 0 if loop is None else bytes_of_storages(torch_device, loop.present_tensors)
    usable_bytes = device_for(torch_device).usable_bytes()
    if usable_bytes is None:
        return host_memory(held_bytes)
    return FreeMemory(device=device, free_bytes=usable_bytes, held_bytes=held_bytes)
