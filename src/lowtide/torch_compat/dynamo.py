"""Dynamo's private names: compile a function with our own settings; graph breaks and errors.

- `Compiled`: a function that Dynamo traces, and the settings of torch while it does
- `graph_inputs`, `reaches_the_end`, `casts_weights_once`: what a Dynamo graph says about itself
- `quiet`, `unlogged`: torch's log lines stay off the user's screen
"""

import contextlib
import gc
import logging
import re
import sys
import threading
import time
import traceback
import types
import unittest.mock
import warnings
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy
import torch
import torch._dynamo
from torch import fx, nn
from torch._C._dynamo.eval_frame import (
    _debug_get_cache_entry_list,
    _FrameAction,
    _FrameExecStrategy,
    reset_code,
    set_code_exec_strategy,
)
from torch._dynamo import convert_frame, utils
from torch._dynamo.convert_frame import compile_lock
from torch._dynamo.eval_frame import OptimizeContext
from torch._dynamo.exc import BackendCompilerFailed, InternalTorchDynamoError, TorchDynamoException
from torch._dynamo.guards import DeletedGuardManagerWrapper, GuardBuilder
from torch._dynamo.types import ConvertFrameReturn
from torch._dynamo.utils import counters
from torch._dynamo.variables import ConstantVariable
from torch._dynamo.variables.builder import VariableBuilder

from lowtide.errors import LowtideError
from lowtide.torch_compat import dynamo_paths
from lowtide.torch_compat.dynamo_values import compiled_with_numbers
from lowtide.torch_compat.modules import has_hooks

__all__ = ["BackendCompilerFailed", "InternalTorchDynamoError", "TorchDynamoException", "compile_lock"]

# Every batch shape has its own graph. Each function keeps this many graphs, the last ones that were used.
GRAPHS_PER_FUNCTION = 256


FAILED_NODE = "Dynamo failed to run FX node"
STRUCTURED_TRACE = "torch.__trace"
ENTER_AUTOCAST = torch.amp.autocast_mode._enter_autocast
"""The function that a Dynamo graph calls where a block of autocast begins."""


@contextlib.contextmanager
def settings() -> Iterator[None]:
    """Dynamo's settings while lowtide traces a model; restores the user's settings afterwards."""
    with (
        torch._dynamo.config.patch(
            allow_rnn=True,
            # past its limits torch would silently run eager instead
            recompile_limit=sys.maxsize,
            accumulated_recompile_limit=sys.maxsize,
            suppress_errors=False,
            # torch's own numpy draws other numbers and rounds differently: run numpy itself, between graphs
            trace_numpy=False,
            # else torch misses a hook that a module gets later
            skip_nnmodule_hook_guards=False,
            # saves time: no reports of side effects, no search for garbage
            side_effect_replay_policy="silent",
            run_gc_after_compile=False,
            # inside of DistributedDataParallel torch would split graphs at its buckets, against their plans
            optimize_ddp=False,
        ),
        # torch would give up on a model whose op fails: its code may catch that, or run on real tensors
        unittest.mock.patch.object(utils, "_wrap_graph_break_with_torch_runtime_err", _break_graph),
        unittest.mock.patch.object(VariableBuilder, "_wrap", _wrap),
    ):
        yield


class FailedOps:
    """The number of ops that raised while torch traced them on fake tensors: for wrong shapes, say."""

    count = 0


def _break_graph(unimplemented: Callable[[], None]) -> None:
    FailedOps.count += 1
    unimplemented()


_torchs_wrap = VariableBuilder._wrap
_numbers: weakref.WeakKeyDictionary[types.CodeType, dict[str, float]] = weakref.WeakKeyDictionary()
"""numpy numbers that a function was traced with, by their names in the function."""


def _wrap(builder: VariableBuilder, value: Any) -> Any:
    """Trace a numpy number that is also a `float` as a constant, as long as its value stays the same. torch
    would make a tensor of the number, and then an array, which some functions of numbers do not take."""
    if isinstance(value, numpy.float64):
        known = _numbers.setdefault(builder.tx.f_code, {}).setdefault(builder.name, float(value))
        if known == value:
            builder.install_guards(GuardBuilder.EQUALS_MATCH)
            return ConstantVariable.create(known)
    return _torchs_wrap(builder, value)


