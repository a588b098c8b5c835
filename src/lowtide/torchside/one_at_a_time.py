"""Let one thread at a time trace and plan: torch's tracers, and what lowtide changes in them, are shared.

Calls that run what was compiled before do not wait.
"""

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

from torch._dynamo.convert_frame import compile_lock

__all__ = ["compile_lock", "one_at_a_time"]

P = ParamSpec("P")
R = TypeVar("R")


def one_at_a_time(function: Callable[P, R]) -> Callable[P, R]:
    """`function` under the lock that torch itself holds while it compiles; who has it may go on."""

    @functools.wraps(function)
    def alone(*args: P.args, **kwargs: P.kwargs) -> R:
        with compile_lock:
            return function(*args, **kwargs)

    return alone
