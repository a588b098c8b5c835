"""Let a graph end inside of a loop over modules, and the next one go on with the rest of the loop.

Dynamo would run a whole function without graphs where one of them ends inside of a loop. It can go on with
what is left of a list, but not of a dict, which is what an `nn.ModuleList` loops over, and of what is left it
cannot say which object an item is.

A loop that itself asks for a shape that depends on data, as one over the experts of a layer that picks the
tokens of each by `nonzero`, is left to eager from there on, with all that it calls: a few graphs for every
round of it, and others in every step, would cost more than the step. Like `dynamo`, one of the files to read
when torch changes.

End a graph before `x[mask] = value` where the value is trained.

How many rows the mask picks is only known from its values, and the gradient of `value` has as many. Dynamo
does not see that coming: the whole graph would be made and fail in its backward pass, and then again in
every function that calls this one, from the outermost to the innermost, twice each. Like `dynamo`, one of
the files to read when torch changes.

Let a model log a line in its forward without a break in the graph: it is logged when the graph has run.

Like `dynamo`, one of the files to read when torch changes.
"""

import contextlib
import sys
import unittest.mock
from collections.abc import Iterator
from typing import Any

import torch
from torch._C._dynamo.eval_frame import _FrameAction, _FrameExecStrategy
from torch._dynamo.bytecode_transformation import create_build_tuple, create_call_function
from torch._dynamo.exc import Unsupported, unimplemented
from torch._dynamo.guards import _get_closure_vars
from torch._dynamo.output_graph import OutputGraph
from torch._dynamo.source import AttrSource
from torch._dynamo.symbolic_convert import InstructionTranslatorBase
from torch._dynamo.variables.base import VariableTracker
from torch._dynamo.variables.constant import ConstantVariable
from torch._dynamo.variables.iter import DictViewIterator
from torch._dynamo.variables.lists import TupleVariable
from torch._dynamo.variables.misc import DebuggingVariable, LoggingLoggerVariable
from torch._dynamo.variables.tensor import TensorVariable

SHAPE_OF_DATA = "Dynamic shape operator"
"""torch's name for what a graph ended at."""

_torchs_answer = InstructionTranslatorBase.maybe_has_backedge


@contextlib.contextmanager
def resumed_loops() -> Iterator[None]:
    """While torch traces: a graph may end inside of a loop, and what is left of a dict's keys, values or
    items can be handed to the next one."""
    with (
        unittest.mock.patch.object(InstructionTranslatorBase, "maybe_has_backedge", _gives_up_in_loop),
        unittest.mock.patch.object(DictViewIterator, "reconstruct", _reconstruct),
        unittest.mock.patch.object(OutputGraph, "resolve_source_value", _resolve, create=True),
    ):
        yield


def _gives_up_in_loop(translator: InstructionTranslatorBase) -> bool:
    """Asked while torch handles what a graph ended at: whether to run the function without graphs, where that
    is a loop. One that asks for shapes is run so, with all that it calls."""
    error = sys.exc_info()[1]
    if (
        isinstance(error, Unsupported)
        and error.gb_type == SHAPE_OF_DATA
        and len(error.real_stack) == 1  # the function itself, and nothing that it calls
        and translator.parent is None
        and _torchs_answer(translator)
    ):
        error.skip_frame = True
        error.frame_exec_strategy = _FrameExecStrategy(_FrameAction.SKIP, _FrameAction.SKIP)
        raise error
    return False


def _resolve(output: Any, source: Any) -> Any:
    """The object that a source stands for; torch's own forgets the functions that a source may name."""
    frame = output.root_tx
    return source.get_value({**_get_closure_vars(), "G": frame.f_globals, "L": frame.f_locals}, {}, {})


def _reconstruct(iterator: Any, codegen: Any) -> None:
    """Write code that makes an iterator over what is left."""
    left = iterator._iter.__reduce__()[1][0]  # does not move the iterator on
    if iterator.view_type == "keys":
        items = [key.vt for key in left]
    elif iterator.view_type == "values":
        items = list(left)
    else:
        items = [TupleVariable([key.vt, value]) for key, value in left]
    codegen.add_push_null(lambda: codegen.append_output(codegen.create_load_python_module(iter)))
    codegen.foreach(items)
    codegen.append_output(create_build_tuple(len(items)))
    codegen.extend_output(create_call_function(1, False))


METHOD = "method___setitem__"
TORCHS_WRITE: Any = getattr(TensorVariable, METHOD, None)


@contextlib.contextmanager
def masked_writes_between_graphs() -> Iterator[None]:
    """Let eager run writes of trained values to where a mask says."""
    if TORCHS_WRITE is None:
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
    return TORCHS_WRITE(variable, tx, key, value)


def _is_tensor(variable: Any, name: str, wanted: Any) -> bool:
    if not isinstance(variable, TensorVariable):
        return False
    example = variable.proxy.node.meta.get("example_value")
    return isinstance(example, torch.Tensor) and bool(getattr(example, name) == wanted)


TORCHS_LOG = LoggingLoggerVariable.call_method


@contextlib.contextmanager
def log_lines_after_graphs() -> Iterator[None]:
    """Log lines without values of tensors come in every call, after the graph that they stand in."""
    with unittest.mock.patch.object(LoggingLoggerVariable, "call_method", _log_later):
        yield


def _log_later(logger: Any, tx: Any, name: str, args: list[Any], kwargs: dict[str, Any]) -> Any:
    method = getattr(logger.value, name, None)
    if logger.source is None or kwargs or not all(isinstance(arg, ConstantVariable) for arg in args):
        return TORCHS_LOG(logger, tx, name, args, kwargs)
    later = DebuggingVariable(method, source=AttrSource(logger.source, name))
    tx.output.root_tx.debug_locals.append((later, list(args)))
    return VariableTracker.build(tx, None)
