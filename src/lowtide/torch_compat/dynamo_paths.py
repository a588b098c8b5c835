"""The path of model code under Dynamo: the path of eager, with as few graph breaks as can be.

- `eager_answers`: code that asks whether it is being compiled gets eager's answer. Libraries choose other ops
  under torch.compile, which round differently.
- `torchs_own_code`: graphs may begin in torch's own modules, and checkpoint_sequential is traced.
- `resumed_loops`: a graph may end inside of a loop over modules, and the next graph continues the loop.
  Dynamo would run the whole function without graphs. From a loop over parts of a size that depends on data
  (experts, each with the rows that a router picks) the rest of the function runs eagerly. So does the rest
  from a list of numbers that the model computes, where they decide shapes (`counts.tolist()`, then `split`):
  every step has other ones, and would be traced and planned anew.
- `masked_writes_between_graphs`: a graph ends before `x[mask] = value` where the value is trained. The
  gradient of the value has as many rows as the mask picks. torch would fail only in the backward pass of the
  whole graph, and then again in every function that calls this one.
- `known_answers`: the names of torch's classes, and whether a tensor is one of inference mode, end no graph.
- `log_lines_after_graphs`: a forward may log a line without a graph break; the line comes after the graph.
"""

import contextlib
import sys
import types
import unittest.mock
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import torch
import torch._dynamo
from torch._C._dynamo.eval_frame import _FrameAction, _FrameExecStrategy
from torch._dynamo import external_utils, trace_rules
from torch._dynamo.bytecode_transformation import create_build_tuple, create_call_function
from torch._dynamo.exc import SkipFrame, Unsupported, raise_observed_exception, unimplemented
from torch._dynamo.guards import _get_closure_vars
from torch._dynamo.output_graph import OutputGraph
from torch._dynamo.resume_execution import TORCH_DYNAMO_RESUME_IN_PREFIX, ContinueExecutionCache
from torch._dynamo.side_effects import SideEffects
from torch._dynamo.source import AttrSource
from torch._dynamo.symbolic_convert import InstructionTranslatorBase
from torch._dynamo.variables import builtin as builtins_of_dynamo
from torch._dynamo.variables.base import VariableTracker
from torch._dynamo.variables.constant import ConstantVariable
from torch._dynamo.variables.iter import DictViewIterator, IteratorVariable
from torch._dynamo.variables.lists import TupleVariable
from torch._dynamo.variables.misc import DebuggingVariable, LoggingLoggerVariable
from torch._dynamo.variables.tensor import TensorVariable
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
"""Functions by which libraries give torch hints for a later compilation; torch refuses to trace them."""
ASKERS = 3
"""How many frames, from the one that asks torch outwards, may belong to the asking object."""


@contextlib.contextmanager
def eager_answers() -> Iterator[None]:
    """Give eager's answers to code that is not torch's own."""
    handlers: dict[Any, Handler] = TorchInGraphFunctionVariable._get_handlers()
    answers: dict[Any, Handler] = {ask: _not_compiling(handlers[ask]) for ask in COMPILING}
    capturing = _asks_for_capture()
    answers |= dict.fromkeys(capturing, _asked_now) | dict.fromkeys(HINTS, _nothing_done)
    followed = dict.fromkeys((*capturing, *HINTS), TorchInGraphFunctionVariable)
    with contextlib.ExitStack() as allowed:
        for hint in HINTS:
            allowed.enter_context(unittest.mock.patch.object(hint, "_dynamo_forbidden", False))
        with (
            unittest.mock.patch.dict(handlers, answers),
            unittest.mock.patch.dict(trace_rules.get_torch_obj_rule_map(), followed),
        ):
            yield


def _asks_for_capture() -> list[Any]:
    """`is_current_stream_capturing` of each device that has it: those in torch, and the accelerator here."""
    here = torch.accelerator.current_accelerator()
    modules = [torch.cuda, torch.xpu, *([] if here is None else [torch.get_device_module(here)])]
    found = (getattr(module, "is_current_stream_capturing", None) for module in modules)
    return list(dict.fromkeys(ask for ask in found if ask is not None))


def _not_compiling(torchs: Handler) -> Handler:
    def answer(asked: Any, tx: Any, *args: Any, **kwargs: Any) -> Any:
        if tx.f_code.co_filename.startswith(str(_TORCH)) or _has_context_variable(tx):
            return torchs(asked, tx, *args, **kwargs)
        return VariableTracker.build(tx, False)

    return answer


