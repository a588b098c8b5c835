"""The one place that touches torch's private names. `versions` says which torch it was checked against.

Everything else in lowtide takes these from here, so that a new torch release is one file to read.
Only `torch.utils._pytree`, which torch's own documentation sends users to, is used wherever it helps.
"""

import contextlib
import functools
import importlib
import logging
import re
import threading
import unittest.mock
import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch._dynamo
import torch._functorch.config as functorch_config
import torch._inductor.config as inductor_config
from torch import fx, nn
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.exc import (
    BackendCompilerFailed,
    InternalTorchDynamoError,
    TorchDynamoException,
)
from torch._functorch._aot_autograd import runtime_wrappers
from torch._functorch._aot_autograd.descriptors import (
    InputMutationAOTOutput,
    PlainAOTInput,
    TangentAOTInput,
)
from torch._functorch.partitioners import default_partition, min_cut_rematerialization_partition
from torch._ops import HigherOrderOperator, OperatorBase, OpOverload
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
)
from torch.fx._lazy_graph_module import _LazyGraphModule
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    _disable_current_modes,
    _get_current_dispatch_mode_stack,
    is_traceable_wrapper_subclass,
)

from lowtide.torch_compat.aot_patches import Orders, gradients_in, traced_without_tokens, unprinted

__all__ = [
    "BackendCompilerFailed",
    "DataDependentOutputException",
    "DynamicOutputShapeException",
    "FakeTensor",
    "FakeTensorMode",
    "InputMutationAOTOutput",
    "InternalTorchDynamoError",
    "OpOverload",
    "OperatorBase",
    "PlainAOTInput",
    "StorageWeakRef",
    "TangentAOTInput",
    "TorchDispatchMode",
    "TorchDynamoException",
    "active_modes",
    "backward_stub",
    "casts_weights_once",
    "compile_graph",
    "default_partition",
    "dispatch_state",
    "forget_step_hooks",
    "graph_inputs",
    "graph_is_kept",
    "graph_module",
    "has_inner_graphs",
    "has_own_checkpoint",
    "is_guarded_by_aot",
    "is_wrapper",
    "onednn_is_enabled",
    "order_of",
    "partitioned_by_torch",
    "quiet",
    "reaches_the_end",
    "real_tensors",
    "recording",
    "takes_list",
    "traced_by",
    "unlogged",
    "without_modes",
]

# torch traces these by decompositions of its own, which round differently from the ops that eager runs
# and hold far more memory: a bilinear upsampling becomes some fifty ops.
WHOLE_OPS = re.compile(r"_?upsample_.*|(hard|soft)shrink|multi_margin_loss|multilabel_margin_loss_forward")
STRUCTURED_TRACE = "torch.__trace"
TRACED_KEYS = (torch._C.DispatchKey.Autograd, torch._C.DispatchKey.CompositeImplicitAutograd)
DIFFERENTIATED_KEYS = TRACED_KEYS[:1]
"""For ops that are only differentiated otherwise."""


class _SavedState(runtime_wrappers._AutogradSavedState):
    """Leave an output's missing gradient undefined instead of filling a zero tensor of its size."""

    def save_from_forward(self, ctx: Any, fw_outs: Sequence[Any]) -> None:
        # no graph of ours reuses a saved tensor's memory: `retain_graph=True` is safe
        self.metadata.bw_donated_idxs = []
        # what is saved is chosen after torch has counted it; from 2.15 on it asks which of it are inputs, and
        # as in earlier versions no view among them is kept as it is
        self.metadata.saved_tensor_is_graph_input = [False] * len(fw_outs)  # type: ignore[attr-defined]
        super().save_from_forward(ctx, fw_outs)
        ctx.set_materialize_grads(False)


