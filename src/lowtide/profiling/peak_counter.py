"""The most memory of a device since the last reading, while a model trains; cheap enough for every step.

    accelerator   live bytes, by torch's own counter (`max_memory_allocated`)
    CPU           resident bytes of this process, by the kernel's high-water mark: tensors, blocks that the C
                  library keeps, libraries and Python

Each reading resets its counter, which all readers in the process share.
"""

from itertools import chain

import torch
from torch import nn

from lowtide.facts.host_memory import reset_resident_peak, resident_peak_bytes
from lowtide.ops.device_memory import CPU
from lowtide.profiling.devices import device_for


def peak_bytes(model: nn.Module) -> int:
    """The most bytes of the device that `model` is on since the last call, which this call resets.

        writer.add_scalar("peak_bytes", lowtide.peak_bytes(model), step)

    On an accelerator these are live bytes, by torch's own counter: a `max_memory_allocated` of your own
    begins anew at each call. On the CPU they are the resident bytes of the process, by the kernel's high-
    water mark, with Python, libraries and whatever the C library keeps: more than a plan's peak, and what a
    container limits. Where a system does not reset that mark, it is the most since the process began. Nothing
    is installed and no result changes. Call it once before a loop, to begin there: planning takes memory,
    too.
    """
    peak = device_for(_device_of(model)).next_peak_bytes()
    if peak is not None:
        return peak
    nbytes = resident_peak_bytes()
    reset_resident_peak()
    return nbytes


def is_resident(model: nn.Module) -> bool:
    """Whether `peak_bytes` is of the process's resident memory, not of torch's live bytes."""
    return _device_of(model) == CPU


def _device_of(model: nn.Module) -> torch.device:
    """The accelerator of a model, else the CPU; without a look at every parameter."""
    if not torch.accelerator.is_available():
        return CPU
    tensors = chain(model.parameters(), model.buffers())
    return next((tensor.device for tensor in tensors if tensor.device != CPU), CPU)
