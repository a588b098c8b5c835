"""Autograd's engine: the running backward pass, its nodes, autocast, hooks of parameters, profilers."""

import contextlib
import functools
import weakref
from collections.abc import Callable, Iterable, Iterator, MutableMapping, Sequence
from contextlib import AbstractContextManager
from enum import Enum
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lowtide.errors import Unsupported


def nodes_after_this() -> list[Any]:
    """Inside of a backward pass: the nodes that get the gradients of the running node."""
    return [node for node, _ in torch._C._current_autograd_node().next_functions]


def running_node() -> Any:
    """Inside of a backward pass: the node that runs."""
    return torch._C._current_autograd_node()


def leads_to(node: Any, wanted: Any, *, most: int = 4096) -> bool:
    """Whether `wanted` gets gradients of `node`, or is `node`; False where `most` nodes do not tell."""
    waiting, seen = [node], {node}
    while waiting and len(seen) < most:
        here = waiting.pop()
        if here is wanted:
            return True
        for behind, _ in here.next_functions:
            if behind is not None and behind not in seen:
                seen.add(behind)
                waiting.append(behind)
    return False


def without_base(gradient: torch.Tensor) -> torch.Tensor:
    """A gradient to which autograd can add others in place. A view refers to its base, and autograd writes
    only over memory that nothing else refers to."""
    return gradient.data if type(gradient) is torch.Tensor and gradient._is_view() else gradient


def in_backward() -> bool:
    """Whether this thread runs a backward pass."""
    return bool(torch._C._current_graph_task_id() != -1)


def graph_is_kept() -> bool:
    """Whether the running backward pass keeps its saved values for another one (`retain_graph`)."""
    return in_backward() and bool(torch._C._autograd._get_current_graph_task_keep_graph())


def finish_recomputation() -> None:
    """Inside of the user's `torch.utils.checkpoint`: let its recompute run to the end of the function.

    The recompute of a checkpoint stops behind the last value that it saves. A graph saves its values before
    it changes buffers and before hooks of the model run, an eager model while it does.
    """
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
    for cell in getattr(hooks[0], "__closure__", None) or () if hooks else ():
        if hasattr(cell.cell_contents, "early_stop"):
            cell.cell_contents.early_stop = False


class GradientUse(Enum):
    """What a backward pass does with the gradient of a leaf."""

    ADDED = "added to .grad"
    RETURNED = "returned by torch.autograd.grad"
    NONE = "none"


def use_of_gradient(leaf: Any) -> GradientUse:
    """Inside of a backward pass: what it does with the gradient that arrives at the node `leaf`."""
    try:
        return GradientUse.ADDED if torch._C._will_engine_execute_node(leaf) else GradientUse.NONE
    except RuntimeError:  # torch does not answer for a leaf whose gradient torch.autograd.grad returns
        return GradientUse.RETURNED


def creation_order(node: Any) -> int:
    """A number that increases with the creation time of autograd's nodes."""
    return int(node._sequence_nr())


def is_leaf_node(node: Any) -> bool:
    """Whether a node of autograd adds to the `.grad` of a tensor, its `variable`."""
    return isinstance(node, torch._C._functions.AccumulateGrad)  # type: ignore[attr-defined]


SAVED = "_saved_"
"""Prefix of saved values in autograd's own nodes; a `torch.autograd.Function` has `saved_tensors`."""


def saved_values(node: Any) -> Iterator[Any]:
    """The values that a node of autograd saves for its backward, without freed or changed ones."""
    for name in dir(node):
        if name.startswith(SAVED) or name == "saved_tensors":
            with contextlib.suppress(RuntimeError):
                yield getattr(node, name)


def autocast_is_on() -> bool:
    return bool(torch._C._is_any_autocast_enabled())


