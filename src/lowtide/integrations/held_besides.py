"""Tensors that a trainer's process holds besides a step: a reference model, an averaged copy, a data set.

On an accelerator they take the memory that a budget is for, and count. On the CPU a data set is among them,
which is no part of a step: there the bytes are said, with the keyword that counts them. What lies like this
batch is the next one, which the loader of a trainer has ready in every step, and counts on the CPU, too.
"""

import gc
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lowtide.facts.sizes import is_auto
from lowtide.ops.device_memory import CPU, block_bytes
from lowtide.plans import Plan
from lowtide.runtime.loop_messages import LoopOwner
from lowtide.runtime.runner import runner_of
from lowtide.stage_log import say
from lowtide.torch_compat.dispatch import FakeTensor, has_storage, storage_key
from lowtide.torch_compat.python_tensors import python_tensors
from lowtide.trace.model_call import tensors_in
from lowtide.trace.step_device import device_of
from lowtide.units import size_and_bytes

SAID_ELSEWHERE = ("the machine was too busy", "the model or its loss runs", "backward hooks of modules")
"""The beginnings of notes that are logged when they arise."""


@dataclass(frozen=True, slots=True)
class Besides:
    """`nbytes` of tensors that are no part of a step; the `largest` of them, as dtype and shape; and the
    `next_batch_bytes` of those that are the next batch."""

    nbytes: int
    largest: tuple[str, ...]
    on_cpu: bool
    next_batch_bytes: int = 0

    def counted_bytes(self, reserve: int, budget: str | int) -> int:
        """The reserve of a plan: as the user says it, else the bytes on an accelerator, and those of the next
        batch on the CPU. What a device has free (`"auto"`) is without them already."""
        if reserve or is_auto(budget):
            return reserve
        return self.next_batch_bytes if self.on_cpu else self.nbytes


def held_besides(module: nn.Module, batch: Any, optimizers: Sequence[torch.optim.Optimizer]) -> Besides:
    """What the process holds on the step's device besides the tensors of the module, its gradients, its
    `batch` and the state of its optimizers."""
    device = device_of(module, batch)
    parameters = list(module.parameters())
    state = [list(optimizer.state.values()) for optimizer in optimizers]
    own = [*parameters, *module.buffers(), *(p.grad for p in parameters if p.grad is not None)]
    known = _sizes(device, [*own, *tensors_in((batch, state))])
    gc.collect()  # a trainer of before is garbage in cycles
    others: dict[int, tuple[int, str]] = {
        key: found for key, found in _sizes(device, python_tensors(device)).items() if key not in known
    }
    nbytes = sum(size for size, _ in others.values())
    if device != CPU:
        counted = torch.accelerator.memory_allocated(device) - sum(size for size, _ in known.values())
        nbytes = max(0, counted)
    largest = dict.fromkeys(words for _, words in sorted(others.values(), reverse=True))
    alike = Counter(others.values()) & Counter(_sizes(device, tensors_in(batch)).values())
    next_batch_bytes = sum(size * number for (size, _), number in alike.items())
    return Besides(nbytes, tuple(largest)[:3], device == CPU, next_batch_bytes)


def _sizes(device: torch.device, tensors: Iterable[Tensor]) -> dict[int, tuple[int, str]]:
    """By storage, its bytes on `device` and the dtype and shape of its largest tensor."""
    found: dict[int, tuple[int, str]] = {}
    for tensor in tensors:
        if isinstance(tensor, FakeTensor) or tensor.device != device or not has_storage(tensor):
            continue
        shape = "x".join(map(str, tensor.shape))
        words = f"{str(tensor.dtype).removeprefix('torch.')}[{shape}]"
        found.setdefault(storage_key(tensor), (block_bytes(device, tensor), words))
    return found


def tell_of(plan: Plan, besides: Besides, reserve: int) -> None:
    """Say the notes of a plan, and what the process holds besides, where what is not counted of that is more
    than a hundredth of the budget, and the user gave no `reserve`."""
    for note in plan.solution.notes:
        if not note.startswith(SAID_ELSEWHERE):
            say(note)
    counted_bytes = besides.next_batch_bytes if besides.on_cpu else 0
    if reserve or 100 * (besides.nbytes - counted_bytes) <= plan.budget_bytes:
        return
    largest = f" (the largest: {', '.join(besides.largest)})" if besides.largest else ""
    what = f"this process holds {size_and_bytes(besides.nbytes)} of tensors besides the step{largest}"
    if besides.on_cpu:
        but = f", except for the next batch ({size_and_bytes(counted_bytes)})" if counted_bytes else ""
        say(f"{what}, which the budget does not count{but}: Lowtide(..., reserve={besides.nbytes}) does")
    else:
        say(f"{what}, which the budget counts: Lowtide(..., reserve=...) says how much instead")


def loop_is_of(owner: LoopOwner, module: nn.Module) -> None:
    """Let messages advise what the user of a planned `module` can do, whose loop somebody else has."""
    runner = runner_of(module)
    if runner is not None:
        runner.observer.loop_owner = runner.schedules.loop_owner = owner
