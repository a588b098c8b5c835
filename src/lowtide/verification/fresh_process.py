"""Run a function in a fresh Python process and return its result.

Arguments and result are files. The child imports `module:function` by name, calls it with the keyword
arguments and writes the result. The output of the child is shown only if it fails. `run_fresh` is the
parent's side, `main` the child's.

The child has the parent's settings of torch, such as deterministic algorithms and threads. While it runs, the
parent's tensors among the arguments wait in the host's memory (`parked_tensors`).
"""

import importlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from lowtide.errors import CannotMoveToFreshProcess, FreshProcessError, is_out_of_memory
from lowtide.facts.files import temporary_folder
from lowtide.torch_compat.dispatch import make_first_calls
from lowtide.units import size_and_bytes
from lowtide.verification.parked_tensors import parked
from lowtide.verification.torch_settings import torch_settings, use_settings

LITTLE_BYTES = 1 << 20
"""Where fewer bytes are free, the disk is the reason why a model cannot be written."""


def run_fresh(function: str, *, environment: Mapping[str, str] | None = None, **arguments: Any) -> Any:
    """`function(**arguments)` in a new process, where `function` is written `module:name`.

    `environment` is added to this process's. Arguments may contain tensors and models; shared
    tensors stay shared. An exception of the child is a `FreshProcessError` here, with its message; arguments
    that cannot be pickled are a `CannotMoveToFreshProcess`.
    """
    with temporary_folder() as folder:
        request, answer, log = (Path(folder) / name for name in ("request", "answer", "log"))
        _write(request, arguments)
        # -P: a file in the current folder that is named like a library must not stand in for it.
        command = [
            sys.executable or "",
            "-P",
            "-m",
            "lowtide.verification.fresh_process",
            function,
            str(request),
            str(answer),
        ]
        path = os.pathsep.join(entry or str(Path.cwd()) for entry in sys.path)
        # temporary files of the child are in this folder, which is removed however the child ends
        environ = {**os.environ, **(environment or {}), "PYTHONPATH": path, "TMPDIR": folder}
        with log.open("wb") as output, parked(arguments):
            status = _wait(command, environ, output)
        printed = log.read_text(errors="replace")
        if not answer.exists():
            raise FreshProcessError(_died(status, printed), details=printed)
        # the child wrote this file, in a folder that only this user can read
        reply = torch.load(answer, weights_only=False)
    if "result" in reply:
        return reply["result"]
    kind = CannotMoveToFreshProcess if reply["while_loading"] else FreshProcessError
    raise kind(reply["message"], kind=reply["kind"], details=f"{printed}{reply['traceback']}")


def _write(request: Path, arguments: Mapping[str, Any]) -> None:
    try:
        torch.save((torch_settings(), dict(arguments)), request)
    except Exception as error:  # a user's own __getstate__ or __reduce__ may raise anything
        if (free_bytes := shutil.disk_usage(request.parent).free) < LITTLE_BYTES:
            raise FreshProcessError(
                f"the model cannot be written to {tempfile.gettempdir()} for a fresh process, where "
                f"{size_and_bytes(free_bytes)} are free: make room, or set TMPDIR to another folder",
                kind=type(error).__name__,
            ) from error
        raise CannotMoveToFreshProcess(
            f"cannot send the model to a fresh process: {type(error).__name__}: {_first_line(error)}",
            kind=type(error).__name__,
        ) from error


def _wait(command: list[str], environ: Mapping[str, str], output: Any) -> int:
    """Exit status of the child; the child never outlives this call, Ctrl-C included.

    The child does not outlive this process either: its standard input closes, and it ends.
    """
    try:
        child = subprocess.Popen(
            command, env=environ, stdin=subprocess.PIPE, stdout=output, stderr=subprocess.STDOUT
        )
    except OSError as error:
        raise FreshProcessError(
            f"a fresh process cannot be started ({error}): check sys.executable, and the limit of processes "
            "(ulimit -u)",
            kind=type(error).__name__,
        ) from error
    with child:
        try:
            return child.wait()
        finally:
            child.kill()


def _died(status: int, printed: str) -> str:
    if status == -signal.SIGKILL:
        return (
            "the fresh process was killed, most likely because the machine ran out of memory: "
            "try a smaller batch"
        )
    if status < 0:
        return f"the fresh process ended with signal {signal.Signals(-status).name}"
    last = printed.strip().splitlines()[-1:] or ["it printed nothing"]
    return f"the fresh process ended with status {status} and without an answer: {last[0]}"


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [""])[0]


def end_with_parent(folder: Path) -> None:
    """End this process and remove `folder` when the parent ends.

    The parent has the other end of standard input, which closes however the parent ends.
    """
    lifeline = os.dup(sys.stdin.fileno())
    with Path(os.devnull).open() as nothing:
        os.dup2(nothing.fileno(), sys.stdin.fileno())

    def wait() -> None:
        os.read(lifeline, 1)
        shutil.rmtree(folder, ignore_errors=True)
        os._exit(1)

    threading.Thread(target=wait, daemon=True).start()


def answer_request(function: str, request: Path) -> dict[str, Any]:
    """Load the arguments and call the function: its result, or its error."""
    while_loading = True
    try:
        settings, arguments = torch.load(request, weights_only=False)
        use_settings(settings)
        request.unlink()  # frees the page cache for the measurement
        while_loading = False
        module, _, name = function.partition(":")
        return {"result": getattr(importlib.import_module(module), name)(**arguments)}
    except Exception as error:
        message = (str(error).strip().splitlines() or [""])[0]
        if is_out_of_memory(error):
            message = f"a fresh process ran out of memory: {message}"
        if while_loading:
            message = f"cannot load the model in a fresh process: {type(error).__name__}: {message}"
        return {
            "while_loading": while_loading,
            "kind": type(error).__name__,
            "message": message or type(error).__name__,
            "traceback": traceback.format_exc(),
        }


def main(function: str, request: str, answer: str) -> None:
    end_with_parent(Path(request).parent)
    make_first_calls()
    reply = answer_request(function, Path(request))
    # written under another name first: a file named `answer` is complete
    partial = Path(f"{answer}.partial")
    torch.save(reply, partial)
    partial.rename(answer)


if __name__ == "__main__":
    main(*sys.argv[1:])
