"""Dynamo's private names: compile a function with settings of our own, and what torch gave up on.

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
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy
import torch
import torch._dynamo
from torch import fx
from torch._C._dynamo.eval_frame import (
    _debug_get_cache_entry_list,
    _FrameAction,
    _FrameExecStrategy,
    reset_code,
    set_code_exec_strategy,
)
from torch._dynamo import convert_frame, trace_rules, utils
from torch._dynamo.convert_frame import compile_lock
from torch._dynamo.eval_frame import OptimizeContext
from torch._dynamo.exc import BackendCompilerFailed, InternalTorchDynamoError, TorchDynamoException
from torch._dynamo.guards import DeletedGuardManagerWrapper, GuardBuilder
from torch._dynamo.utils import counters
from torch._dynamo.variables import ConstantVariable
from torch._dynamo.variables.builder import VariableBuilder

from lowtide.errors import LowtideError
from lowtide.torch_compat.dynamo_values import compiled_with_numbers

__all__ = ["BackendCompilerFailed", "InternalTorchDynamoError", "TorchDynamoException", "compile_lock"]

# Every batch shape is a graph of its own. Of each function this many are kept, the last ones that were used.
GRAPHS_PER_FUNCTION = 256


FAILED_NODE = "Dynamo failed to run FX node"
STRUCTURED_TRACE = "torch.__trace"
ENTER_AUTOCAST = torch.amp.autocast_mode._enter_autocast
"""The function that a Dynamo graph calls where a block of autocast begins."""

TRACED_TOO = ("ao/quantization",)
"""Folders of torch that Dynamo would not look into, though it can: fake quantizers and their observers."""


@contextlib.contextmanager
def _looking_into(folders: Sequence[str]) -> Iterator[None]:
    allowed = trace_rules.get_mod_inlinelist()
    added = {str(Path(torch.__file__).parent / folder) for folder in folders} - allowed
    allowed.update(added)
    try:
        yield
    finally:
        allowed.difference_update(added)


@contextlib.contextmanager
def settings() -> Iterator[None]:
    """Dynamo's settings while lowtide traces a model; the user's own come back afterwards."""
    with (
        _looking_into(TRACED_TOO),
        torch._dynamo.config.patch(
            allow_rnn=True,
            # past its limits torch would silently run eager instead
            recompile_limit=sys.maxsize,
            accumulated_recompile_limit=sys.maxsize,
            suppress_errors=False,
            # torch's own numpy draws other numbers and rounds otherwise: let numpy itself run, between graphs
            trace_numpy=False,
            # torch would not notice a hook that a module gets later
            skip_nnmodule_hook_guards=False,
            # takes time: to tell of side effects, which is then not said, and to look for garbage
            side_effect_replay_policy="silent",
            run_gc_after_compile=False,
            # inside of DistributedDataParallel torch would cut graphs at its buckets, past their plans
            optimize_ddp=False,
        ),
        # torch would give up on a model with an op that fails: its code may catch that, or run without fakes
        unittest.mock.patch.object(utils, "_wrap_graph_break_with_torch_runtime_err", _break_graph),
        unittest.mock.patch.object(VariableBuilder, "_wrap", _wrap),
    ):
        yield


class FailedOps:
    """How many ops have raised while torch traced them on fake tensors: where shapes do not fit, say."""

    count = 0


def _break_graph(unimplemented: Callable[[], None]) -> None:
    FailedOps.count += 1
    unimplemented()


_torchs_wrap = VariableBuilder._wrap
_numbers: weakref.WeakKeyDictionary[types.CodeType, dict[str, float]] = weakref.WeakKeyDictionary()
"""Numbers of numpy that a function was traced with, by their names in it."""


def _wrap(builder: VariableBuilder, value: Any) -> Any:
    """A number of numpy that is a `float`, too, is one, as long as it stays the same: torch would make a
    tensor of it, and then an array, which not all take that take a number."""
    if isinstance(value, numpy.float64):
        known = _numbers.setdefault(builder.tx.f_code, {}).setdefault(builder.name, float(value))
        if known == value:
            builder.install_guards(GuardBuilder.EQUALS_MATCH)
            return ConstantVariable.create(known)
    return _torchs_wrap(builder, value)


class StartOver(Exception):
    """Raised by a backend to end a call of which nothing has run yet."""


class Compiled:
    """What `torch.compile(function, backend=backend, dynamic=False)` gives, traced within `tracing()`.

    torch asks its callback only for frames that it has not compiled yet: a call that finds its graph
    never enters `tracing`. Does not keep `backend` alive.
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
        """that tracing has taken so far"""
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
        """Let another backend compile what comes from now on; what is compiled stays."""
        self._backend = weakref.ref(backend)
        self.seconds = 0.0

    def take_graphs_along(self) -> None:
        """Free the graphs with this object: torch itself frees a function's graphs only when it is asked
        to. Not for a function of the user's."""
        if self.code is not None:
            weakref.finalize(self, reset_code, self.code).atexit = False

    def is_tracing(self, *functions: Callable[..., Any]) -> bool:
        """Asked by the backend: whether the graph at hand is of this function itself or of one of
        `functions`, and none of those was traced before in this call."""
        codes = [self.code, *(getattr(function, "__code__", None) for function in functions)]
        return (
            bool(self._attempts)
            and self._attempts[-1] in codes
            and self._attempts.count(self._attempts[-1]) == 1
        )

    def forget(self) -> None:
        """Drop all that was compiled so far: the next call traces anew."""
        self._traced.update(self._attempts)
        for code in self._traced:
            reset_code(code)
        self._traced.clear()

    def look_again(self) -> None:
        """While a failed call is handled: let torch trace what it gave up on, the next time that it comes.

        It never again looks into a function whose tracing failed once, though the cause may be gone: a bad
        batch, say, that made the user's own code raise. What was compiled before stays.
        """
        _let_go_of_frames(sys.exc_info()[1])
        if self._attempts:
            gc.collect()  # frames that torch gave up on before the user's own error keep the batch live, too
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
        # torch keeps every backend it saw: this one goes when its owner goes
        compiled = owner()
        assert compiled is not None
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
        attempts.append(frame.f_code)
        _drop_oldest_graph(frame.f_code)
        start = time.perf_counter()
        try:
            with tracing():
                return trace_frame(frame, *rest, **options)
        finally:
            compiled = owner()
            assert compiled is not None
            compiled.seconds += time.perf_counter() - start

    trace_within._torchdynamo_orig_backend = trace_frame  # type: ignore[attr-defined]
    context.callback = trace_within
    result: Callable[..., Any] = context(function)
    return result


