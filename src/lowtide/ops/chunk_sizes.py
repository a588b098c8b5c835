"""How large the chunks of an op are on a device.

    CPU            a size that stays in the caches, whatever the whole is
    accelerator    a sixteenth of the whole, at most 64 MiB, and never less than on the CPU

A chunk costs an accelerator at least one launch of a kernel for each op, some microseconds. With chunks for
caches, a gigabyte is a thousand launches. By the rule above an op of up to a gigabyte has sixteen chunks; a
chunk of a larger one takes tens of microseconds, several times a launch. Its temporaries are a sixteenth of
its value, so chunks still win back nearly all that they can.

The sizes are fixed, not measured. The bytes of a chunk are part of a plan's peak: a size that came out
differently in the process that runs the plan would break its budget.
"""

import torch

MOST_CHUNKS = 16
"""Of a value of up to `MOST_CHUNKS * LARGEST_BYTES`."""
LARGEST_BYTES = 64 << 20


def launches_kernels(device: torch.device) -> bool:
    """Whether each op costs a launch, as on an accelerator."""
    return device.type not in ("cpu", "meta")


def chunk_bytes(whole_bytes: int, on_cpu: int, device: torch.device) -> int:
    """The bytes of a chunk of a value; `on_cpu` is the size for caches."""
    if not launches_kernels(device):
        return on_cpu
    return max(on_cpu, min(-(-whole_bytes // MOST_CHUNKS), LARGEST_BYTES))