def autocast_settings() -> tuple[tuple[str, bool, torch.dtype], ...]:
    """For every device type of autocast: whether autocast is on, and its dtype."""
    kinds: list[str] = torch._C._autocast_supported_devices()
    return tuple((kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in kinds)


def autocast_off() -> AbstractContextManager[None]:
    """Cast nothing, on any device."""
    switch: AbstractContextManager[None] = torch._C._DisableAutocast()
    return switch


@contextlib.contextmanager
def outside_autocast() -> Iterator[None]:
    """As outside of all blocks of autocast: nothing is cast, and a block forgets its casts where it ends. A
    block inside of another one, even of one that casts nothing, would keep them to the end of the outer one.
    """
    on = [kind for kind, is_on, _ in autocast_settings() if is_on]
    depth = torch.autocast_increment_nesting() - 1
    for _ in range(depth + 1):
        torch.autocast_decrement_nesting()
    for kind in on:
        torch.set_autocast_enabled(kind, False)
    torch.clear_autocast_cache()
    try:
        yield
    finally:
        torch.clear_autocast_cache()
        for kind in on:
            torch.set_autocast_enabled(kind, True)
        for _ in range(depth):
            torch.autocast_increment_nesting()


def autocast_block(device: torch.device) -> Any:
    """An object that identifies the present autocast block: the same as long as the block caches its casts.
    None where nothing is cast or cached."""
    if not torch.is_autocast_enabled(device.type) or not torch.is_autocast_cache_enabled():
        return None
    probe = _probe(device)
    with torch.enable_grad():
        made = torch.mm(probe, probe)
    assert made.grad_fn is not None
    return made.grad_fn.next_functions[0][0]


@functools.cache
def _probe(device: torch.device) -> torch.Tensor:
    """A leaf tensor: autocast caches only casts of leaves."""
    return torch.zeros(1, 1, device=device, requires_grad=True)


def version_of(tensor: torch.Tensor) -> int:
    """How often a tensor was changed in place."""
    return tensor._version


class ProcessPatch:
    """A function replaced in the whole process: `owner.name` is `wrap(original)` from the first `hold` until
    the last holder is released.

    If other code has patched `owner.name` meanwhile, its patch stays and still calls the replacement. So the
    replacement must pass calls on to the original where there is no holder.
    """

    def __init__(self, owner: Any, name: str, wrap: Callable[[Callable[..., Any]], Any]) -> None:
        self.owner, self.name, self.wrap = owner, name, wrap
        self._holders = 0
        self._original: Any = None
        self._replacement: Any = None

    def hold(self, holder: object) -> "weakref.finalize[[], object]":
        """Replace the function for `holder`. A call of the result, or the end of `holder`, releases it."""
        self._holders += 1
        if self._holders == 1:
            self._original = getattr(self.owner, self.name)
            self._replacement = self.wrap(self._original)
            setattr(self.owner, self.name, self._replacement)
        release = weakref.finalize(holder, self._release)
        release.atexit = False
        return release

    def _release(self) -> None:
        self._holders -= 1
        if self._holders:
            return
        if getattr(self.owner, self.name) is self._replacement:
            original = self._original
            while original in _COVERED:
                original = _COVERED.pop(original)
            setattr(self.owner, self.name, original)
        else:
            _COVERED[self._replacement] = self._original
        self._original = self._replacement = None


_COVERED: dict[Any, Any] = {}
"""Originals by released replacements that another replacement still calls."""


def around_backward(context: Callable[[], AbstractContextManager[None]]) -> ProcessPatch:
    """Run every backward pass of this process inside of a `context()`, as long as an object holds the patch.

    An error after autograd's last node, as in DistributedDataParallel's all-reduce, reaches no other code.
    """

    def wrap(original: Callable[..., Any]) -> Any:
        @functools.wraps(original)
        def backward(*args: Any, **kwargs: Any) -> None:
            with context():
                original(*args, **kwargs)

        return torch.compiler.disable(backward)  # type: ignore[no-untyped-call]

    return ProcessPatch(torch.autograd, "backward", wrap)


def after_backward(call: Callable[[Sequence[Any]], None]) -> ProcessPatch:
    """Call `call` whenever a backward pass has returned or raised, with the tensors that it began with, as
    long as an object holds the patch.

    Code inside of a backward pass, even a final callback, cannot do that: torch restores the caller's modes
    after it.
    """

    def wrap(original: Callable[..., Any]) -> Any:
        def run(outputs: Sequence[Any], *args: Any, **kwargs: Any) -> Any:
            try:
                return original(outputs, *args, **kwargs)
            finally:
                call(outputs)

        return run

    return ProcessPatch(torch.autograd, "_engine_run_backward", wrap)


class BackwardCall(NamedTuple):
    """A call of `backward()`, which `adds` to `.grad`, or of `torch.autograd.grad`.

    `leaves`: the identities of the only leaves that get a gradient; empty for all leaves. `keeps_graph`:
    saved values stay for another pass.
    """

    roots: tuple[Any, ...]
    adds: bool
    leaves: frozenset[int]
    keeps_graph: bool

    @classmethod
    def of(cls, outputs: Sequence[Any], *args: Any, **kwargs: Any) -> "BackwardCall":
        """From the arguments of torch's engine."""
        _gradients, keeps_graph, _creates_graph, inputs, *others = args
        return cls(
            roots=tuple(_node_of(output) for output in outputs),
            adds=bool(kwargs.get("accumulate_grad", others[1] if len(others) > 1 else True)),
            leaves=frozenset(id(getattr(_node_of(leaf), "variable", None)) for leaf in inputs),
            keeps_graph=bool(keeps_graph),
        )


def nodes_before_leaves(roots: Iterable[Any]) -> dict[int, list[Any]]:
    """By identity of each leaf that the nodes `roots` reach, the nodes with an edge to the leaf."""
    found: dict[int, list[Any]] = {}
    stack = [node for node in roots if node is not None]
    seen = set(stack)
    while stack:
        node = stack.pop()
        for after in dict.fromkeys(after for after, _ in node.next_functions if after is not None):
            if is_leaf_node(after):
                found.setdefault(id(after.variable), []).append(node)
            elif after not in seen:
                seen.add(after)
                stack.append(after)
    return found


def _node_of(value: Any) -> Any:
    """The node of a tensor, or of an edge of autograd's graph; None for a constant."""
    if not isinstance(value, Tensor):
        return value.node
    return torch.autograd.graph.get_gradient_edge(value).node if value.requires_grad else None


def around_engine(
    context: Callable[[BackwardCall], AbstractContextManager[None]], *, unless: Callable[[], bool]
) -> ProcessPatch:
    """Run every backward pass and `torch.autograd.grad` of this process inside of a `context(call)`, as long
    as an object holds the patch, and `unless` says no."""

    def wrap(original: Callable[..., Any]) -> Any:
        def run(*args: Any, **kwargs: Any) -> Any:
            if unless():
                return original(*args, **kwargs)
            with context(BackwardCall.of(*args, **kwargs)):
                return original(*args, **kwargs)

        return run

    return ProcessPatch(torch.autograd, "_engine_run_backward", wrap)


SECOND = "CompiledFunctionBackwardBackward"
"""The class of autograd's node that would differentiate the backward pass of a compiled graph."""


def _differentiated_once(original: Callable[..., Any]) -> Callable[..., Any]:
    def run(roots: Sequence[Any], *args: Any, **kwargs: Any) -> Any:
        if _has_second(root.grad_fn if isinstance(root, Tensor) else root.node for root in roots):
            raise Unsupported(
                "this backward pass differentiates a gradient of the planned model (create_graph=True: "
                "gradient penalty, MAML, second derivatives), and a plan has one backward pass: "
                "lowtide.remove(model), or plan only the part of the model that is differentiated once"
            )
        return original(roots, *args, **kwargs)

    return run


def _has_second(roots: Iterable[Any]) -> bool:
    stack = [node for node in roots if node is not None]
    seen = set(stack)
    while stack:
        node = stack.pop()
        if type(node).__name__ == SECOND:
            return True
        following = {after for after, _ in node.next_functions if after is not None} - seen
        seen |= following
        stack += following
    return False


_ONCE = ProcessPatch(torch.autograd, "_engine_run_backward", _differentiated_once)


def refuse_double_backward() -> None:
    """Inside of a planned graph's backward pass: let no later pass differentiate this one.

    `torch.autograd.grad(out, x, create_graph=True)` runs through a planned graph as any other backward pass.
    torch finds out that its result cannot be differentiated in the middle of the second pass, when some
    parameters have gradients. So every pass is looked at before it begins, as long as this node lives.
    """
    if graph_is_kept():
        _ONCE.hold(torch._C._current_autograd_node())


def is_compiled_graph(node: Any) -> bool:
    """Whether a node of autograd is the backward pass of a graph that torch compiled."""
    return type(node).__name__ == "CompiledFunctionBackward"


Hook = Callable[[Any], Any]


class _Silent:
    """A hook of a parameter that is called only where there is a gradient."""

    def __init__(self, hook: Hook, *, has_gradient: Callable[[Any], bool]) -> None:
        self.hook, self.has_gradient = hook, has_gradient

    def __call__(self, given: Any) -> Any:
        return self.hook(given) if self.has_gradient(given) else None


def silence_hooks() -> None:
    """Inside of a backward pass: do not call the hooks of parameters that get no gradient.

    A graph is one node of autograd with an edge to each of its parameters, even to those that the loss does
    not reach. Eager has no such edge and calls no hook; autograd would call the hooks with None here. A hook
    after accumulation is still called where the parameter has a gradient of an earlier pass.
    """
    for parameter in _parameters(nodes_after_this(), set()):
        of_gradient, after_gradient = hook_tables(parameter)
        _silence(of_gradient, has_gradient=lambda gradient: gradient is not None)
        _silence(after_gradient, has_gradient=lambda parameter: parameter.grad is not None)


def _silence(hooks: MutableMapping[int, Hook], *, has_gradient: Callable[[Any], bool]) -> None:
    for key, hook in hooks.items():
        if not isinstance(hook, _Silent):
            hooks[key] = _Silent(hook, has_gradient=has_gradient)


def gradient_hooks(parameter: Tensor) -> list[Hook]:
    """All hooks that wait for a parameter's gradient."""
    return [hook for hooks in hook_tables(parameter) for hook in hooks.values()]


def hook_tables(tensor: Tensor) -> tuple[MutableMapping[int, Hook], MutableMapping[int, Hook]]:
    """Hooks of the gradient, and hooks after it was added."""
    return tensor._backward_hooks or {}, getattr(tensor, "_post_accumulate_grad_hooks", None) or {}


def unsilence_hooks(parameters: Iterable[Tensor]) -> None:
    """Restore the parameters' own hooks."""
    for parameter in parameters:
        for hooks in hook_tables(parameter):
            hooks.update({key: hook.hook for key, hook in hooks.items() if isinstance(hook, _Silent)})


def _parameters(nodes: list[Any], seen: set[Any]) -> Iterator[Any]:
    """The parameters whose gradients come from these nodes, directly or through gradient handover."""
    for node in nodes:
        if node is None or node in seen:
            continue
        seen.add(node)
        if hasattr(node, "variable"):
            yield node.variable
        elif hasattr(node, "chain"):
            yield from _parameters([after for after, _ in node.next_functions], seen)


def profiler_is_active() -> bool:
    """Whether this thread is inside a block of torch.profiler."""
    return bool(torch._C._autograd._profiler_enabled())
