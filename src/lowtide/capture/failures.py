"""Say in one line what of a model could not be captured, and where in the user's source."""

import traceback
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from lowtide.errors import CaptureError, LowtideError
from lowtide.torchside import hooks

NOT_THE_USERS = (str(Path(torch.__file__).parent), str(Path(__file__).parents[1]))


LOOP_HINT = (
    "It cannot break a graph inside a loop: take the cause away, or write the loop's body as a module with a "
    "forward of its own"
)
SCRIPT_HINT = "Use the module that was scripted or traced: what TorchScript runs cannot be planned"
HINTS = {
    "Module-level backwards hooks": (
        "In a loop or nn.Sequential it cannot break the graph at a module with backward hooks: remove the "
        "hook, or register one on the tensor in forward (`x.register_hook`)"
    ),
    "retain_grad": "Use `x.register_hook` to look at the gradient of a value inside of the model",
    "torch.jit": SCRIPT_HINT,
    "_CachedForward": SCRIPT_HINT,
    "NestedTensor": "Pad the batch, or pass a nested tensor of layout torch.jagged",
    "save_on_cpu": "lowtide decides what is kept: leave save_on_cpu out",
}
"""What to do next, by what torch says."""


NO_CUDA = ("not compiled with CUDA", "no NVIDIA driver", "No CUDA GPUs")
"""What torch says where code asks for a GPU that is not there."""


class NeedsValues(Exception):
    """The model's Python code wants from fake tensors what only real ones have."""


@contextmanager
def explained(what: str) -> Iterator[None]:
    """Turn whatever tracing raises into a `CaptureError`, with the first cause as its `__cause__`."""
    try:
        yield
    except (LowtideError, NeedsValues):
        raise
    except Exception as error:
        cause = first_cause(error)
        if isinstance(cause, LowtideError):
            raise cause from None
        said = describe(error)
        raise CaptureError(f"{what} cannot be captured: {said}. {_hint(what, said)}") from cause


def first_cause(error: BaseException) -> BaseException:
    """What torch's compiler wrapped."""
    while isinstance(error, hooks.TorchDynamoException):
        inner = getattr(error, "inner_exception", None) or error.__cause__ or error.__context__
        if inner is None:
            break
        error = inner
    return error


def describe(error: BaseException) -> str:
    """`ValueError at model.py:12: its message`, on one line."""
    cause = first_cause(error)
    lines = str(cause).strip().splitlines() or [""]
    where = _user_line(error)
    words = f"{type(cause).__name__} at {where}" if where else type(cause).__name__
    return f"{words}: {lines[0].rstrip('.')}"


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


def _hint(what: str, said: str) -> str:
    if any(words in said for words in NO_CUDA):
        return "There is no CUDA device here: let that line take the device of its inputs (`x.device`)"
    return (
        f"Does {what} run without lowtide? If so, put @torch._dynamo.disable on the function that "
        "torch.compile cannot follow"
    )
