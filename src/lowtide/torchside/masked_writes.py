"""End a graph before `x[mask] = value` where the value is trained.

How many rows the mask picks is only known from its values, and the gradient of `value` has as many. Dynamo
does not see that coming: the whole graph would be made and fail in its backward pass, and then again in
every function that calls this one, from the outermost to the innermost, twice each. Like `dynamo`, one of
the files to read when torch changes.
"""

import contextlib
import unittest.mock
from collections.abc import Iterator
from typing import Any

import torch
from torch._dynamo.exc import unimplemented
from torch._dynamo.variables.lists import TupleVariable
from torch._dynamo.variables.tensor import TensorVariable

METHOD = "method___setitem__"
TORCHS: Any = getattr(TensorVariable, METHOD, None)


@contextlib.contextmanager
def masked_writes_between_graphs() -> Iterator[None]:
    """Let eager run writes of trained values to where a mask says."""
    if TORCHS is None:
        yield
        return
    with unittest.mock.patch.object(TensorVariable, METHOD, _write):
        yield


def _write(variable: Any, tx: Any, key: Any, value: Any) -> Any:
    keys = key.items if isinstance(key, TupleVariable) else [key]
    trained = torch.is_grad_enabled() and _is_tensor(value, "requires_grad", True)
    if trained and any(_is_tensor(each, "dtype", torch.bool) for each in keys):
        unimplemented(
            gb_type="Dynamic shape operator",
            context="x[mask] = value",
            explanation="the gradient of the value has as many rows as the mask picks",
            hints=[],
        )
    return TORCHS(variable, tx, key, value)


def _is_tensor(variable: Any, name: str, wanted: Any) -> bool:
    if not isinstance(variable, TensorVariable):
        return False
    example = variable.proxy.node.meta.get("example_value")
    return isinstance(example, torch.Tensor) and bool(getattr(example, name) == wanted)
