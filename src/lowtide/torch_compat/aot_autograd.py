"""AOTAutograd, which makes a joint graph of forward and backward, and torch.fx graphs as functions.

`compile_graph` runs AOTAutograd with our settings. The patches around it:

- `_SavedState`: a missing gradient stays undefined
- `gradients_in`: backward passes are traced for gradients with their real strides
- `TracedOnce`: of a chain of equal blocks, five are traced
- `_marking_sums`: sums of an input's gradient are told from sums that only pass to it
- `traced_without_tokens`: checks of linear algebra are ops of the graph like others
- `unprinted`: no graph is written out as text
"""

import contextlib
import importlib
import itertools
import os
import threading
import unittest.mock
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch._functorch.config as functorch_config
import torch._inductor.config as inductor_config
from torch import fx, nn
from torch._dynamo.backends.common import aot_autograd
from torch._functorch._aot_autograd import collect_metadata_analysis, runtime_wrappers
from torch._functorch._aot_autograd.descriptors import (
    GradAOTOutput,
    InputMutationAOTOutput,
    PlainAOTInput,
    TangentAOTInput,
)
from torch._functorch._aot_autograd.schemas import PlainTensorMeta
from torch._functorch.partitioners import default_partition, min_cut_rematerialization_partition
from torch._ops import HigherOrderOperator
from torch.fx._lazy_graph_module import _LazyGraphModule
from torch.fx.graph_module import _forward_from_src
from torch.fx.node import has_side_effect
from torch.utils.checkpoint import CheckpointPolicy

from lowtide.torch_compat.aot_blocks import TracedOnce
from lowtide.torch_compat.autograd_engine import in_backward
from lowtide.torch_compat.dispatch import FakeTensorMode, whole_ops
from lowtide.torch_compat.dtensor import Borders, local_graph, parts_of
from lowtide.torch_compat.equal_blocks import find_chain
from lowtide.torch_compat.gradient_edges import numbers_of_terms

__all__ = [
    "InputMutationAOTOutput",
    "PlainAOTInput",
    "TangentAOTInput",
    "aot_autograd",
    "default_partition",
    "functorch_config",
    "min_cut_rematerialization_partition",
]

Orders = Mapping[str, str]
"""From the memory order of an output's dimensions, outermost first, to that of its gradient: "0231" to "0123"
for an image in channels last whose gradient is contiguous."""
INPUTS_ARGUMENT = 2
"""The place of the inputs among the engine's arguments, after the roots and their gradients."""
LINALG_CHECK = "aten::_linalg_check_errors"
OWN_SUM = "lowtide_own_sum"
"""In the metadata of an op that adds two gradients of one input of a graph."""
TEXT_IS_ASKED_FOR = "TORCH_TRACE"
"""The environment variable that asks torch for the text of all graphs."""


class _SavedState(runtime_wrappers._AutogradSavedState):
    """Leave an output's missing gradient undefined instead of filling a zero tensor of its size."""

    def save_from_forward(self, ctx: Any, fw_outs: Sequence[Any]) -> None:
        # no graph of ours reuses a saved tensor's memory: `retain_graph=True` is safe
        self.metadata.bw_donated_idxs = []
        # lowtide chooses the saved tensors after torch has counted them. torch 2.15 asks which of them are
        # graph inputs; as in earlier versions, none counts as one
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
    borders: Borders | None = None,
) -> tuple[Callable[..., Any], Borders]:
    """Run AOTAutograd on a Dynamo graph, without decompositions, with our own compilers, for gradients in
    these memory `orders`. The compiled graph is one of this process's parts of DTensors: `Borders.around` it
    is what Dynamo calls. A graph that is compiled once more, for another schedule, is one of parts already:
    it has the `borders` of the first time.

    torch caches the fake results of ops, but not that two results are one tensor (the gradients of an RNN's
    biases). So the cache is cleared: earlier traces do not change this one. A random op whose result has no
    reader stays, since it advances the generator (`fallback_random`).
    """
    FakeTensorMode.cache_clear()
    if borders is None:
        inputs, borders = local_graph(graph, inputs)
    else:
        inputs = parts_of(graph, inputs, borders)
    numbers: list[list[int]] = []

    def mark(joint: fx.Graph) -> None:
        _mark_sums(joint, numbers)

    chain = find_chain(graph)
    once = None if chain is None else TracedOnce(chain, mark)

    def partition_marked(joint: fx.GraphModule, *args: Any, **kwargs: Any) -> Any:
        if once is None or not once.is_marked:
            mark(joint.graph)
        borders.mark(joint.graph)
        return partition(joint, *args, **kwargs)

    compiler = aot_autograd(
        fw_compiler=forward, bw_compiler=backward, inference_compiler=inference, partition_fn=partition_marked
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
        whole_ops(),
        unprinted(),
        traced_without_tokens(),
        gradients_in(orders),
        _gradients_as_they_are(),
        _counting_terms(numbers),
        contextlib.nullcontext() if once is None else once.on(),
    ):
        compiled: Callable[..., Any] = compiler(graph, inputs)
    return compiled, borders


