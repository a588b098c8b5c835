"""What lowtide says while it works.

    say      one line about a result, for everyone
    stage    one line about a stage, for those who follow the data: what went in, what came out, its seconds

    capture: a Sequential -> 2 graphs, 195 nodes, for input_0 float32[512x32] (0.62 s)
    profile: 47 different calls -> peak 2.2 MiB at 'sum_2', step 6.7 ms (0.95 s)

Lines go to the logger `lowtide` and its child `lowtide.stages`, at level INFO; decisions of a plan at DEBUG.
`say` writes to stderr where logging shows nothing of level INFO. A program that sets the level of the logger
`lowtide` higher (`logging.getLogger("lowtide").setLevel(logging.WARNING)`) hears nothing.
"""

import logging
import sys
import time
from collections.abc import Callable, Iterable
from functools import wraps
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")

logger = logging.getLogger("lowtide")
stages = logging.getLogger("lowtide.stages")


def say(line: str) -> None:
    """Say one line about a result.

    A handler of the root logger that shows warnings alone, as notebooks have, does not swallow the line: only
    the level of lowtide's own logger does.
    """
    is_silenced = logger.level > logging.INFO or logging.root.manager.disable >= logging.INFO
    if logger.hasHandlers() and logger.isEnabledFor(logging.INFO):
        logger.info(line)
    elif not is_silenced:
        print(f"lowtide: {line}", file=sys.stderr)


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
