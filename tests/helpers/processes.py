"""Call a function on every process of a gloo group, and give back what each of them returned."""

import multiprocessing
import os
import pickle
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

from ranks import PRELOADED

SECONDS = 300
"""Long enough for a machine that is busy with much else."""


def on_processes(function: Callable[..., Any], ranks: int, folder: Path, *args: Any) -> list[Any]:
    """`function(rank, *args)` in `ranks` processes that share one import of torch."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([*PRELOADED, function.__module__])
    folder.mkdir(exist_ok=True)
    started = [
        context.Process(target=_follow, args=(function, rank, ranks, folder, args)) for rank in range(ranks)
    ]
    for process in started:
        process.start()
    deadline = time.monotonic() + 2 * SECONDS
    try:
        for process in started:
            process.join(max(0.0, deadline - time.monotonic()))
    finally:
        for process in started:
            process.kill()
            process.join()
    answers = [_answer(folder / f"rank{rank}", process.exitcode) for rank, process in enumerate(started)]
    for failed, value in answers:
        assert not failed, value
    return [value for _, value in answers]


def _answer(path: Path, status: int | None) -> tuple[bool, Any]:
    if not path.exists():
        return True, f"{path.name} ended with {status} and said nothing"
    failed, value = pickle.loads(path.read_bytes())
    return failed, value


def _follow(function: Callable[..., Any], rank: int, ranks: int, folder: Path, args: tuple[Any, ...]) -> None:
    import torch
    import torch.distributed as dist
    from impatience import be_impatient

    torch.set_num_threads(1)
    be_impatient()
    try:
        dist.init_process_group(
            "gloo",
            init_method=f"file://{folder}/group",
            rank=rank,
            world_size=ranks,
            timeout=timedelta(seconds=SECONDS),
        )
        answer = (False, function(rank, *args))
    except BaseException:
        answer = (True, traceback.format_exc())
    (folder / f"rank{rank}").write_bytes(pickle.dumps(answer))
    os._exit(0)
