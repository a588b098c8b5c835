"""What lowtide says while it works.

    say      one line about a result, for everyone
    stage    one line about a stage, for those who follow the data: what went in, what came out, its seconds

    capture: a Sequential -> 2 graphs, 195 nodes, for input_0 float32[512x32] (0.62 s)
    profile: 47 different calls -> peak 2.2 MiB at 'sum_2', step 6.7 ms (0.95 s)

Lines go to the logger `lowtide` and its child `lowtide.stages`, at level INFO; decisions of a plan at DEBUG.
`say` writes to stderr where logging shows nothing of level INFO. A program that sets the level of the logger
`lowtide` higher (`logging.getLogger("lowtide").setLevel(logging.WARNING)`) hears nothing.

A warning in a program that has no handlers of its own goes to stderr as well, and begins with its sender:

    lowtide: the machine was too busy to time 1 of 234 ops: ...
"""

import logging
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any, ParamSpec, TypeVar

from lowtide.folding import print_line

P = ParamSpec("P")
R = TypeVar("R")

logger = logging.getLogger("lowtide")
stages = logging.getLogger("lowtide.stages")
SENDER = "lowtide: "


def say(line: str) -> None:
    """Say one line about a result.

    A handler of the root logger that shows warnings alone, as notebooks have, does not swallow the line: only
    the level of lowtide's own logger does. Of several processes (torchrun), the first writes to stderr.
    """
    is_silenced = logger.level > logging.INFO or logging.root.manager.disable >= logging.INFO
    if _is_handled() and logger.isEnabledFor(logging.INFO):
        logger.info(line)
    elif not is_silenced and is_first_process():
        print_line(line, to=sys.stderr, start=SENDER)


def is_first_process() -> bool:
    """Whether this process speaks for all of its group."""
    return os.environ.get("RANK", "0") == "0"


class _LastResort(logging.Handler):
    """Writes warnings to stderr where the program has no handler, as `logging.lastResort` does, and names the
    sender."""

    def emit(self, record: logging.LogRecord) -> None:
        if not _is_handled():
            print_line(self.format(record), to=sys.stderr, start=SENDER)


def _is_handled() -> bool:
    """Whether a handler of the program gets what lowtide logs."""
    at: logging.Logger | None = logger
    while at is not None:
        if any(not isinstance(handler, _LastResort) for handler in at.handlers):
            return True
        at = at.parent if at.propagate else None
    return False


if not any(isinstance(handler, _LastResort) for handler in logger.handlers):
    logger.addHandler(_LastResort(logging.WARNING))


@contextmanager
def without_warnings() -> Iterator[None]:
    """Log no warning inside of the block, for work that is done again."""

    def is_lower(record: logging.LogRecord) -> bool:
        return record.levelno < logging.WARNING

    logger.addFilter(is_lower)
    try:
        yield
    finally:
        logger.removeFilter(is_lower)


def stage(
    name: str,
    *,
    given: Callable[..., str],
    made: Callable[[Any], str],
    details: Callable[[Any], Iterable[str]] = lambda _: (),
) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Log each call of a function as a stage of this name, also where it ends in an error.

    `given` describes its arguments, `made` its result, and `details` gives lines for level DEBUG. They are
    called where the log shows them: a stage that nobody follows costs nothing.
    """

    def logged(function: Callable[P, R]) -> Callable[P, R]:
        @wraps(function)
        def run(*args: P.args, **kwargs: P.kwargs) -> R:
            if not stages.isEnabledFor(logging.INFO):
                return function(*args, **kwargs)
            source, start = given(*args, **kwargs), time.perf_counter()
            stages.debug("%s: %s", name, source)
            try:
                result = function(*args, **kwargs)
            except BaseException as error:
                seconds = time.perf_counter() - start
                stages.info("%s: %s -> %s (%.2f s)", name, source, type(error).__name__, seconds)
                raise
            seconds = time.perf_counter() - start
            if stages.isEnabledFor(logging.DEBUG):
                for line in details(result):
                    stages.debug("%s: %s", name, line)
            stages.info("%s: %s -> %s (%.2f s)", name, source, made(result), seconds)
            return result

        return run

    return logged
