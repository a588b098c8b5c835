"""Graphs compiled by Inductor: as functions, and the bytes that are live in them.

Inductor only fuses and orders the pointwise ops of one graph. A graph takes its inputs and returns its
outputs with the traced strides. Numbers of less than 32 bits are rounded wherever eager rounds. So a value
does not depend on the ops that it is fused with.

All other ops run unchanged behind the op `lowtide::opaque`. Inductor refuses functions that are no op of
torch, draws random numbers in another order, and sums in an order that depends on the rest of the loop.

    y = mm(a, b)                  made = opaque([a, b], token_of_the_call_before, number)
    z = relu(y) * 2       =>      token, y = made
                                  z = relu(y) * 2                      # fused

The op makes the call with that number; the token keeps the calls in their order.
"""

import contextlib
import functools
import itertools
import operator
import types
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch._functorch.config as functorch_config
import torch._inductor.config as inductor_config
from torch import Tensor, fx
from torch._guards import TracingContext, tracing
from torch._inductor.async_compile import AsyncCompile
from torch._inductor.codecache import CppPythonBindingsCodeCache
from torch._inductor.compile_fx import compile_fx, compile_fx_inner
from torch._inductor.cpp_builder import get_cpp_compiler
from torch._inductor.decomposition import select_decomp_table
from torch._inductor.exc import InvalidCxxCompiler
from torch.fx.experimental.proxy_tensor import make_fx

from lowtide.errors import LowtideError
from lowtide.torch_compat.aot_autograd import graph_module
from lowtide.torch_compat.dispatch import (
    FakeTensor,
    FakeTensorMode,
    LiveBytes,
    OpOverload,
    iter_tensors,
    map_leaves,
    storage_key,
)
from lowtide.torch_compat.dynamo import quiet

SETTINGS = {
    "fallback_random": True,
    "emulate_precision_casts": True,
    "layout_optimization": False,
    # A dry run of the code finds the live bytes: the code must be Python that allocates and frees buffers.
    "cpp_wrapper": False,
    "graph_partition": True,
    "memory_planning": False,
    # A graph's text does not say what its opaque calls return.
    "fx_graph_cache": False,
    "fx_graph_remote_cache": False,
}

STUBS: dict[str, Callable[..., Any]] = {
    "empty_strided_cpu": lambda size, stride, dtype: torch.empty_strided(size, stride, dtype=dtype),
    "reinterpret_tensor": torch.as_strided,
    "assert_size_stride": lambda *_: None,
    "assert_alignment": lambda *_: None,
}
"""Functions for fake tensors in place of those that Inductor's code calls besides kernels and ops."""
KERNEL = "cpp_fused"
"""Prefix of the names of Inductor's kernels."""


def has_compiler() -> bool:
    """Whether there is a C++ compiler for Inductor."""
    try:
        get_cpp_compiler()
    except (InvalidCxxCompiler, OSError):  # none of that name, or no program
        return False
    return True


def compiler_name() -> str:
    """The C++ compiler that Inductor calls."""
    known: Any = inductor_config.cpp.cxx
    return known if isinstance(known, str) else str(known[-1])


def compiled_by_torch(
    graph: fx.GraphModule, inputs: Sequence[Any], *, memory_budget: float | None, eager_random: bool
) -> Callable[..., Any]:
    """torch.compile's own backend, for comparison; `memory_budget` is `activation_memory_budget`, None for
    torch's default. `eager_random`: random ops draw eager's numbers. That is not torch's default, and random
    ops that torch recomputes in the backward pass then draw other numbers."""
    settings: dict[str, Any] = {"enable_autograd_cache": False}
    if memory_budget is not None:
        settings["activation_memory_budget"] = memory_budget
    with quiet(), functorch_config.patch(settings):
        # as `config_patches`, since torch compiles the backward graph in the first backward pass
        compiled: Any = compile_fx(graph, list(inputs), config_patches={"fallback_random": eager_random})
    return compiled  # type: ignore[no-any-return]


class Bytes(NamedTuple):
    """Bytes of an op: its storages, which may be larger than fake ones, and its workspace."""

    made: tuple[int, ...]
    inside: int


