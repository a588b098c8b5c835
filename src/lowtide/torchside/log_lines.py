"""Let a model log a line in its forward without a break in the graph: it is logged when the graph has run.

Like `dynamo`, one of the files to read when torch changes.
"""

import contextlib
import unittest.mock
from collections.abc import Iterator
from typing import Any

from torch._dynamo.source import AttrSource
from torch._dynamo.variables.base import VariableTracker
from torch._dynamo.variables.constant import ConstantVariable
from torch._dynamo.variables.misc import DebuggingVariable, LoggingLoggerVariable

TORCHS = LoggingLoggerVariable.call_method


@contextlib.contextmanager
def log_lines_after_graphs() -> Iterator[None]:
    """Log lines without values of tensors come in every call, after the graph that they stand in."""
    with unittest.mock.patch.object(LoggingLoggerVariable, "call_method", _log_later):
        yield


def _log_later(logger: Any, tx: Any, name: str, args: list[Any], kwargs: dict[str, Any]) -> Any:
    method = getattr(logger.value, name, None)
    if logger.source is None or kwargs or not all(isinstance(arg, ConstantVariable) for arg in args):
        return TORCHS(logger, tx, name, args, kwargs)
    later = DebuggingVariable(method, source=AttrSource(logger.source, name))
    tx.output.root_tx.debug_locals.append((later, list(args)))
    return VariableTracker.build(tx, None)
