"""Let a graph end inside of a loop over modules, and the next one go on with the rest of the loop.

Dynamo would run a whole function without graphs where one of them ends inside of a loop. It can go on with
what is left of a list, but not of a dict, which is what an `nn.ModuleList` loops over, and of what is left it
cannot say which object an item is.

A loop that itself asks for a shape that depends on data, as one over the experts of a layer that picks the
tokens of each by `nonzero`, is left to eager from there on, with all that it calls: a few graphs for every
round of it, and others in every step, would cost more than the step. Like `dynamo`, one of the files to read
when torch changes.
"""

import contextlib
import sys
import unittest.mock
from collections.abc import Iterator
from typing import Any

from torch._C._dynamo.eval_frame import _FrameAction, _FrameExecStrategy
from torch._dynamo.bytecode_transformation import create_build_tuple, create_call_function
from torch._dynamo.exc import Unsupported
from torch._dynamo.guards import _get_closure_vars
from torch._dynamo.output_graph import OutputGraph
from torch._dynamo.symbolic_convert import InstructionTranslatorBase
from torch._dynamo.variables.iter import DictViewIterator
from torch._dynamo.variables.lists import TupleVariable

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