class CompiledGraph:
    """A graph as a function of a list of inputs, which it empties."""

    def __init__(self, module: fx.GraphModule, inputs: Sequence[Any], *, is_backward: bool) -> None:
        self._opaque = OpaqueGraph(module)
        mode = _mode_of(inputs)
        with _at_work(), mock.patch.object(AsyncCompile, "cpp_pybinding", _later):
            with mode:
                trace = make_fx(self._opaque.module, decomposition_table=select_decomp_table())
                traced = trace(*inputs)
            output: Any = traced.graph.output_node()
            output.meta["user_visible_output_idxs"] = list(range(len(output.args[0])))
            with tracing(TracingContext(mode)):
                self._compiled: Any = compile_fx_inner(traced, list(inputs), is_backward=is_backward)

    def __call__(self, values: list[Any]) -> Any:
        return self._compiled(values)

    def build_kernels(self) -> None:
        """Compile the C++ of all kernels that are not built yet, side by side."""
        scope = self._compiled.compiled_fn_runner.call.__func__.__globals__
        kernels = {name: value for name, value in scope.items() if isinstance(value, Kernel)}
        if not kernels:
            return
        with _at_work():
            compiler = AsyncCompile()
            built = {name: compiler.cpp_pybinding(k.argtypes, k.source) for name, k in kernels.items()}
            compiler.wait(built)
        scope.update(built)

    def dry_run(
        self, inputs: list[Any], module: fx.GraphModule, *, costs: Callable[[fx.Node], Bytes]
    ) -> tuple[list[Any], int]:
        """The results for fake tensors, and the peak of live bytes above those at the start.

        Runs Inductor's own code with kernels that do nothing. `inputs` is emptied, so that an input is freed
        after its last read. `costs` gives the bytes of a node of `module` that runs behind the opaque op;
        `module` is the compiled graph, or an equal one.
        """
        runner = self._compiled.compiled_fn_runner
        code = runner.call.__func__
        kernels = {name: _nothing for name in code.__globals__ if name.startswith(KERNEL)}
        call = types.FunctionType(code.__code__, {**code.__globals__, **STUBS, **kernels})
        calls = self._opaque.calls_of(module)
        call_bytes = {number: costs(node) for number, node in calls.items()}
        with _mode_of(inputs), torch.no_grad(), _LiveBytesOfOpaque(inputs, call_bytes) as rise:
            results = call(runner, inputs)
        return list(results), int(rise.peak_bytes)


class Kernel:
    """A kernel that is built at its first call: dry runs do not need it, and most compiled plans never run.

    torch may share code with such kernels with other callers, who call them like any kernel.
    """

    def __init__(self, argtypes: list[str], source: str) -> None:
        self.argtypes, self.source = argtypes, source

    @functools.cached_property
    def _built(self) -> Callable[..., Any]:
        built: Any = CppPythonBindingsCodeCache.load_pybinding(self.argtypes, self.source)
        return built  # type: ignore[no-any-return]

    def __call__(self, *args: Any) -> Any:
        return self._built(*args)


def _later(_compiler: AsyncCompile, argtypes: list[str], source: str) -> Kernel:
    return Kernel(argtypes, source)


@contextlib.contextmanager
def _at_work() -> Iterator[None]:
    """Let Inductor compile silently; turn its errors into one line."""
    try:
        with quiet(), inductor_config.patch(SETTINGS):
            yield
    except Exception as error:
        lines = f"{type(error).__name__}: {error}".splitlines()
        raise LowtideError(
            f"Inductor cannot compile a graph of this model ({lines[0]}): is the compiler in order, and can "
            "TORCHINDUCTOR_CACHE_DIR be written to? Else choose executor 'eager'"
        ) from error


class _LiveBytesOfOpaque(LiveBytes):  # type: ignore[no-untyped-call]
    """Counts opaque calls by their `costs`, which are keyed by the calls' numbers."""

    def __init__(self, inputs: Iterable[Any], costs: Mapping[int, Bytes]) -> None:
        super().__init__(inputs)
        self._costs = costs

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is torch.ops.lowtide.opaque.default:
            costs = self._costs[args[2]]
            self.add(iter_tensors(result[1:]), costs.made, inside_bytes=costs.inside)  # a token has no bytes
        else:
            self.add(iter_tensors(result))
        return result


