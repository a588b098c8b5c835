"""Errors for models that cannot be captured, in one line: what, where in the user's source, what to do next.

`explained` turns errors of tracing into a `CaptureError`; the `refuse_...` functions check before tracing.
"""

import logging
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from lowtide.errors import CaptureError, LowtideError, is_out_of_memory
from lowtide.facts import Kind
from lowtide.torch_compat import dispatch, dynamo
from lowtide.trace.batch_arguments import refuse_other_arguments, refuse_other_loss
from lowtide.trace.model_call import tensors_in
from lowtide.trace.segments import Segment, Trace

logger = logging.getLogger("lowtide")

NOT_THE_USERS = (str(Path(torch.__file__).parent), str(Path(__file__).parents[1]))
LOOP_HINT = (
    "It cannot break a graph inside a loop: take the cause away, or write the loop's body as a module with a "
    "forward of its own"
)
SCRIPT_HINT = "Use the module that was scripted or traced: what TorchScript runs cannot be planned"
HINTS = {
    "retain_grad": "Use `x.register_hook` to look at the gradient of a value inside of the model",
    "torch.jit": SCRIPT_HINT,
    "_CachedForward": SCRIPT_HINT,
    "NestedTensor": "Pad the batch, or pass a nested tensor of layout torch.jagged",
    "save_on_cpu": "lowtide decides what is kept: leave save_on_cpu out",
}
"""What to do next, by a part of torch's message."""
NO_CUDA = ("not compiled with CUDA", "no NVIDIA driver", "No CUDA GPUs")
"""torch's messages where code asks for an absent GPU."""

ON_FAKE_TENSORS = {
    "convert all Tensors to FakeTensors": "a function with a backward pass of its own, such as a "
    "checkpointed block or a torch.autograd.Function, mixes results of graphs with tensors of its own",
    "DataDependentOutputException": "a number is read from a tensor",
    "DynamicOutputShapeException": "the shape of a result depends on values",
}
"""What code does that fake tensors cannot do, by a part of torch's message."""


class NeedsValues(Exception):
    """The model's Python code reads values, which fake tensors do not have."""


@contextmanager
def explained(what: str, *, of_arguments: Callable[[], str] = str) -> Iterator[None]:
    """Turn any error of tracing into a `CaptureError`, with the first cause as its `__cause__`.

    `of_arguments` says why a call does not fit its function, after a `TypeError`; empty where it fits.
    """
    try:
        yield
    except (LowtideError, NeedsValues):
        raise
    except Exception as error:
        cause = first_cause(error)
        if isinstance(cause, LowtideError):
            raise cause from None
        if isinstance(cause, TypeError) and (wrong := of_arguments()):
            raise CaptureError(wrong) from cause
        said = describe(error)
        if is_out_of_memory(cause):
            raise CaptureError(
                f"memory ran out while {what} was captured ({said}): end what else takes memory, or give "
                "this process more"
            ) from cause
        raise CaptureError(f"{what} cannot be captured: {said}. {_hint(what, said)}") from cause


def first_cause(error: BaseException) -> BaseException:
    """The innermost error, without the wrappers of torch's compiler."""
    while (inner := dynamo.inner_error(error)) is not None:
        error = inner
    return error


def describe(error: BaseException) -> str:
    """`ValueError at model.py:12: its message`, on one line."""
    cause = first_cause(error)
    lines = str(cause).strip().splitlines() or [""]
    where = _user_line(error)
    words = f"{type(cause).__name__} at {where}" if where else type(cause).__name__
    return f"{words}: {lines[0].rstrip('.')}" if lines[0] else words


def in_plain_words(error: BaseException) -> str:
    """Why code between two graphs does not run on fake tensors, with the line where it fails; torch's own
    text, which reads like a crash, goes to the log at level DEBUG. Any other error as in `describe`."""
    said = describe(error)
    words = next((words for part, words in ON_FAKE_TENSORS.items() if part in said), "")
    if not words:
        return said
    logger.debug("torch said: %s", said)
    where = _user_line(error)
    return f"{words}, at {where}" if where else words