def _has_context_variable(tx: Any) -> bool:
    """Whether the asking object owns a `ContextVar`: torch cannot follow one, hence the question."""
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
    """The present answer; raises as in eager where torch was built without the device."""
    try:
        answer = asked.value()
    except Exception as error:
        raise_observed_exception(RuntimeError, tx, args=[str(error)])
    return VariableTracker.build(tx, answer)


_TORCH = Path(torch.__file__).parent
_MODULES = _TORCH / "nn" / "modules"
"""The folder of torch's own modules."""
TRACED_TOO = (_TORCH / "ao" / "quantization", _TORCH / "utils" / "checkpoint.py")
"""Code of torch that Dynamo skips, though it can trace it: fake quantizers, and checkpoint_sequential."""


@contextlib.contextmanager
def torchs_own_code() -> Iterator[None]:
    """Let graphs begin in torch's own modules: an nn.Sequential whose third module cannot be traced has a
    graph before the module, and one after it. torch would run the whole nn.Sequential without graphs."""
    # where a module's hooks cannot be traced, its call runs eagerly, and its forward in graphs
    files = [file for file in _MODULES.glob("*.py") if file.stem not in ("__init__", "module", "rnn")]
    with (
        _added(trace_rules.get_mod_inlinelist(), TRACED_TOO),
        _added(trace_rules.get_legacy_mod_inlinelist(), files),
    ):
        yield


@contextlib.contextmanager
def _added(allowed: set[str], paths: Iterable[Path]) -> Iterator[None]:
    added = {str(path) for path in paths} - allowed
    allowed.update(added)
    try:
        yield
    finally:
        allowed.difference_update(added)


def is_shared(code: types.CodeType) -> bool:
    """Whether one code object runs with and without ops: the rest of a loop, after each graph break in it, or
    the code of torch's own modules. torch would trace the code no more after a run without ops, which the
    last run of a loop often is."""
    return code.co_name.startswith(TORCH_DYNAMO_RESUME_IN_PREFIX) or Path(code.co_filename).parent == _MODULES


SHAPE_OF_DATA = "Dynamic shape operator"
"""torch's name for the cause of a graph break."""

EAGERLY = _FrameExecStrategy(_FrameAction.SKIP, _FrameAction.SKIP)
"""Without graphs, and so all functions that it calls."""
INSIDE = _FrameExecStrategy(_FrameAction.SKIP, _FrameAction.DEFAULT)
"""Without graphs; the functions that it calls are traced."""

UNPACK = "unpack_var_sequence"
TORCHS_UNPACK = TensorVariable.unpack_var_sequence
_torchs_answer = InstructionTranslatorBase.maybe_has_backedge
_torchs_changed = SideEffects._get_modified_vars
_torchs_rest = ContinueExecutionCache.lookup
_broken_in_loop: "weakref.WeakSet[types.CodeType]" = weakref.WeakSet()
"""Code with a loop that breaks at `SHAPE_OF_DATA`."""
_rests: "weakref.WeakSet[types.CodeType]" = weakref.WeakSet()
"""The rest of such code, from the loop on."""
_breaks: "weakref.WeakKeyDictionary[types.CodeType, set[types.CodeType]]" = weakref.WeakKeyDictionary()
"""Code whose present graph break gives it a result that data decide, and where to add its rest."""
_after_rows: "set[types.CodeType]" = weakref.WeakSet()  # type: ignore[assignment]
"""The rest of a function that gets a tensor with as many rows as the data decide."""
_after_numbers: "set[types.CodeType]" = weakref.WeakSet()  # type: ignore[assignment]
"""The rest of a function that gets a list of numbers that the model computed."""
RESULT = "L['___stack"
"""How torch begins the name of the result of a graph break, in the code that runs after it."""


@contextlib.contextmanager
def resumed_loops() -> Iterator[None]:
    """While torch traces: a graph may end inside of a loop, and the next graph gets the remaining keys,
    values or items of a dict."""
    with (
        unittest.mock.patch.object(InstructionTranslatorBase, "maybe_has_backedge", _gives_up_in_loop),
        unittest.mock.patch.object(ContinueExecutionCache, "lookup", _rest_of),
        unittest.mock.patch.object(SideEffects, "_get_modified_vars", _iterators_last),
        unittest.mock.patch.object(DictViewIterator, "reconstruct", _reconstruct),
        unittest.mock.patch.object(OutputGraph, "resolve_source_value", _resolve, create=True),
        unittest.mock.patch.object(TensorVariable, UNPACK, _unpack),
    ):
        yield


