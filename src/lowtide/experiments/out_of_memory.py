"""Explain why a training loop ran out of memory, and what would fit.

    with lowtide.explain_out_of_memory(model, optimizer=optimizer):
        for x, y in loader:
            ...

An out-of-memory error inside of the block gets a paragraph as a note, which Python prints below the error:
what is live at the step's peak by module, and the plan that fits, or the largest batch. Nothing is caught.
"""

import traceback
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from lowtide import api, display
from lowtide.errors import BudgetTooSmall, LowtideError, is_out_of_memory
from lowtide.experiments.fit import Vary, find_fits
from lowtide.facts import Kind, Step
from lowtide.facts.auto_budget import auto_budget
from lowtide.facts.sizes import is_auto, parse_size
from lowtide.ops.device_memory import bytes_of_storages
from lowtide.optim.joined_optimizers import join_optimizers
from lowtide.planning.schedules import as_eager
from lowtide.planning.simulate import Timeline
from lowtide.plans import Plan
from lowtide.profiles import Profile
from lowtide.profiling.free_memory import free_memory
from lowtide.report.style import LABELS
from lowtide.runtime.apply import plan_of
from lowtide.torch_compat.modules import call_model, is_compiled, route_of, set_route
from lowtide.trace.model_call import Arguments, Loss, Optimizers, tensors_in
from lowtide.units import format_size
from lowtide.zoo.targets import Target

NUM_MODULES = 3
OUTSIDE = "outside of modules"


@contextmanager
def explain_out_of_memory(
    model: nn.Module,
    *,
    budget: str | int = "auto",
    optimizer: Optimizers | None = None,
    loss: Loss | None = None,
) -> Iterator[None]:
    """Add a paragraph to an out-of-memory error inside of this block: what was live, and what would fit.

    `budget`: what the step may take; `"auto"` is what the device has free when the block begins. `optimizer`
    and `loss` are those of `profile`. The error itself goes on: nothing is caught, and without an error
    nothing is done. The paragraph is predicted from the last batch, which is traced only then; that takes
    seconds.
    """
    step = MemoryOfStep(model, optimizer, loss)
    available_bytes = step.available_bytes(budget)
    last = LastCall(model)
    try:
        yield
    except Exception as error:
        if is_out_of_memory(error):
            last.stop()
            frames = error.__traceback__
            error.add_note(explanation(step, last.arguments(), available_bytes, frames=frames))
        raise
    finally:
        last.stop()


def explainer(model: nn.Module, optimizer: Optimizers | None) -> Callable[[BaseException], None]:
    """A function that adds the paragraph to an error of a planned model's loop, by the memory that is
    available now."""
    step = MemoryOfStep(model, optimizer, None)
    available_bytes = step.available_bytes("auto")

    def explain(error: BaseException) -> None:
        if is_out_of_memory(error):
            error.add_note(explanation(step, None, available_bytes, frames=error.__traceback__))

    return explain


@dataclass(frozen=True, slots=True)
class MemoryOfStep:
    """A training step but for its batch, and the memory that it may take."""

    model: nn.Module
    optimizer: Optimizers | None
    loss: Loss | None

    def available_bytes(self, budget: str | int) -> int:
        """Bytes for the step: of a budget, or what the device of the model has free now, and the step has."""
        if not is_auto(budget):
            return parse_size(budget)
        parameters = list(self.model.parameters())
        device = parameters[0].device if parameters else torch.device("cpu")
        joined = join_optimizers(self.optimizer)
        states = [] if joined is None else [list(state.values()) for state in joined.state.values()]
        gradients = [parameter.grad for parameter in parameters]
        held = tensors_in([parameters, list(self.model.buffers()), gradients, states])
        memory = free_memory(str(device), None)
        return auto_budget([replace(memory, held_bytes=bytes_of_storages(device, list(held)))]).nbytes

    def profile(self, batch: Arguments) -> Profile:
        return api.profile(self.model, batch, optimizer=self.optimizer, loss=self.loss)


class LastCall:
    """Remembers the last arguments of a model, weakly, until `stop`. A model that has a plan, or is compiled,
    is left alone."""

    runs_own_code = True

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._call: Callable[[], Arguments] | None = None
        if not is_compiled(model):
            set_route(model, self)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not torch.compiler.is_compiling():
            self._call = remember(Arguments(args, kwargs))
        return call_model(self._model, args, kwargs)

    def arguments(self) -> Arguments | None:
        return None if self._call is None else self._call()

    def stop(self) -> None:
        if route_of(self._model) is self:
            set_route(self._model, None)


def remember(call: Arguments) -> Callable[[], Arguments]:
    """The arguments without references to their tensors; zeros stand for a tensor that has died."""
    leaves, structure = pytree.tree_flatten(tuple(call))
    kept = [_remembered(leaf) if isinstance(leaf, Tensor) else (lambda leaf=leaf: leaf) for leaf in leaves]
    return lambda: Arguments(*pytree.tree_unflatten([leaf() for leaf in kept], structure))


def _remembered(tensor: Tensor) -> Callable[[], Tensor]:
    alive, like = (
        weakref.ref(tensor),
        torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta"),
    )
    device, needs_grad = tensor.device, tensor.requires_grad

    def again() -> Tensor:
        found = alive()
        return torch.zeros_like(like, device=device, requires_grad=needs_grad) if found is None else found

    return again


