"""Planning without Python's collector of cycles.

A plan is made of many small records that stay, and the collector looks at all of them again whenever there
are some more: a fifth of the time of long steps. Hardly any of them are cycles.
"""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


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
