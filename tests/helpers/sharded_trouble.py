"""What the ranks of a group run in the tests of sharded models that cannot go on."""

import os
import signal
import warnings
from typing import Any

import torch
from sharded_cases import Case, build

import lowtide
from lowtide.runtime.runner import runner_of


def _case(rank: int, **options: Any) -> Case:
    warnings.simplefilter("ignore")
    return build(rank=rank, width=16, blocks=options.pop("blocks", 1), batch=(2, 8), **options)


def agree(rank: int, trouble: str, folder: str) -> Any:
    """One agreement of all ranks with the given trouble on rank 1; the plan's peak, or what is raised."""
    case = _case(rank, blocks=2 if rank == 1 and trouble == "another model" else 1)
    budget = "97%" if rank == 1 and trouble == "another budget" else "98%"
    tokens = case.tokens.float() if rank == 1 and trouble == "a bad batch" else case.tokens
    if trouble != "another file":
        lowtide.checkpoint(case.model, tokens, budget=budget, optimizer=case.optimizer, loss=case.loss)
        return runner_of(case.model).schedules.budget_bytes
    path = f"{folder}/{rank}.json"
    found = lowtide.profile(case.model, case.tokens, optimizer=case.optimizer, loss=case.loss)
    found.plan(found.peak_bytes - rank).save(path)
    return lowtide.load_plan(path).apply(case.model)


def all_troubles(rank: int, troubles: list[str], folder: str) -> list[Any]:
    """What each ends with, one after the other in one group."""
    results: list[Any] = []
    for trouble in troubles:
        try:
            results.append(agree(rank, trouble, folder))
        except lowtide.LowtideError as error:
            results.append(f"{type(error).__name__}: {error}")
        torch.distributed.barrier()
    return results


def ends_in_a_step(rank: int, how: str) -> None:
    """Rank 1 goes in the middle of the second step."""
    case, steps = _case(rank), []

    def trouble(*_: Any) -> None:
        if rank == 1 and steps:
            if "killed" in how:
                os.kill(os.getpid(), signal.SIGKILL)
            raise ValueError("a bad batch")

    if "forward" in how:
        case.model.register_forward_pre_hook(trouble)
    else:
        case.model.blocks[0].register_full_backward_pre_hook(trouble)
    lowtide.checkpoint(case.model, case.tokens, budget="98%", optimizer=case.optimizer, loss=case.loss)
    for step in range(3):
        case.loss(case.model(case.tokens)).backward()
        case.optimizer.step()
        case.optimizer.zero_grad()
        steps.append(step)