def _gives_up_in_loop(translator: InstructionTranslatorBase) -> bool:
    """While torch handles a graph break: whether to run the function without graphs because of a loop. A loop
    that breaks at `SHAPE_OF_DATA` runs without graphs, with all functions that it calls."""
    error = sys.exc_info()[1]
    if (
        isinstance(error, Unsupported)
        and error.gb_type == SHAPE_OF_DATA
        and len(error.real_stack) == 1  # in the function itself, not in a function that it calls
        and translator.parent is None
        and _torchs_answer(translator)
    ):
        if translator.output.count_calls() == 0:
            error.skip_frame = True
            error.frame_exec_strategy = EAGERLY
            raise error
        _broken_in_loop.add(translator.f_code)
    elif isinstance(error, Unsupported) and error.gb_type == SHAPE_OF_DATA and translator.parent is None:
        # a function that is called may make a list of the rows' numbers
        _breaks[translator.f_code] = _after_rows if len(error.real_stack) == 1 else _after_numbers
    return False


def numbers_follow(translator: InstructionTranslatorBase, *, in_array: bool) -> None:
    """Call this where a graph break gives the function, or one that calls it, numbers that the model made.
    `in_array`: an array of numpy, which torch does not follow: a later loop counts as one over its numbers.
    """
    if not in_array:
        _breaks[translator.output.root_tx.f_code] = _after_numbers
    elif translator.parent is None and translator.instruction_pointer is not None:
        later = translator.instructions[translator.instruction_pointer :]
        if any("JUMP_BACKWARD" in instruction.opname for instruction in later):
            _broken_in_loop.add(translator.f_code)


def is_row_result(code: types.CodeType, name: str) -> bool:
    """Whether a source is the result of a graph break that made as many rows as the data decide."""
    return code in _after_rows and name.startswith(RESULT)


def is_models_number(code: types.CodeType, name: str) -> bool:
    """Whether a source is an item of a list of numbers that the model computed."""
    return code in _after_numbers and name.startswith(RESULT) and name.endswith("]") and "][" in name


def run_eagerly(code: types.CodeType) -> None:
    """Run the rest of a function without graphs from now on, with all functions that it calls."""
    _rests.add(code)


def _unpack(variable: Any, tx: Any, *args: Any, **kwargs: Any) -> Any:
    """The rows of a tensor, as for a loop over them. The rest of a function runs eagerly from a loop on whose
    number of turns depends on data, such as one over the experts that were chosen."""
    code = tx.output.root_tx.f_code
    if is_row_result(code, getattr(variable.source, "name", "")):
        run_eagerly(code)
        raise SkipFrame("a loop over as many rows as the data decide")
    return TORCHS_UNPACK(variable, tx, *args, **kwargs)


def _iterators_last(effects: SideEffects) -> list[VariableTracker]:
    """The objects that a graph's code changes, iterators after all others: the code finds a list that a hook
    of the next module appends to by that module, as the next item of the iterator over modules."""
    return sorted(_torchs_changed(effects), key=lambda variable: isinstance(variable, IteratorVariable))


def _rest_of(code: types.CodeType, *key: Any) -> types.CodeType:
    """The code that runs after a graph break in `code`."""
    rest: types.CodeType = _torchs_rest(code, *key)
    if code in _broken_in_loop:
        _rests.add(rest)
    if code in _breaks:
        _breaks.pop(code).add(rest)
    return rest


def runs_eagerly(code: types.CodeType) -> bool:
    """Whether `code` is the rest of a function whose sizes depend on data."""
    return code in _rests


def _resolve(output: Any, source: Any) -> Any:
    """The object behind a source; torch's own method lacks the functions that a source may name."""
    frame = output.root_tx
    return source.get_value({**_get_closure_vars(), "G": frame.f_globals, "L": frame.f_locals}, {}, {})


