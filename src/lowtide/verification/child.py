"""The fresh process behind `fresh_process.run_fresh`: `python -m lowtide.verification.child`."""

import importlib
import os
import shutil
import sys
import threading
import traceback
from pathlib import Path
from typing import Any

import torch

from lowtide.torch_compat.dispatch import make_first_calls


def end_with_parent(folder: Path) -> None:
    """End this process, and remove `folder`, should the process that started it be gone first.

    The parent holds the other end of standard input, which closes however the parent ends.
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
    """Load the arguments, call the function: its result, or what went wrong and when."""
    while_loading = True
    try:
        arguments = torch.load(request, weights_only=False)
        request.unlink()  # its pages would only crowd out what is to be measured
        while_loading = False
        module, _, name = function.partition(":")
        return {"result": getattr(importlib.import_module(module), name)(**arguments)}
    except Exception as error:
        message = (str(error).strip().splitlines() or [""])[0]
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
    # Written whole under another name first: a file that is there is complete.
    partial = Path(f"{answer}.partial")
    torch.save(reply, partial)
    partial.rename(answer)


if __name__ == "__main__":
    main(*sys.argv[1:])