def compile_graph(
    graph: fx.GraphModule,
    inputs: Sequence[Any],
    *,
    partition: Callable[..., tuple[fx.GraphModule, fx.GraphModule]],
    forward: Callable[..., Callable[..., Any]],
    backward: Callable[..., Callable[..., Any]],
    inference: Callable[..., Callable[..., Any]],
    orders: Orders,
) -> Callable[..., Any]:
    """Run AOTAutograd on a Dynamo graph, without decompositions, with our own compilers, for gradients that
    come in these `orders`.

    torch remembers the fake results of ops, but not that two of them are one tensor (the gradients of
    an RNN's biases): what was traced before must not change what is traced now. A random op whose result
    nobody reads stays, since it moves the generator on (`fallback_random`).
    """
    FakeTensorMode.cache_clear()
    compiler = aot_autograd(
        fw_compiler=forward, bw_compiler=backward, inference_compiler=inference, partition_fn=partition
    )
    with (
        unittest.mock.patch.object(runtime_wrappers, "_AutogradSavedState", _SavedState),
        functorch_config.patch(
            donated_buffer=False,
            enable_autograd_cache=False,
            # eager runs `loss.backward()` outside of the autocast block, where nothing is cast
            backward_pass_autocast="off",
        ),
        inductor_config.patch(fallback_random=True),
        _undivided(),
        unprinted(),
        traced_without_tokens(),
        gradients_in(orders),
    ):
        compiled: Callable[..., Any] = compiler(graph, inputs)
    return compiled


def backward_stub(root: nn.Module, gradients: Sequence[bool]) -> fx.GraphModule:
    """What torch wants to see of a backward graph that somebody else runs: of which inputs it gives the
    gradients. Of a whole one it would make a deep copy."""
    graph = fx.Graph()
    graph.output([0 if has_gradient else None for has_gradient in gradients])
    return graph_module(root, graph)


@functools.cache
def _whole_ops() -> tuple[OpOverload[..., Any], ...]:
    packets = [getattr(torch.ops.aten, name) for name in dir(torch.ops.aten) if WHOLE_OPS.fullmatch(name)]
    return tuple(getattr(packet, overload) for packet in packets for overload in packet.overloads())


@contextlib.contextmanager
def _undivided() -> Iterator[None]:
    """Trace `WHOLE_OPS` as the ops they are."""
    divided = {op: {key: op.py_kernels.pop(key, None) for key in TRACED_KEYS} for op in _whole_ops()}
    for op in divided:
        op._dispatch_cache.clear()
    try:
        yield
    finally:
        for op, kernels in divided.items():
            op.py_kernels.update({key: kernel for key, kernel in kernels.items() if kernel is not None})
            op._dispatch_cache.clear()


@contextlib.contextmanager
def traced_by(
    ways: Mapping[OpOverload[..., Any], Callable[[Callable[..., Any]], Callable[..., Any]]],
    *,
    keys: Sequence[Any] = TRACED_KEYS,
) -> Iterator[None]:
    """Trace ops that torch decomposes in ways of our own, each made from torch's."""
    torchs = {op: {key: op.py_kernels.pop(key, None) for key in keys} for op in ways}
    for op, kernels in torchs.items():
        op.py_kernels.update({key: ways[op](kernel or op.decompose) for key, kernel in kernels.items()})
        op._dispatch_cache.clear()
    try:
        yield
    finally:
        for op, kernels in torchs.items():
            for key, kernel in kernels.items():
                del op.py_kernels[key]
                if kernel is not None:
                    op.py_kernels[key] = kernel
            op._dispatch_cache.clear()


def partitioned_by_torch(
    graph: fx.GraphModule, inputs: Sequence[Any], *, memory_budget: float | None
) -> Callable[..., Any]:
    """A torch.compile backend that leaves recomputing to torch's own partitioner, for comparison.

    `memory_budget` is `torch._functorch.config.activation_memory_budget`; None recomputes nothing.
    Decompositions are those of Inductor, since without them the partitioner fails on batch norm; ops
    run eagerly, and values are freed after their last use as in lowtide's own graphs.
    """
    importlib.import_module("torch._inductor.lowering")  # some decompositions need it, and do not import it
    from torch._inductor.decomposition import select_decomp_table

    from lowtide.ops.direct import direct_function

    def compiler(module: fx.GraphModule, _args: Any) -> Callable[..., Any]:
        return takes_list(direct_function(module))

    partition = (
        default_partition
        if memory_budget is None
        else functools.partial(min_cut_rematerialization_partition, compiler="inductor")
    )
    compile_with = aot_autograd(
        fw_compiler=compiler,
        bw_compiler=compiler,
        decompositions=select_decomp_table,
        partition_fn=partition,
    )
    budget = 1.0 if memory_budget is None else memory_budget
    with functorch_config.patch(activation_memory_budget=budget, enable_autograd_cache=False):
        compiled: Callable[..., Any] = compile_with(graph, inputs)
    return compiled


def is_guarded_by_aot() -> bool:
    """Asked while a graph is compiled: whether AOTAutograd made assumptions that torch has to check in every
    call, about inputs that share memory."""
    context = torch._guards.TracingContext.try_get()
    return context is None or bool(context.guards_context.aotautograd_guards)


