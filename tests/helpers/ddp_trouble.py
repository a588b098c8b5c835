"""What the ranks of a group run that do not fit together, or that go."""

import gc
import os
import signal
import threading
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from ddp_cases import Blocks
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import lowtide
from lowtide.runtime.runner import attach, runner_of
from lowtide.torch_compat import ddp
from lowtide.torch_compat.modules import route_of


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
    return runner_of(net).schedules.budget_bytes


def applied_and_removed(rank: int) -> dict[str, Any]:
    """What a planned model leaves in its process: before it is removed, after, and when it was collected."""
    backward, sockets = torch.autograd.backward, _listening()
    net, x = Blocks(width=16, depth=1), torch.randn(32, 16)
    found: dict[str, Any] = {}
    for how in ("removed", "collected"):
        model = DDP(lowtide.checkpoint(net, x, budget="90%"))
        model(x).backward()
        found["while planned"] = (torch.autograd.backward is backward, _answers())
        if how == "removed":
            runner, other = runner_of(net), Blocks(width=16, depth=1)
            lowtide.checkpoint(other, x, budget="90%")
            lowtide.remove(net)
            found["another is planned"] = (torch.autograd.backward is backward, _answers())
            lowtide.remove(other)
            attach(net, runner)
            found["attached again"] = (torch.autograd.backward is backward, _answers())
            lowtide.remove(net)
            found["wrapper"] = route_of(model) is None
            del runner, other
        del model
        net = Blocks(width=16, depth=1)
        gc.collect()
        found[how] = (torch.autograd.backward is backward, _answers())
    found["listens"] = sorted(_listening() - sockets)
    return found


def _answers() -> bool:
    return any(thread.name == "lowtide-rank" for thread in threading.enumerate())


def _listening() -> set[str]:
    """The listening TCP sockets of this process, by inode."""
    text = "".join(Path(f"/proc/net/{kind}").read_text() for kind in ("tcp", "tcp6"))
    inodes = {row[9] for row in map(str.split, text.splitlines()) if row[3] == "0A"}
    links = [str(link.readlink()) for link in Path("/proc/self/fd").iterdir() if link.is_symlink()]
    return {inode for inode in inodes if f"socket:[{inode}]" in links}


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