class StartOver(Exception):
    """Raised by a backend to end a call before anything has run."""


class Compiled:
    """`torch.compile(function, backend=backend, dynamic=False)`, traced within `tracing()`.

    torch calls its callback only for frames without compiled code: a call that finds its graph never enters
    `tracing`. The reference to `backend` is weak.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        backend: Callable[..., Any],
        *,
        tracing: Callable[[], contextlib.AbstractContextManager[None]],
    ) -> None:
        self._function = function
        self._backend = weakref.ref(backend)
        self._attempts: list[types.CodeType] = []
        self._traced: weakref.WeakSet[types.CodeType] = weakref.WeakSet()
        self.seconds = 0.0
        """seconds of tracing so far"""
        self.num_graphs = 0
        self._begins_inside = False
        self._call = _within(function, tracing, self._attempts, weakref.ref(self))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self._traced.update(self._attempts)
        self._attempts.clear()
        return self._call(*args, **kwargs)

    @property
    def backend(self) -> Callable[..., Any]:
        """The backend that compiles the next graph."""
        backend = self._backend()
        assert backend is not None, "a backend must outlive what it compiles"
        return backend

    @property
    def code(self) -> types.CodeType | None:
        code: types.CodeType | None = getattr(self._function, "__code__", None)
        return code

    def compile_by(self, backend: Callable[..., Any]) -> None:
        """Let another backend compile later graphs; compiled graphs stay."""
        self._backend = weakref.ref(backend)
        self.seconds = 0.0

    def take_graphs_along(self) -> None:
        """Free the graphs with this object: torch frees a function's graphs only on request. Not for a user's
        function."""
        if self.code is not None:
            weakref.finalize(self, reset_code, self.code).atexit = False

    def is_tracing(self, *functions: Callable[..., Any]) -> bool:
        """Inside of the backend: whether the present graph belongs to this function or to one of `functions`,
        and none of them was traced before in this call."""
        codes = [self.code, *(getattr(function, "__code__", None) for function in functions)]
        return (
            bool(self._attempts)
            and self._attempts[-1] in codes
            and self._attempts.count(self._attempts[-1]) == 1
        )

    def begins_inside(self, code: types.CodeType, names: Mapping[str, Any]) -> bool:
        """Whether graphs of this call begin in the functions that the own function calls.

        So they do from a trace on that ends without a graph: torch follows the calls down to a graph break,
        gives up, and traces the inner functions anew. Every new shape would pay for both traces. Modules
        among the locals `names` that have hooks are followed: hooks have no graph of their own.
        """
        modules = (value for value in names.values() if isinstance(value, nn.Module))
        return self._begins_inside and code is self.code and not any(map(has_hooks, modules))

    def traced(self, code: types.CodeType, *, num_graphs: int) -> None:
        """A function was traced, into `num_graphs` of its own."""
        if code is self.code:
            self._begins_inside = not num_graphs

    def forget(self) -> None:
        """Drop all compiled code: the next call traces anew."""
        self._traced.update(self._attempts)
        for code in self._traced:
            reset_code(code)
        self._traced.clear()

    def look_again(self) -> None:
        """While a failed call is handled: let torch retry functions that it gave up on.

        torch never retries a function whose tracing failed once, though the cause may be gone: a bad batch,
        say, that made the user's own code raise. Code that was compiled before stays.
        """
        _let_go_of_frames(sys.exc_info()[1])
        if self._attempts:
            gc.collect()  # frames that torch gave up on before the user's error keep the batch live, too
        own = self.code
        if own is not None:
            set_code_exec_strategy(own, _FrameExecStrategy(_FrameAction.DEFAULT, _FrameAction.DEFAULT))
        for code in self._attempts:
            if code is not own:
                reset_code(code)


def _within(
    function: Callable[..., Any],
    tracing: Callable[[], contextlib.AbstractContextManager[None]],
    attempts: list[types.CodeType],
    owner: weakref.ref[Compiled],
) -> Callable[..., Any]:
    def compile_graph(graph: fx.GraphModule, inputs: Sequence[Any], **options: Any) -> Any:
        # torch keeps every backend that it saw: this one refers to its owner weakly
        compiled = owner()
        assert compiled is not None
        compiled.num_graphs += 1
        if dynamo_paths.is_shared(attempts[-1]) and utils.count_calls(graph.graph) == 0:
            return graph.forward  # returns its inputs
        backend = compiled.backend
        return compiled_with_numbers(
            graph,
            attempts[-1],
            lambda: backend(graph, inputs, **options),
            allowed=getattr(backend, "takes_numbers", True),
        )

    context = torch._dynamo.optimize(compile_graph, dynamic=False)
    if not isinstance(context, OptimizeContext):
        return function  # torch.compile is disabled in this process
    trace_frame = context.callback
    assert callable(trace_frame)

    def trace_within(frame: Any, *rest: Any, **options: Any) -> Any:
        if dynamo_paths.runs_eagerly(frame.f_code):
            return ConvertFrameReturn(frame_exec_strategy=dynamo_paths.EAGERLY)
        compiled = owner()
        assert compiled is not None
        if compiled.begins_inside(frame.f_code, frame.f_locals):
            return ConvertFrameReturn(frame_exec_strategy=dynamo_paths.INSIDE, apply_to_code=False)
        attempts.append(frame.f_code)
        _drop_oldest_graph(frame.f_code)
        start, num_graphs = time.perf_counter(), compiled.num_graphs
        try:
            with (
                tracing(),
                torch._dynamo.config.patch(allow_empty_graphs=dynamo_paths.is_shared(frame.f_code)),
            ):
                found = trace_frame(frame, *rest, **options)
        finally:
            compiled.seconds += time.perf_counter() - start
        compiled.traced(frame.f_code, num_graphs=compiled.num_graphs - num_graphs)
        if dynamo_paths.runs_eagerly(frame.f_code):
            return ConvertFrameReturn(frame_exec_strategy=dynamo_paths.EAGERLY)
        return found

    trace_within._torchdynamo_orig_backend = trace_frame  # type: ignore[attr-defined]
    context.callback = trace_within
    result: Callable[..., Any] = context(function)
    return result


def _let_go_of_frames(error: BaseException | None) -> None:
    """Clear the finished frames of a failed tracing: their reference cycles keep the batch live until the
    next garbage collection. Frames of a user's own error stay, for debuggers."""
    while isinstance(error, (TorchDynamoException, LowtideError)):
        traceback.clear_frames(error.__traceback__)
        for inner in (error.__cause__, error.__context__):
            if inner is not None:
                traceback.clear_frames(inner.__traceback__)
        error = error.__context__