def casts_weights_once(graph: fx.GraphModule) -> bool:
    """Whether eager PyTorch would cast a weight once for all of a Dynamo graph: autocast remembers its casts
    until the outermost block ends. Asked while the graph is compiled, in the caller's own setting."""
    if not torch.is_autocast_cache_enabled():
        return False
    blocks = graph.graph.find_nodes(op="call_function", target=torch.amp.autocast_mode._enter_autocast)
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
    an error, it also raises. Its structured trace goes to a file, if anywhere, and must not be kept from
    finding out: as long as it does not know that nobody wants a record, it makes all of them.
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


@contextlib.contextmanager
def real_tensors() -> Iterator[None]:
    """Compute with real tensors and eager's ops, also where torch.compile traces with fake ones around."""
    with _disable_current_modes(), torch._C._DisablePythonDispatcher(), torch.no_grad():
        yield


def graph_is_kept() -> bool:
    """Whether the backward pass that runs now leaves what autograd has saved for another one."""
    in_backward = torch._C._current_graph_task_id() != -1
    return in_backward and bool(torch._C._autograd._get_current_graph_task_keep_graph())


@contextlib.contextmanager
def recording() -> Iterator[None]:
    """Let autograd record inside of an op of our own, where torch switches it off."""
    switched_off = torch._C._dispatch_tls_local_exclude_set()
    autograd = torch._C.DispatchKeySet(torch._C.DispatchKey.AutogradCPU)
    included = torch._C._dispatch_tls_local_include_set()
    with torch._C._ForceDispatchKeyGuard(included, switched_off - autograd), torch.enable_grad():
        yield


def below_autograd() -> Any:
    """Call ops without autograd, inside of a way of our own to differentiate them."""
    return torch._C._AutoDispatchBelowAutograd()


def forget_step_hooks(optimizer: torch.optim.Optimizer) -> None:
    """Drop the hooks around an optimizer's `step()`."""
    optimizer._optimizer_step_pre_hooks = OrderedDict()
    optimizer._optimizer_step_post_hooks = OrderedDict()


def is_wrapper(tensor: torch.Tensor) -> bool:
    """Whether a tensor is of a kind that wraps others and that torch.compile can take apart."""
    return bool(is_traceable_wrapper_subclass(tensor))


def active_modes() -> list[Any]:
    """The modes that see every op of this thread, the innermost last."""
    return list(_get_current_dispatch_mode_stack())


def without_modes() -> contextlib.AbstractContextManager[Any]:
    """Let no mode see what comes."""
    return _disable_current_modes()


def dispatch_state() -> str:
    """How torch dispatches ops in this thread, apart from the modes that see them, and from autocast, which
    comes and goes beside them."""
    keys = torch._C.DispatchKey
    beside = torch._C.DispatchKeySet(keys.Python) | torch._C.DispatchKeySet(keys.PythonTLSSnapshot)
    for name in ("AutocastCPU", "AutocastCUDA"):
        beside = beside | torch._C.DispatchKeySet(getattr(keys, name))
    included = torch._C._dispatch_tls_local_include_set() - beside
    return f"{included} {torch._C._dispatch_tls_local_exclude_set() - beside}"


def order_of(node: Any) -> int:
    """A number that is larger for those of autograd's nodes that were made later."""
    return int(node._sequence_nr())


def onednn_is_enabled() -> bool:
    return bool(torch._C._get_mkldnn_enabled())


def has_inner_graphs(node: fx.Node) -> bool:
    """Whether `node` calls graphs of its own, as torch.cond does."""
    modules = (arg for arg in node.all_input_nodes if arg.op == "get_attr" and "val" not in arg.meta)
    return isinstance(node.target, HigherOrderOperator) and next(modules, None) is not None


def has_own_checkpoint(node: fx.Node) -> bool:
    """Whether `node` stands inside a call of torch.utils.checkpoint."""
    return "recompute" in node.meta


def graph_module(root: nn.Module, graph: fx.Graph) -> fx.GraphModule:
    """A graph as a module whose code is written when it is first run or read: most graphs never are."""
    return _LazyGraphModule(root, graph)


def takes_list(function: Callable[..., Any]) -> Callable[..., Any]:
    """Mark a compiled function as taking one list of inputs that it may empty."""
    function._boxed_call = True  # type: ignore[attr-defined]
    return function