@contextlib.contextmanager
def _counting_terms(numbers: list[list[int]]) -> Iterator[None]:
    """While this thread traces: for each backward pass, the number of gradients that autograd adds up for
    each input of the pass.

    The model may differentiate by itself before the backward pass of the graph (`torch.func.grad`), or inside
    of it (the branches of `torch.cond`, a reentrant checkpoint). Passes inside of another are left out.
    """
    thread, torchs = threading.get_ident(), torch.autograd._engine_run_backward  # type: ignore[attr-defined]

    def run(roots: Sequence[Any], gradients: Any, *args: Any, **kwargs: Any) -> Any:
        is_own = threading.get_ident() == thread and len(args) > INPUTS_ARGUMENT
        if is_own and not in_backward():
            numbers.append(numbers_of_terms(roots, args[INPUTS_ARGUMENT]))
        return torchs(roots, gradients, *args, **kwargs)

    with unittest.mock.patch.object(torch.autograd, "_engine_run_backward", run):
        yield


def _mark_sums(graph: fx.Graph, numbers: Sequence[Sequence[int]]) -> None:
    """Mark the ops that add up the gradients of an input with `OWN_SUM`. `numbers` of terms are those of the
    backward passes that torch traced; the last one for as many inputs is the graph's.

    A gradient that passes through a sum unchanged may be a sum itself: with `h = x + weight`, the gradients
    of the uses of `h` are added up before they are one term of the weight's gradient. Where no backward pass
    is the graph's, all sums that nothing else reads count as the input's.
    """
    results, output = graph.output_node().args[0], graph.output_node()
    assert isinstance(results, (list, tuple))
    described = zip(results, output.meta.get("desc") or (), strict=False)
    grads = [result for result, description in described if isinstance(description, GradAOTOutput)]
    known = next((found for found in reversed(numbers) if len(found) == len(grads)), None)
    for place, grad in enumerate(grads):
        node = grad
        for _ in range(known[place] - 1) if known is not None else itertools.count():
            if not isinstance(node, fx.Node) or not node.meta.get("is_gradient_acc"):
                break  # a use without a gradient
            if known is None and node is not grad and len(node.users) > 1:
                break
            node.meta[OWN_SUM] = True
            node = node.args[0]


def backward_stub(root: nn.Module, gradients: Sequence[bool]) -> fx.GraphModule:
    """A backward graph without ops, which only says which inputs have gradients. torch would copy a whole
    backward graph, and lowtide runs its own."""
    graph = fx.Graph()
    graph.output([0 if has_gradient else None for has_gradient in gradients])
    return graph_module(root, graph)


def inductor_decompositions() -> Any:
    """Inductor's table of decompositions: torch's min-cut partitioner fails on batch norm without it."""
    importlib.import_module("torch._inductor.lowering")  # some decompositions need it without an import
    from torch._inductor.decomposition import select_decomp_table

    return select_decomp_table


def is_compiled_graph(node: Any) -> bool:
    """Whether a node of autograd is the backward pass of a graph that AOTAutograd compiled."""
    function = getattr(type(node), "_forward_cls", None)
    return function is not None and function.__module__ == runtime_wrappers.__name__


def is_guarded_by_aot() -> bool:
    """Whether AOTAutograd made assumptions about inputs that share memory, which torch must check in every
    call. Call this while the graph is compiled."""
    context = torch._guards.TracingContext.try_get()
    return context is None or bool(context.guards_context.aotautograd_guards)


@contextlib.contextmanager
def traced_without_tokens() -> Iterator[None]:
    """Trace checks of linear algebra as ops of the graph, which are never dropped.

    `_linalg_check_errors` returns nothing and raises for a singular matrix. torch keeps it in order by a
    token, an extra input and output of the graph. Our graphs keep the order of their ops anyway.
    """
    has_side_effect(torch.ops.aten._linalg_check_errors.default)
    holder = torch._library.simple_registry.singleton.find(LINALG_CHECK).effect
    effect = holder.effect
    holder.register(None)
    try:
        yield
    finally:
        holder.register(effect)


@contextlib.contextmanager
def unprinted() -> Iterator[None]:
    """Let this thread write no graph out as text, unless the user asked torch for a record of its graphs.

    torch writes out every graph, read or not: a large one takes a second.
    """
    if TEXT_IS_ASKED_FOR in os.environ:
        yield
        return
    thread, torchs = threading.get_ident(), fx.GraphModule.print_readable

    def write(module: fx.GraphModule, *args: Any, **kwargs: Any) -> str:
        text: str = "" if threading.get_ident() == thread else torchs(module, *args, **kwargs)
        return text

    with unittest.mock.patch.object(fx.GraphModule, "print_readable", write):
        yield


