"""Python's search for garbage, while graphs of many thousands of small objects are made.

Planning without Python's collector of cycles.

A plan is made of many small records that stay, and the collector looks at all of them again whenever there
are some more: a fifth of the time of long steps. Hardly any of them are cycles.
"""

import contextlib
import gc
import threading
from collections.abc import Iterator
from contextlib import contextmanager

NEW_OBJECTS = 50_000
"""Python looks after every 700 of them, and finds next to nothing where all of them stay."""

_lock = threading.Lock()
_before: list[tuple[int, int, int]] = []
_users = 0


@contextlib.contextmanager
def rarely_collected() -> Iterator[None]:
    """Let Python look for garbage after every `NEW_OBJECTS` inside; the user's own setting comes back when
    the last thread leaves."""
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
def collector_paused() -> Iterator[None]:
    """Let no cycles be looked for meanwhile; also a decorator."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