def _reconstruct(iterator: Any, codegen: Any) -> None:
    """Write code that makes an iterator over the remaining items."""
    left = iterator._iter.__reduce__()[1][0]  # does not advance the iterator
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
    """Let eager run masked writes of trained values."""
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
            gb_type=SHAPE_OF_DATA,
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


NAMES = ("__module__", "__name__", "__qualname__")
GETATTR = "_call_getattr"
GETTER: Any = getattr(builtins_of_dynamo, "GetAttrBuiltinVariable", None)
TORCHS_GETATTR: Any = getattr(GETTER, GETATTR, None)
"""None where torch knows the names itself."""
INFERENCE = "is_inference"
IS_INFERENCE = f"method_{INFERENCE}"
TORCHS_METHODS: dict[str, Any] = getattr(TensorVariable, "tp_methods", {})
"""Methods of tensors by name, where torch has a table of them."""
TORCHS_IS_INFERENCE: Any = getattr(TensorVariable, IS_INFERENCE)


@contextlib.contextmanager
def known_answers() -> Iterator[None]:
    """Answer questions of model code while torch traces, where torch would end the graph."""
    handlers: dict[Any, Handler] = TorchInGraphFunctionVariable._get_handlers()
    mode = torch.is_inference_mode_enabled
    with contextlib.ExitStack() as patches:
        patches.enter_context(unittest.mock.patch.object(TensorVariable, IS_INFERENCE, _is_inference))
        patches.enter_context(unittest.mock.patch.dict(handlers, {mode: _inference_mode(handlers[mode])}))
        if INFERENCE in TORCHS_METHODS:
            method = type(TORCHS_METHODS[INFERENCE])(_is_inference)
            patches.enter_context(unittest.mock.patch.dict(TORCHS_METHODS, {INFERENCE: method}))
        if TORCHS_GETATTR is not None:
            patches.enter_context(unittest.mock.patch.object(GETTER, GETATTR, _named))
        yield


def _named(builtin: Any, tx: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
    """An attribute of a variable; a name of a class of torch is a constant."""
    if isinstance(args[0], TorchInGraphFunctionVariable) and args[1].is_python_constant():
        name = args[1].as_python_constant()
        found = getattr(args[0].value, name, None) if name in NAMES else None
        if isinstance(found, str):
            return VariableTracker.build(tx, found)
    return TORCHS_GETATTR(builtin, tx, args, kwargs)


def _is_inference(variable: Any, tx: Any) -> Any:
    """Whether a tensor was made in inference mode: an input's own answer, else False outside of that mode."""
    argument = variable.proxy.node.meta.get("grapharg")
    example = None if argument is None else argument.example
    if isinstance(example, torch.Tensor):
        return VariableTracker.build(tx, example.is_inference())
    if _is_outside_of_inference_mode(tx):
        return VariableTracker.build(tx, False)
    return TORCHS_IS_INFERENCE(variable, tx)


def _inference_mode(torchs: Handler) -> Handler:
    def answer(asked: Any, tx: Any, *args: Any, **kwargs: Any) -> Any:
        if _is_outside_of_inference_mode(tx):
            return VariableTracker.build(tx, False)
        return torchs(asked, tx, *args, **kwargs)

    return answer


def _is_outside_of_inference_mode(tx: Any) -> bool:
    """Whether all ops of the graph so far run outside of inference mode."""
    if not torch.is_grad_enabled() or torch.is_inference_mode_enabled():
        return False
    entered = torch.autograd.grad_mode._enter_inference_mode
    return not tx.output.graph.find_nodes(op="call_function", target=entered)


TORCHS_LOG = LoggingLoggerVariable.call_method


@contextlib.contextmanager
def log_lines_after_graphs() -> Iterator[None]:
    """Log lines without tensor values in every call, after their graph."""
    with unittest.mock.patch.object(LoggingLoggerVariable, "call_method", _log_later):
        yield


def _log_later(logger: Any, tx: Any, name: str, args: list[Any], kwargs: dict[str, Any]) -> Any:
    method = getattr(logger.value, name, None)
    if logger.source is None or kwargs or not all(isinstance(arg, ConstantVariable) for arg in args):
        return TORCHS_LOG(logger, tx, name, args, kwargs)
    later = DebuggingVariable(method, source=AttrSource(logger.source, name))
    tx.output.root_tx.debug_locals.append((later, list(args)))
    return VariableTracker.build(tx, None)
