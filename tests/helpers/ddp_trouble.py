"""What the ranks of a group run that do not fit together, or that go."""

import os
import signal
from datetime import timedelta
from typing import Any

import torch
from ddp_cases import Blocks
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import lowtide
from lowtide.runtime.runner import runner_of
from lowtide.torch_compat import ddp


def in_group(rank: int, trouble: str) -> Any:
    """One agreement of all ranks with the given trouble on one of them; what it ends with."""
    torch.manual_seed(0)
    net, batch, budget = Blocks(width=16, depth=1), torch.randn(32, 16), "90%"
    if rank == 1 and trouble == "another model":
        net = Blocks(width=16, depth=2)
    if rank == 1 and trouble == "another torch":
        torch.__version__ = "2.99.0"
    if trouble == "too small a budget":
        budget = 1000
    if rank == 1 and trouble == "no model":
        net = None
    if trouble == "another plan":
        plan = lowtide.profile(net, batch).plan("95%" if rank else "90%")
        return plan.apply(net)
    if rank == 1 and trouble == "another batch":
        batch = torch.randn(48, 16)
    lowtide.checkpoint(net, batch, budget=budget)
    return runner_of(net).plans.budget_bytes


def does_not_come(rank: int, seconds: float) -> str:
    """What rank 0 says of rank 1, which is there and plans nothing, when the group's time-out is over."""
    store = ddp.store_of(torch.distributed.group.WORLD)
    patience, said = store.timeout, ""
    store.set_timeout(timedelta(seconds=seconds))
    if rank == 1:
        store.wait(["said"], patience)
        return said
    try:
        lowtide.checkpoint(Blocks(width=16, depth=1), torch.randn(32, 16), budget="90%")
    except lowtide.LowtideError as error:
        said = str(error)
    store.set("said", "")
    return said


def ends_in_a_step(rank: int, how: str) -> None:
    """Rank 1 goes in the middle of the second step, or before its model is called."""
    torch.manual_seed(0)
    net, x = nn.Sequential(Blocks(width=16, depth=1)), torch.randn(32, 16)
    net.register_buffer("sent_before_forward", torch.zeros(3))

    def trouble(*_: Any) -> None:
        if rank == 1 and steps:
            if "killed" in how:
                os.kill(os.getpid(), signal.SIGKILL)
            raise ValueError("a bad batch")

    steps: list[int] = []
    if "forward" in how:
        net.register_forward_pre_hook(trouble)
    if "backward" in how:
        next(net.parameters()).register_hook(trouble)
    model = DDP(lowtide.checkpoint(net, x, budget="90%"))
    for step in range(3):
        if "outside" in how:
            trouble()
        model(x).backward()
        model.zero_grad()
        steps.append(step)


def alone(rank: int) -> str:
    """What a process says that torchrun started and that made no group."""
    torch.distributed.destroy_process_group()
    os.environ.update(RANK=str(rank), WORLD_SIZE="2")
    try:
        lowtide.checkpoint(Blocks(width=16, depth=1), torch.randn(32, 16), budget="90%")
    except lowtide.LowtideError as error:
        return str(error)
    return ""


def several(rank: int, calls: list[tuple[str, dict[str, Any]]]) -> list[Any]:
    """Results, or errors, of functions of this module, one after the other in one group."""
    results: list[Any] = []
    for name, arguments in calls:
        version = torch.__version__
        try:
            results.append(globals()[name](rank, **arguments))
        except Exception as error:
            results.append(f"{type(error).__name__}: {error}")
        torch.__version__ = version
        torch.distributed.barrier()
    return results