def _drop_oldest_graph(code: types.CodeType) -> None:
    """Drop a function's least recently used graph, if it has `GRAPHS_PER_FUNCTION`."""
    alive = [
        entry
        for entry in _debug_get_cache_entry_list(code)
        if not isinstance(entry.guard_manager, DeletedGuardManagerWrapper)
    ]
    if len(alive) >= GRAPHS_PER_FUNCTION:
        manager = alive[-1].guard_manager  # torch keeps them in the order of their last use
        assert manager.extra_state is not None and manager.cache_entry is not None
        gone = DeletedGuardManagerWrapper("lowtide keeps no more graphs of this function")
        manager.extra_state.invalidate(manager.cache_entry, gone)


@contextlib.contextmanager
def forgotten() -> Iterator[list[Compiled]]:
    """At the end, drop code that torch compiled inside, and functions that it gave up on, except those added
    to the list that this yields.

    torch would keep the graphs for good, and never retry a function that failed once. Code that the user has
    compiled before keeps its graphs.
    """
    kept: list[Compiled] = []
    users = {id(code) for code in _seen_codes() if _debug_get_cache_entry_list(code)}
    try:
        yield kept
    finally:
        users |= {id(compiled.code) for compiled in kept}
        for code in _seen_codes():
            if id(code) not in users:
                reset_code(code)


def _seen_codes() -> list[types.CodeType]:
    seen = [reference() for reference in convert_frame.input_codes.seen]
    return [code for code in seen if code is not None]


def graph_breaks() -> Counter[str]:
    """The number of graph breaks in this process, by reason in one line."""
    found: Counter[str] = Counter()
    for reason, times in counters["graph_break"].items():
        found[_one_line(reason)] += times
    return found


def has_compiled() -> bool:
    """Whether torch.compile has traced any function in this process."""
    return counters["frames"]["total"] > 0