def order_of(tensor: torch.Tensor) -> str:
    """The order of a tensor's dimensions in memory, outermost first."""
    strides = tensor.stride()
    return "".join(map(str, sorted(range(tensor.dim()), key=lambda dim: (-strides[dim], dim))))


def in_another_order(shape: Sequence[int], strides: Sequence[int], others: Sequence[int]) -> bool:
    """Whether two tensors of one shape have different memory orders. An expanded gradient has one number
    everywhere: its order does not matter."""
    dims = [dim for dim, size in enumerate(shape) if size > 1 and strides[dim] and others[dim]]
    return sorted(dims, key=lambda dim: -strides[dim]) != sorted(dims, key=lambda dim: -others[dim])


@contextlib.contextmanager
def gradients_in(orders: Orders) -> Iterator[None]:
    """Trace backward passes for gradients in these memory orders.

    AOTAutograd traces a backward pass before it sees gradients, and assumes that each gradient has the
    strides of its output. The better the traced strides, the better known are the bytes of the step.
    """
    torchs = collect_metadata_analysis.coerce_tangent_and_suggest_memory_format

    def coerced(output: torch.Tensor) -> tuple[Any, Any, bool]:
        tangent, memory_format, is_updated = torchs(output)
        order = orders.get(order_of(tangent)) if _is_strided(tangent) else None
        if order is None:
            return tangent, memory_format, is_updated
        return _arranged(tangent, order), memory_format, True

    if not orders:
        yield
        return
    name = "coerce_tangent_and_suggest_memory_format"
    with unittest.mock.patch.object(collect_metadata_analysis, name, coerced):
        yield


@contextlib.contextmanager
def _gradients_as_they_are() -> Iterator[None]:
    """Let compiled graphs give their backward pass the gradients as they are in memory, as eager does.

    torch would copy a gradient whose strides differ from the traced ones, gaps included, and kernels sum a
    copy in another order.
    """
    owner = runtime_wrappers.AOTDispatchAutograd
    torchs = owner.process_runtime_tangent

    def as_it_is(gradient: Any, expected: Any, *context: Any, **more: Any) -> Any:
        if type(gradient) is torch.Tensor and isinstance(expected, PlainTensorMeta):
            return gradient, [gradient]
        return torchs(gradient, expected, *context, **more)

    with unittest.mock.patch.object(owner, "process_runtime_tangent", staticmethod(as_it_is)):
        yield


def _is_strided(tensor: Any) -> bool:
    return isinstance(tensor, torch.Tensor) and tensor.layout is torch.strided and tensor.dim() > 1


def _arranged(tensor: torch.Tensor, order: str) -> torch.Tensor:
    """A dense tensor of the same shape, in another memory order."""
    dims = list(map(int, order))
    back = [dims.index(dim) for dim in range(len(dims))]
    return tensor.permute(dims).contiguous().permute(back)


def has_inner_graphs(node: fx.Node) -> bool:
    """Whether `node` calls inner graphs, as torch.cond does."""
    modules = (arg for arg in node.all_input_nodes if arg.op == "get_attr" and "val" not in arg.meta)
    return isinstance(node.target, HigherOrderOperator) and next(modules, None) is not None


def has_own_checkpoint(node: fx.Node) -> bool:
    """Whether `node` comes from inside a call of torch.utils.checkpoint."""
    return "recompute" in node.meta


class OwnCheckpoint(NamedTuple):
    """A call of torch.utils.checkpoint around a node, which `runs_again` unless a policy says otherwise."""

    call: int
    runs_again: bool


def own_checkpoint_of(node: fx.Node) -> OwnCheckpoint | None:
    """The user's checkpoint that a forward node is inside of; None outside."""
    policy = node.meta.get("recompute")
    if policy is None:
        return None
    saved = (CheckpointPolicy.MUST_SAVE, CheckpointPolicy.PREFER_SAVE)
    return OwnCheckpoint(node.meta.get("ac_graph_id", 0), policy not in saved)


def graph_module(root: nn.Module, graph: fx.Graph) -> fx.GraphModule:
    """A graph as a module whose code is written at its first run or read: most graphs never need it."""
    return _LazyGraphModule(root, graph)


def function_from(source: str, names: dict[str, Any]) -> Callable[..., Any]:
    """The function that a graph's code defines, with `names` as its globals."""
    function: Callable[..., Any] = _forward_from_src(source, names)
    return function


def takes_list(function: Callable[..., Any]) -> Callable[..., Any]:
    """Mark a compiled function as taking one list of inputs that it may empty."""
    function._boxed_call = True  # type: ignore[attr-defined]
    return function
