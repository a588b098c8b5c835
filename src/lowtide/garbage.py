"""Python's cyclic garbage collector, while graphs and plans of many thousands of small records are made.

The collector scans all live records again and again, and hardly any of them are cycles: this took a fifth of
the planning time of long steps. One collection scans all that torch has ever traced.
"""

import gc
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

NEW_OBJECTS = 50_000
"""New objects before a collection; Python's default is 700."""

_lock = threading.Lock()
_before: list[tuple[int, int, int]] = []
_users = 0


@contextmanager
def rarely_collected() -> Iterator[None]:
    """Collect after every `NEW_OBJECTS` only; also a decorator.

    The threshold is global: the user's own value is restored when the last thread leaves.
    """
    global _users  # noqa: PLW0603 - the setting itself is one for the whole process
    with _lock:
        _users += 1
        if _users == 1:
            own = gc.get_threshold()
            _before.append(own)
            if 0 < own[0] < NEW_OBJECTS:
                gc.set_threshold(NEW_OBJECTS, *own[1:])
    try:
        yield
    finally:
        with _lock:
            _users -= 1
            if not _users:
                gc.set_threshold(*_before.pop())


@contextmanager
def uncollected() -> Iterator[None]:
    """Collect nothing: what reference cycles keep live does not depend on when the collector runs."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def set_aside() -> Callable[[], None]:
    """Keep the collector away from all objects of now, garbage among them, until the result is called.

    Takes no time. A user's own `gc.freeze()` cannot be told apart later: then garbage is collected instead.
    """
    if gc.get_freeze_count():
        gc.collect()
        return lambda: None
    gc.freeze()
    return gc.unfreeze