def explanation(
    step: MemoryOfStep,
    batch: Arguments | None,
    available_bytes: int,
    *,
    frames: TracebackType | None = None,
) -> str:
    """The paragraph. A failure while it is made is part of it: the error that it explains is what matters.

    `frames` are those of the error. Their variables hold what the failed step has made so far; where the
    memory that is left is too little to trace a step, the frames that have ended lose them.
    """
    plan = plan_of(step.model)
    try:
        if plan is not None:
            return "lowtide: " + _of_plan(plan, available_bytes)
        if batch is None:
            return "lowtide: the model was not called before memory ran out, so that its step is unknown"
        with display.shown():
            return "lowtide: " + _of_step(step, batch, available_bytes)
    except (LowtideError, RuntimeError, MemoryError, OSError) as error:
        if frames is not None and is_out_of_memory(error):
            error.__traceback__ = error.__cause__ = None
            traceback.clear_frames(frames)
            return explanation(step, batch, available_bytes)
        why = str(error).splitlines()[0] if str(error) else type(error).__name__
        return (
            f"lowtide: what would fit could not be found out here ({why}). lowtide.profile(model, batch, "
            "optimizer=optimizer) in a process that has not trained takes far less memory than the step, and "
            "says it"
        )


def _of_step(step: MemoryOfStep, batch: Arguments, available_bytes: int) -> str:
    profile = step.profile(batch)
    peak_bytes, name = profile.peak_bytes, type(step.model).__name__
    needs = (
        f"a step of {name} needs {format_size(peak_bytes)} at its peak (predicted), and "
        f"{format_size(available_bytes)} were available. {_live_by_module(profile)}"
    )
    if peak_bytes <= available_bytes:
        return f"{needs} The step alone fits: what else is live takes the memory."
    try:
        plan = profile.plan(available_bytes)
    except BudgetTooSmall as error:
        lowest = f"No plan fits: the lowest peak is {format_size(error.floor_bytes)}."
        return f"{needs} {lowest} {_largest_batch(step, batch, available_bytes)}"
    call = f'lowtide.checkpoint(model, batch, budget="{available_bytes >> 20}MiB", optimizer=optimizer)'
    return f"{needs} A plan fits: {plan.overhead:+.1%} time by {call}."


def _live_by_module(profile: Profile) -> str:
    found = largest_modules(live_by_path(profile.step, profile.timeline))
    named = [f"{name} {format_size(nbytes)}" for name, nbytes in found[:NUM_MODULES]]
    rest = len(found) - len(named)
    return f"Live there: {', '.join(named)}{f' and {rest} more' if rest > 0 else ''}."


def live_by_path(step: Step, timeline: Timeline) -> Counter[str]:
    """The live bytes at the baseline's peak by the path of the module that made them."""
    live, at, storages = Counter[str](), timeline.peak_position, as_eager(step).storages
    for storage in storages:
        if storage.static:
            is_of_model = storage.kind in (Kind.PARAMETER, Kind.BUFFER)
            live[storage.name.rpartition(".")[0] if is_of_model else LABELS[storage.kind]] += storage.nbytes
    for number, start, end in timeline.blocks:
        if start <= at <= end:
            live[step.nodes[timeline.runs[start].rank].module or OUTSIDE] += storages[number].nbytes
    return live


def largest_modules(live: Mapping[str, int]) -> list[tuple[str, int]]:
    """The outermost modules with their bytes, the largest first; in place of one that has most of the bytes,
    the one module inside of it that has most of its bytes, and so on.

        {"model.layers.0": 40, "model.layers.1": 40, "head": 9}   ->   [("model.layers", 80), ("head", 9)]
    """
    found = _inside(live, "")
    while found:
        name, nbytes = found[0]
        (inner, inner_bytes), *others = _inside(live, name) or [("", 0)]
        if not others or inner_bytes * 3 < nbytes * 2:
            break
        found = sorted([(inner, inner_bytes), *others, *found[1:]], key=lambda one: (-one[1], one[0]))
    return found


def _inside(live: Mapping[str, int], parent: str) -> list[tuple[str, int]]:
    """The children of a module path with the bytes of all that is inside of each, the largest first."""
    depth, children = parent.count(".") + bool(parent), Counter[str]()
    for path, nbytes in live.items():
        if not parent or path.startswith(f"{parent}."):
            children[".".join(path.split(".")[: depth + 1])] += nbytes
    return sorted(children.items(), key=lambda one: (-one[1], one[0]))


def _of_plan(plan: Plan, available_bytes: int) -> str:
    said = (
        f"the model trains by a plan with a predicted peak of {format_size(plan.peak_bytes)}, and "
        f"{format_size(available_bytes)} were available."
    )
    if plan.peak_bytes > available_bytes:
        return f'{said} Plan with budget="{available_bytes >> 20}MiB".'
    return (
        f"{said} What is live besides the step takes the memory: reserve= (--reserve) "
        "counts it in the budget."
    )


def _largest_batch(step: MemoryOfStep, batch: Arguments, available_bytes: int) -> str:
    """The largest batch that fits, of the rows of this one."""
    sizes = {tensor.shape[0] for tensor in tensors_in(tuple(batch)) if tensor.dim()}
    if len(sizes) != 1 or max(sizes) < 2:
        return "Try a smaller batch (`lowtide fit` finds the largest)."
    (size,) = sizes

    def rows(count: int) -> Target:
        part = pytree.tree_map(lambda leaf: leaf[:count] if _has_rows(leaf) else leaf, tuple(batch))
        return Target("batch", step.model, Arguments(*part), join_optimizers(step.optimizer))

    (found,) = find_fits(rows, budgets=[available_bytes], vary=Vary(most=size - 1), check=False)
    if not found.largest:
        return "No smaller batch fits, either."
    by = "" if found.largest <= found.largest_plain else " with a plan"
    return f"The largest batch that fits{by} is {found.largest} of {size} (predicted)."


def _has_rows(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and leaf.dim() > 0