def _one_line(reason: str) -> str:
    """The first line of torch's reason, and the function that a later line names."""
    first = reason.splitlines()[0].rstrip(".")
    named = re.search(r"the function `([^`]+)`", reason)
    return f"{first}: {named[1]}" if named else first


def apart(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function`, which a user's torch.compile around it leaves alone; it may run graphs of its own."""
    wrapped: Callable[..., Any] = torch.compiler.disable(function)  # type: ignore[no-untyped-call]
    return wrapped


def own_code(function: Callable[..., Any]) -> Callable[..., Any]:
    """A copy of `function` with its own code object, so that Dynamo compiles it separately."""
    assert isinstance(function, types.FunctionType)
    copy = types.FunctionType(
        function.__code__.replace(),
        function.__globals__,
        function.__name__,
        function.__defaults__,
        function.__closure__,
    )
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy


def inner_error(error: BaseException) -> BaseException | None:
    """The error that Dynamo wrapped; None for an error that is not Dynamo's. torch 2.15 wraps an op's error
    on fake tensors in an error of the same class, with all arguments in its text."""
    is_dynamos = isinstance(error, TorchDynamoException) or str(error).startswith(FAILED_NODE)
    if not is_dynamos:
        return None
    return getattr(error, "inner_exception", None) or error.__cause__ or error.__context__


@contextlib.contextmanager
def user_errors() -> Iterator[None]:
    """Let lowtide's own errors pass through the compiler unwrapped."""
    try:
        yield
    except BackendCompilerFailed as error:
        inner = error.inner_exception
        if isinstance(inner, LowtideError | StartOver):
            raise inner from None
        raise


def casts_weights_once(graph: fx.GraphModule) -> bool:
    """Whether eager PyTorch would cast a weight once for a whole Dynamo graph: autocast caches its casts
    until the outermost block ends. Call this while the graph is compiled, in the caller's own setting."""
    if not torch.is_autocast_cache_enabled():
        return False
    blocks = graph.graph.find_nodes(op="call_function", target=ENTER_AUTOCAST)
    return torch._C._is_any_autocast_enabled() or len(blocks) == 1


def reaches_the_end(graph: fx.GraphModule) -> bool:
    """Whether a Dynamo graph ends at the end of the traced function, not at a graph break."""
    return not graph.compile_subgraph_reason.graph_break  # type: ignore[union-attr]


def break_line(graph: fx.GraphModule, *, besides: tuple[str, ...]) -> str:
    """`file:line` of the graph break that ends a Dynamo graph: the deepest frame outside of the folders
    `besides`; empty where the graph reaches the end of its function."""
    if reaches_the_end(graph):
        return ""
    reason: Any = graph.compile_subgraph_reason
    frames = reason.user_stack
    own = [frame for frame in frames if not frame.filename.startswith((*besides, "<"))]
    return f"{own[-1].filename}:{own[-1].lineno}" if own else ""


def graph_inputs(graph: fx.GraphModule) -> list[torch.Tensor | None]:
    """The user's own tensor behind each input of a Dynamo graph; None where it is not a tensor."""
    examples = []
    for node in graph.graph.find_nodes(op="placeholder"):
        argument = node.meta.get("grapharg")
        example = None if argument is None else argument.example
        examples.append(example if isinstance(example, torch.Tensor) else None)
    return examples


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Keep torch's own warnings and log lines about tracing off the user's screen."""
    with unlogged(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


@contextlib.contextmanager
def unlogged() -> Iterator[None]:
    """Keep torch's log lines off the screen, but not warnings, which may be the user's own.

    Only log lines of this thread: another thread may compile user code. torch also raises every error that it
    logs. The structured trace is left alone: it goes to a file, if anywhere, and makes all of its records
    until it finds that no file is wanted.
    """
    thread = threading.get_ident()

    def is_others(record: logging.LogRecord) -> bool:
        return record.thread != thread

    loggers = [
        logger
        for name, logger in list(logging.Logger.manager.loggerDict.items())
        if isinstance(logger, logging.Logger) and name.split(".")[0] == "torch" and name != STRUCTURED_TRACE
    ]
    for logger in loggers:
        logger.addFilter(is_others)
    try:
        yield
    finally:
        for logger in loggers:
            logger.removeFilter(is_others)
