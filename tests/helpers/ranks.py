"""Run a function on several processes of one group, as `torchrun` would, and get every rank's result.

One process imports torch and forks the ranks, so that a group costs one start. A rank that raises sends
its exception's name and text instead of a result; one that is killed sends nothing.
"""

import contextlib
import importlib
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

GROUP_SECONDS = 300
LIMIT_SECONDS = 900
"""Long enough for a machine that is busy with much else: nothing that goes well waits for these."""

PRELOADED = (
    *("lowtide.api", "functorch.compile", "torch._dynamo.backends.inductor", "torch._inductor.scheduler"),
    *("torch.export._trace", "torch.distributed.tensor.experimental"),
)
"""What a first trace imports: once for all ranks."""


@dataclass(frozen=True, slots=True)
class Rank:
    """What a rank ended with: `value`, or the `error` that it raised; `status` as of `os.waitpid`."""

    status: int
    value: Any = None
    error: str = ""
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class Group:
    """`function(rank, **arguments)`, written `module:name`, on every rank of a group."""

    function: str
    arguments: dict[str, Any] = field(default_factory=dict)
    ranks: int = 2
    seconds: float = GROUP_SECONDS
    backend: str = "gloo"


def run_ranks(groups: dict[str, Group], *, limit_seconds: float = LIMIT_SECONDS) -> dict[str, list[Rank]]:
    """What the ranks of each group end with; one group after the other."""
    with tempfile.TemporaryDirectory(prefix="ranks-") as folder:
        jobs = [(g.function, g.arguments, g.ranks, g.seconds, g.backend) for g in groups.values()]
        Path(folder, "request").write_bytes(pickle.dumps(jobs))
        environ = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "OMP_WAIT_POLICY": "passive",
            "TMPDIR": folder,
            "PYTHONPATH": os.pathsep.join(entry or str(Path.cwd()) for entry in sys.path),
        }
        command = [sys.executable, "-P", __file__, folder]
        with Path(folder, "log").open("w") as log:
            lead = subprocess.Popen(command, env=environ, stdout=log, stderr=log, start_new_session=True)
            try:
                status = lead.wait(limit_seconds)
            finally:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(lead.pid, signal.SIGKILL)
                lead.wait()
        assert status == 0, Path(folder, "log").read_text()
        left = sorted(path.name for path in Path(folder).iterdir() if path.name.startswith("lowtide"))
        assert not left, f"left behind: {left}"
        answers = pickle.loads(Path(folder, "answer").read_bytes())
    return {name: [Rank(*fields) for fields in ranks] for name, ranks in zip(groups, answers, strict=True)}


def on_ranks(function: str, *, ranks: int = 2, **arguments: Any) -> list[Any]:
    """What `function` gives on every rank of one group; each of them has to give something."""
    ended = run_ranks({function: Group(function, arguments, ranks=ranks)})[function]
    assert not any(rank.status or rank.error for rank in ended), ended
    return [rank.value for rank in ended]


def _lead(folder: Path) -> None:
    for module in PRELOADED:
        importlib.import_module(module)
    importlib.import_module("impatience").be_impatient()
    answers = []
    jobs = pickle.loads((folder / "request").read_bytes())
    for number, (function, arguments, ranks, seconds, backend) in enumerate(jobs):
        module, _, name = function.partition(":")
        call = getattr(importlib.import_module(module), name)
        own = folder / str(number)
        own.mkdir()
        answers.append(_group(own, ranks, seconds, backend, partial(call, **arguments)))
    (folder / "answer").write_bytes(pickle.dumps(answers))


def _group(folder: Path, ranks: int, seconds: float, backend: str, call: Any) -> list[Any]:
    children = []
    for rank in range(ranks):
        child = os.fork()
        if child == 0:
            _follow(folder, rank, ranks, seconds, backend, call)
        children.append(child)
    start, ended = time.monotonic(), {}
    while len(ended) < ranks:
        child, status = os.wait()
        ended[children.index(child)] = (status, time.monotonic() - start)
    results = []
    for rank in range(ranks):
        path = folder / f"rank{rank}"
        value, error = pickle.loads(path.read_bytes()) if path.exists() else (None, "")
        results.append((ended[rank][0], value, error, ended[rank][1]))
    return results


def _follow(folder: Path, rank: int, ranks: int, seconds: float, backend: str, call: Any) -> None:
    import torch
    import torch.distributed as dist

    status, result = 1, (None, "")
    try:
        torch.set_num_threads(1)
        dist.init_process_group(
            backend,
            init_method=f"file://{folder}/group",
            rank=rank,
            world_size=ranks,
            timeout=timedelta(seconds=seconds),
        )
        result, status = (call(rank), ""), 0
    except BaseException as error:
        result = (None, f"{type(error).__name__}: {error}")
    (folder / f"rank{rank}").write_bytes(pickle.dumps(result))
    os._exit(status)


if __name__ == "__main__":
    _lead(Path(sys.argv[1]))