def fake_copies(values: Sequence[Any]) -> list[Any]:
    """Fake tensors of the same layouts in new storages; tensors that share a storage still do."""
    storages: dict[int, Tensor] = {}

    def fake_copy(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        key = storage_key(value)
        if key not in storages:
            storages[key] = torch.empty(value.untyped_storage().nbytes(), dtype=torch.uint8)
        whole = storages[key].view(value.dtype)
        return whole.as_strided(value.shape, value.stride(), value.storage_offset())

    with _mode_of(values), torch.no_grad():
        return [fake_copy(value) for value in values]


def storage_bytes(values: Iterable[Any], *, besides: Iterable[Any] = ()) -> int:
    """Bytes of the storages of these tensors, without the storages of `besides`."""
    known = {storage_key(tensor) for tensor in iter_tensors(list(besides))}
    sizes = {storage_key(tensor): tensor.untyped_storage().nbytes() for tensor in iter_tensors(list(values))}
    return sum(nbytes for key, nbytes in sizes.items() if key not in known)


def _mode_of(inputs: Iterable[Any]) -> FakeTensorMode:
    mode = next((value.fake_mode for value in inputs if isinstance(value, FakeTensor)), None)
    return mode if mode is not None else FakeTensorMode()


def _nothing(*_: Any) -> None:
    """A kernel that is not run."""


_LIBRARY: Any = torch.library.Library("lowtide", "FRAGMENT")  # type: ignore[no-untyped-call]
_LIBRARY.define("opaque(Tensor[] inputs, Tensor? before, int number) -> Tensor[]")

aten = torch.ops.aten

MOVES = frozenset(
    {
        *(aten.arange, aten.full, aten.full_like, aten.ones, aten.ones_like, aten.zeros, aten.zeros_like),
        *(aten._to_copy, aten.cat, aten.clone, aten.constant_pad_nd, aten.reshape, aten.scalar_tensor),
        *(aten._unsafe_view, aten.lift_fresh_copy, aten.select_backward, aten.slice_backward),
    }
)
"""Ops that compute nothing."""

_numbers = itertools.count(1)
_calls: dict[int, fx.Node] = {}


class OpaqueGraph:
    """A graph with the opaque op in place of all calls that Inductor must not compile.

    The calls can be made as long as this object lives.
    """

    def __init__(self, module: fx.GraphModule) -> None:
        self._numbers: list[int] = []
        self._before: fx.Node | None = None
        self._new: dict[fx.Node, Any] = {}
        graph = fx.Graph()
        for node in module.graph.nodes:
            self._new[node] = self._opaque(graph, node) if _is_opaque(node) else self._copied(graph, node)
        self._new.clear()
        self.module = graph_module(module, graph)
        weakref.finalize(self, _forget, self._numbers)

    def calls_of(self, module: fx.GraphModule) -> dict[int, fx.Node]:
        """The nodes of an equal graph at the positions of the opaque ops, by call number."""
        return dict(zip(self._numbers, filter(_is_opaque, module.graph.nodes), strict=True))

    def _opaque(self, graph: fx.Graph, node: fx.Node) -> Any:
        """The call's result, with its tensors taken from the result of the opaque op."""
        number = next(_numbers)
        self._numbers.append(number)
        _calls[number] = node
        inputs = [self._new[source] for source in node.all_input_nodes]
        made = graph.call_function(torch.ops.lowtide.opaque.default, (inputs, self._before, number))
        self._before = graph.call_function(operator.getitem, (made, 0))
        places = itertools.count(1)

        def part(leaf: Any) -> Any:
            if not isinstance(leaf, Tensor):
                return leaf
            return graph.call_function(operator.getitem, (made, next(places)))

        return map_leaves(part, node.meta["val"])

    def _copied(self, graph: fx.Graph, node: fx.Node) -> Any:
        source = node.args[0] if node.target is operator.getitem else None
        if isinstance(source, fx.Node) and not isinstance(self._new[source], fx.Node):
            return self._new[source][node.args[1]]  # an item of an opaque call's result
        return graph.node_copy(node, lambda read: self._new[read])


def _is_opaque(node: fx.Node) -> bool:
    op = node.target
    if node.op != "call_function" or op is operator.getitem:
        return False
    if not isinstance(op, OpOverload) or torch.Tag.nondeterministic_seeded in op.tags:
        return True
    return not (torch.Tag.pointwise in op.tags or op.is_view or op.overloadpacket in MOVES)


def _forget(numbers: list[int]) -> None:
    for number in numbers:
        del _calls[number]


def _run(inputs: list[Tensor], before: Tensor | None, number: int) -> list[Tensor]:
    node = _calls[number]
    values = dict(zip(node.all_input_nodes, inputs, strict=True))
    args, kwargs = fx.node.map_arg((node.args, node.kwargs), values.__getitem__)
    assert callable(node.target)
    # a recomputed op may return fewer values: batch norm without its statistics
    pairs = itertools.zip_longest(_leaves(node.meta["val"]), _leaves(node.target(*args, **kwargs)))
    return [torch.empty(0), *(_like(fake, value) for fake, value in pairs if isinstance(fake, Tensor))]


def _fake(inputs: list[Tensor], before: Tensor | None, number: int) -> list[Tensor]:
    return [torch.empty(0), *(_empty(value) for value in iter_tensors(_calls[number].meta["val"]))]


def _leaves(value: Any) -> list[Any]:
    return [leaf for item in value for leaf in _leaves(item)] if isinstance(value, (list, tuple)) else [value]


def _like(fake: Tensor, value: Any) -> Tensor:
    """A value with the strides that the compiled code expects. Real strides can differ from fake ones, and a
    value without readers is missing."""
    if not isinstance(value, Tensor):
        return _empty(fake)
    if value.dtype == fake.dtype and value.stride() == fake.stride():
        return value
    return _empty(fake).copy_(value)


def _empty(like: Tensor) -> Tensor:
    return torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device=like.device)


_LIBRARY.impl("opaque", _run, "CompositeExplicitAutograd")
torch.library.register_fake("lowtide::opaque", _fake, lib=_LIBRARY)
