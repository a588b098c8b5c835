"""Let a graph end inside of a loop over modules, and the next one go on with the rest of the loop.

Dynamo can go on with what is left of a list, but not of a dict, which is what an `nn.ModuleList` loops over:
it would give up on the whole function. And of what is left, it cannot say which object an item is. Like
`dynamo`, one of the files to read when torch changes.
"""

import contextlib
import unittest.mock
from collections.abc import Iterator
from typing import Any

from torch._dynamo.bytecode_transformation import create_build_tuple, create_call_function
from torch._dynamo.guards import _get_closure_vars
from torch._dynamo.output_graph import OutputGraph
from torch._dynamo.variables.iter import DictViewIterator
from torch._dynamo.variables.lists import TupleVariable


@contextlib.contextmanager
def resumed_loops() -> Iterator[None]:
    """While torch traces: what is left of a dict's keys, values or items can be handed to the next graph."""
    with (
        unittest.mock.patch.object(DictViewIterator, "reconstruct", _reconstruct),
        unittest.mock.patch.object(OutputGraph, "resolve_source_value", _resolve, create=True),
    ):
        yield


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
