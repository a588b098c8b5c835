"""Graphs that are not written out as text while torch compiles them.

torch writes out every one, also where nobody gets to see it: a large one takes a second.
"""

import contextlib
import os
import threading
import unittest.mock
from collections.abc import Iterator
from typing import Any

from torch import fx

ASKED = "TORCH_TRACE"
"""The variable of the environment that asks for the text."""


@contextlib.contextmanager
def unprinted() -> Iterator[None]:
    """Let this thread write no graph out, unless the user asked torch for a record of what it compiles."""
    if ASKED in os.environ:
        yield
        return
    thread, torchs = threading.get_ident(), fx.GraphModule.print_readable

    def write(module: fx.GraphModule, *args: Any, **kwargs: Any) -> str:
        text: str = "" if threading.get_ident() == thread else torchs(module, *args, **kwargs)
        return text

    with unittest.mock.patch.object(fx.GraphModule, "print_readable", write):
        yield
