"""`budget="auto"`: what a device has free now, for a step of which a part is already allocated.

    budget = free memory / processes that share it + bytes of the step that are already there - reserve

The second term is there since a step's peak counts parameters, gradients, optimizer state and batch, and the
free memory no longer has those that exist. The reserve is for memory that no step sees: blocks that an
allocator keeps or wastes, libraries that are loaded at first use, Python itself. It is a rule of thumb.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from lowtide.errors import LowtideError
from lowtide.facts.gpus import Gpu
from lowtide.facts.host_memory import host_bytes, machine_id, resident_bytes
from lowtide.facts.sizes import is_reserved
from lowtide.units import format_size

RESERVED_PERCENT = 10
"""The reserve, of all that is free or that the step already has: the same before and after a first step."""
LEAST_RESERVE_BYTES = 512 << 20
CONTEXT_BYTES = 512 << 20
"""What a process has of a GPU before its first tensor: CUDA's context and the kernels of torch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FreeMemory:
    """The memory of a step's device as one process sees it.

    `held_bytes`: of the step's own tensors that are allocated there. `machine` names the machine where its
    processes share this memory; it is empty where each process has a device of its own.
    """

    device: str
    free_bytes: int
    held_bytes: int = 0
    machine: str = ""

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True, slots=True)
class AutoBudget:
    """The bytes of a budget, and the line that says where they come from."""

    nbytes: int
    line: str

    def text(self, asked: str | int) -> str:
        """The budget as it is written in bytes: of reserved ones where `asked` is `auto reserved`."""
        return f"{self.nbytes}B reserved" if is_reserved(asked) else f"{self.nbytes}B"


def host_memory(held_bytes: int = 0) -> FreeMemory:
    """The free memory of this machine or container.

    Of tensors, the bytes that are resident count as held: weights that are mapped from a file, or have never
    been written, do not lessen the free memory.
    """
    free = host_bytes()
    if free is None:
        raise LowtideError(
            "budget 'auto': this system does not say how much memory is free: write a size, such as "
            "budget='8GiB'"
        )
    resident = resident_bytes()
    held = held_bytes if resident is None else min(held_bytes, resident)
    return FreeMemory(device="cpu", free_bytes=free, held_bytes=held, machine=machine_id())


def auto_budget(processes: Sequence[FreeMemory]) -> AutoBudget:
    """The same budget for all processes that train one model: that of the one with the least memory."""
    machines = [process.machine for process in processes]
    budgets = [
        _budget_of(process, sharing=machines.count(process.machine) if process.machine else 1)
        for process in processes
    ]
    return min(budgets, key=lambda budget: budget.nbytes)


def _budget_of(memory: FreeMemory, *, sharing: int) -> AutoBudget:
    free = memory.free_bytes // sharing
    whole = free + memory.held_bytes
    reserve = _reserve(whole)
    by = f" / {sharing} processes" if sharing > 1 else ""
    held = f" + {format_size(memory.held_bytes)} this step already has" if memory.held_bytes else ""
    terms = (
        f"{format_size(memory.free_bytes)} free on {memory.device}{by}{held} - {format_size(reserve)} reserve"
    )
    return _checked(whole - reserve, terms)


def gpu_budget(gpu: Gpu) -> AutoBudget:
    """A budget for a GPU that is not here."""
    free = gpu.memory_bytes - CONTEXT_BYTES
    reserve = _reserve(free)
    context = f"{format_size(CONTEXT_BYTES)} CUDA context"
    terms = f"{format_size(gpu.memory_bytes)} of {gpu.name} - {context} - {format_size(reserve)} reserve"
    return _checked(free - reserve, terms)


def _reserve(whole_bytes: int) -> int:
    return max(LEAST_RESERVE_BYTES, whole_bytes * RESERVED_PERCENT // 100)


def _checked(nbytes: int, terms: str) -> AutoBudget:
    if nbytes <= 0:
        raise LowtideError(
            f"budget 'auto' leaves nothing: {terms}. Free memory, or write a size, such as budget='8GiB'"
        )
    return AutoBudget(nbytes, f"budget auto: {format_size(nbytes)} = {terms}")