def _let_go_of_frames(error: BaseException | None) -> None:
    """Clear the finished frames of a failed tracing: their cycles keep the batch live until Python next looks
    for garbage. Frames of an error of the user's own stay, for debuggers."""
    while isinstance(error, (TorchDynamoException, LowtideError)):
        traceback.clear_frames(error.__traceback__)
        for inner in (error.__cause__, error.__context__):
            if inner is not None:
                traceback.clear_frames(inner.__traceback__)
        error = error.__context__


def _drop_oldest_graph(code: types.CodeType) -> None:
    """Make room for one more graph of a function, where it has as many as are kept."""
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
    """Drop afterwards what torch compiles inside, and what it gave up on, but for what is added to the list
    that this gives.

    It would keep the graphs for good, and never again look into a function that failed once. Code
    that the user has compiled before keeps all it has.
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
    """How often torch.compile gave up on something in this process, by reason, each in one line."""
    found: Counter[str] = Counter()
    for reason, times in counters["graph_break"].items():
        found[_one_line(reason)] += times
    return found


def _one_line(reason: str) -> str:
    """The first line of torch's reason, and the function in question, which stands further down."""
    first = reason.splitlines()[0].rstrip(".")
    named = re.search(r"the function `([^`]+)`", reason)
    return f"{first}: {named[1]}" if named else first


def own_code(function: Callable[..., Any]) -> Callable[..., Any]:
    """A copy of `function` with a code object of its own, so that Dynamo compiles it apart."""
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
    """What Dynamo wrapped in an error; None for an error that is not Dynamo's. torch 2.15 wraps what an op
    raises on fake tensors in an error of the same class, with all arguments in its text."""
    is_dynamos = isinstance(error, TorchDynamoException) or str(error).startswith(FAILED_NODE)
    if not is_dynamos:
        return None
    return getattr(error, "inner_exception", None) or error.__cause__ or error.__context__


@contextlib.contextmanager
def user_errors() -> Iterator[None]:
    """Let what lowtide itself raises out of the compiler as it is."""
    try:
        yield
    except BackendCompilerFailed as error:
        inner = error.inner_exception
        if isinstance(inner, LowtideError | StartOver):
            raise inner from None
        raise


def casts_weights_once(graph: fx.GraphModule) -> bool:
    """Whether eager PyTorch would cast a weight once for all of a Dynamo graph: autocast remembers its casts
    until the outermost block ends. Asked while the graph is compiled, in the caller's own setting."""
    if not torch.is_autocast_cache_enabled():
        return False
    blocks = graph.graph.find_nodes(op="call_function", target=ENTER_AUTOCAST)
    return torch._C._is_any_autocast_enabled() or len(blocks) == 1


def reaches_the_end(graph: fx.GraphModule) -> bool:
    """Whether a Dynamo graph goes to the end of the function that is traced, and not to a graph break."""
    return not graph.compile_subgraph_reason.graph_break  # type: ignore[union-attr]


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

    Only those of this thread: another one may be compiling something of the user's. What torch logs as
    an error, it also raises. The structured trace is left alone: it goes to a file, if anywhere, and
    makes all of its records until it finds out that no file is wanted.
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
