"""A function in a process of its own, forked from one that has imported much and computed nothing."""

import multiprocessing
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from typing import Any


class ProcessEnded(Exception):
    """The process gave no answer. `outcome`: `timeout` or `failed`."""

    def __init__(self, outcome: str, words: str) -> None:
        self.outcome = outcome
        super().__init__(words)


def in_own_process(
    work: Callable[..., Any], *arguments: Any, limit_seconds: float, preload: Sequence[str] = ()
) -> Any:
    """What `work(*arguments)` returns there; `ProcessEnded` where nothing comes within the limit."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(preload))
    receive, send = context.Pipe(duplex=False)
    child = context.Process(target=_answer, args=(send, work, arguments), daemon=True)
    start = time.monotonic()
    child.start()
    send.close()
    try:
        if not receive.poll(limit_seconds):
            raise ProcessEnded("timeout", f"after {limit_seconds:.0f} s")
        return receive.recv()
    except EOFError:
        child.join()
        seconds = time.monotonic() - start
        words = f"the process ended with {child.exitcode} after {seconds:.0f} s"
        raise ProcessEnded("failed", words) from None
    finally:
        child.kill()
        child.join()


def _answer(send: Connection, work: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    send.send(work(*arguments))
