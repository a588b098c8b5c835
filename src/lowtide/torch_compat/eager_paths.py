"""Let model code take the path that it takes in eager, where it asks whether it is being compiled.

Dynamo answers such questions with True, and libraries then choose other ops, which round otherwise. Like
`dynamo`, one of the files to read when torch changes.
"""

import contextlib
import unittest.mock
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import torch
import torch._dynamo
from torch._dynamo import external_utils, trace_rules
from torch._dynamo.exc import raise_observed_exception
from torch._dynamo.variables.base import VariableTracker
from torch._dynamo.variables.torch import TorchInGraphFunctionVariable

Handler = Callable[..., Any]

COMPILING = (
    torch.compiler.is_compiling,
    torch.compiler.is_dynamo_compiling,
    torch.compiler.is_exporting,
    torch._utils.is_compiling,
    external_utils.is_compiling,
)
HINTS = (torch._dynamo.mark_static_address,)
"""What libraries tell torch in eager for a later compilation; torch refuses to trace it."""
CAPTURING = (torch.cuda.is_current_stream_capturing, torch.xpu.is_current_stream_capturing)
TORCH = str(Path(torch.__file__).parent)
ASKERS = 3
"""How many functions stand between the one that asks torch and the one that wants to know."""


@contextlib.contextmanager
def eager_answers() -> Iterator[None]:
    """Answer code that is not torch's own as it is answered in eager."""
    handlers: dict[Any, Handler] = TorchInGraphFunctionVariable._get_handlers()
    answers: dict[Any, Handler] = {ask: _not_compiling(handlers[ask]) for ask in COMPILING}
    answers |= dict.fromkeys(CAPTURING, _asked_now) | dict.fromkeys(HINTS, _nothing_done)
    followed = dict.fromkeys((*CAPTURING, *HINTS), TorchInGraphFunctionVariable)
    with contextlib.ExitStack() as allowed:
        for hint in HINTS:
            allowed.enter_context(unittest.mock.patch.object(hint, "_dynamo_forbidden", False))
        with (
            unittest.mock.patch.dict(handlers, answers),
            unittest.mock.patch.dict(trace_rules.get_torch_obj_rule_map(), followed),
        ):
            yield


def _not_compiling(torchs: Handler) -> Handler:
    def answer(asked: Any, tx: Any, *args: Any, **kwargs: Any) -> Any:
        if tx.f_code.co_filename.startswith(TORCH) or _has_context_variable(tx):
            return torchs(asked, tx, *args, **kwargs)
        return VariableTracker.build(tx, False)

    return answer


def _has_context_variable(tx: Any) -> bool:
    """Whether who asks owns a `ContextVar`: torch cannot follow one, hence the question."""
    for _ in range(ASKERS):
        if tx is None:
            return False
        owner = getattr(tx.symbolic_locals.get("self"), "value", None)
        if any(isinstance(value, ContextVar) for value in getattr(owner, "__dict__", {}).values()):
            return True
        tx = tx.parent
    return False


def _nothing_done(_hint: Any, tx: Any, *_args: Any, **_kwargs: Any) -> Any:
    return VariableTracker.build(tx, None)


def _asked_now(asked: Any, tx: Any) -> Any:
    """The answer of now; where torch was built without the device, eager raises, and so does this."""
    try:
        answer = asked.value()
    except Exception as error:
        raise_observed_exception(RuntimeError, tx, args=[str(error)])
    return VariableTracker.build(tx, answer)