def nothing_captured(reasons: Iterable[str]) -> str:
    """Why torch.compile left a whole model alone, from the reasons of its graph breaks."""
    why = next(iter(reasons), "")
    if not why:
        return (
            "nothing of this model could be captured: torch.compile skipped it whole. "
            "Is its forward disabled with torch._dynamo.disable, a function outside of Python, or one that "
            # torch 2.15 skips such a function; older ones end a graph there
            "differentiates inside of its own forward (torch.autograd.grad)?"
        )
    hint = next((hint for words, hint in HINTS.items() if words in why), LOOP_HINT)
    return f"nothing of this model could be captured: torch.compile gave up on its forward ({why}). {hint}"


def _user_line(error: BaseException) -> str:
    """`file:line` of the deepest frame that is neither torch's nor lowtide's."""
    stack = getattr(error, "real_stack", None)
    frames = list(stack) if stack else list(traceback.extract_tb(error.__traceback__))
    own = [frame for frame in frames if not frame.filename.startswith((*NOT_THE_USERS, "<"))]
    return f"{own[-1].filename}:{own[-1].lineno}" if own else ""


def without_cuda(said: str) -> str:
    """The next step where torch `said` that there is no CUDA device; empty where it said something else."""
    if any(words in said for words in NO_CUDA):
        return "There is no CUDA device here: let that line take the device of its inputs (`x.device`)"
    return ""


def _hint(what: str, said: str) -> str:
    return without_cuda(said) or (
        f"Does {what} run without lowtide? If so, put @torch._dynamo.disable on the function that "
        "torch.compile cannot follow"
    )


ORDINARY = (torch.Tensor, nn.Parameter, nn.Buffer)


def refuse_what_cannot_be_traced(
    model: nn.Module, batch: tuple[tuple[Any, ...], dict[str, Any]], loss: Callable[..., Any] | None
) -> None:
    """Raise a `CaptureError` for a model, a batch, (args, kwargs), or a loss where tracing would fail
    unclearly, or do harm."""
    named = (*model.named_parameters(), *model.named_buffers())
    lazy = next((name for name, tensor in named if is_lazy(tensor)), None)
    if lazy is not None:
        raise CaptureError(
            f"'{lazy}' of a lazy module has no shape yet: call the model once, on a batch and under "
            "torch.no_grad(), then make the optimizer and plan"
        )
    scripted = (name for name, module in model.named_modules() if isinstance(module, torch.jit.ScriptModule))
    name = next(scripted, None)
    if name is not None:
        raise CaptureError(f"the module '{name}' of the model is TorchScript. {SCRIPT_HINT}")
    for tensor in tensors_in(batch):
        if isinstance(tensor, ORDINARY) and type(tensor) not in ORDINARY and not dispatch.is_wrapper(tensor):
            raise CaptureError(
                f"the batch has a {type(tensor).__name__}, a kind of tensor that torch.compile does not "
                "trace: pass tensor.as_subclass(torch.Tensor), here and in training"
            )
    refuse_other_arguments(model, *batch)
    refuse_other_loss(loss)


def refuse_several_graphs(traced: Trace) -> None:
    """Raise a `CaptureError` where a gradient may not be final inside one graph."""
    if (
        traced.num_in_model > 1
        or traced.loss_is_uncaptured
        or any(e.from_uncaptured for e in traced.executions)
    ):
        where = f", first at {traced.first_break}" if traced.first_break else ""
        parts = f"the model breaks into {traced.num_in_model} graphs{where}"
        if traced.num_in_model == 1:
            parts = "the model or its loss runs differentiable code outside of its graph"
        raise CaptureError(
            f"{parts}, so that a gradient is final only when all have run: leave step_in_backward out, or "
            "remove the graph breaks (torch._dynamo.explain shows them)"
        )


def refuse_empty_buffers(segment: Segment) -> None:
    """Raise a `CaptureError` where the forward pass fills an empty buffer, as observers do at first."""
    inputs = segment.joint.graph.find_nodes(op="placeholder")
    for index in segment.mutated_inputs.values():
        origin = segment.origins[index] if index < len(segment.origins) else None
        if inputs[index].meta["val"].numel() == 0 and (origin is None or origin.kind is not Kind.OTHER):
            name = inputs[index].name if origin is None else origin.name
            raise CaptureError(
                f"the buffer '{name}' is empty until the forward pass has run once: call the model on a "
                "batch, then plan"
            )
