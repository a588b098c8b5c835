"""Whether a batch fits the arguments of a model's forward, and whether a loss takes the model's output alone:
said before torch traces the model.

    forward() of Net takes 1 argument (x), and the batch has 2: is the last one the target? Pass ...
    the loss cross_entropy needs 2 arguments (input, target), and is called with the model's output ...

Where a signature says nothing certain, nothing is refused: a forward in C, a class with a `__call__` of its
own, hooks that run before forward and may change its arguments, a decorator around forward. A `TypeError` of
such a call can be explained afterwards (`mismatch`).
"""

import difflib
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import nn

from lowtide.errors import CaptureError
from lowtide.torch_compat.modules import has_hooks_before_forward

BY_POSITION = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
ANY_NUMBER = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
AS_LOSS = "loss=lambda output: F.cross_entropy(output, y)"


def refuse_other_arguments(model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Raise a `CaptureError` for a batch that the model's forward certainly does not take."""
    is_certain = type(model).__call__ is nn.Module.__call__ and not has_hooks_before_forward(model)
    said = mismatch(model, args, kwargs, through_decorators=False) if is_certain else ""
    if said:
        raise CaptureError(said)


def refuse_other_loss(loss: Callable[..., Any] | None) -> None:
    """Raise a `CaptureError` for a loss that is no function, or that certainly needs more than the output."""
    if loss is None:
        return
    if not callable(loss):
        raise CaptureError(
            f"the loss is a {type(loss).__name__}, not a function: pass a function of the model's output, "
            f"{AS_LOSS}"
        )
    function = loss.forward if isinstance(loss, nn.Module) else loss
    try:
        signature = inspect.signature(function, follow_wrapped=False)
    except (TypeError, ValueError):  # a function without a signature
        return
    try:
        signature.bind(None)
    except TypeError:
        needed = [
            name
            for name, parameter in signature.parameters.items()
            if parameter.default is inspect.Parameter.empty and parameter.kind not in ANY_NUMBER
        ]
        name = type(loss).__name__ if isinstance(loss, nn.Module) else getattr(loss, "__name__", "loss")
        raise CaptureError(
            f"the loss {name} takes {_arguments(len(needed))} ({', '.join(needed)}), and is called with the "
            f"model's output alone: pass a function of that, {_as_loss(loss)}"
        ) from None


def _as_loss(loss: Callable[..., Any]) -> str:
    name = getattr(loss, "__name__", "")
    if getattr(nn.functional, name, None) is loss:
        return f"loss=lambda output: F.{name}(output, y)"
    if isinstance(loss, nn.Module):
        return "loss=lambda output: criterion(output, y)"
    return AS_LOSS


def mismatch(
    model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], *, through_decorators: bool = True
) -> str:
    """Why these arguments do not fit the model's forward, in one line; empty where they fit, or where the
    signature cannot be read. A decorator may change the arguments of the function below it."""
    try:
        signature = inspect.signature(model.forward, follow_wrapped=through_decorators)
        signature.bind(*args, **kwargs)
    except TypeError:
        forward = f"forward() of {type(model).__name__}"
        return _words(forward, dict(signature.parameters), args, kwargs)
    except ValueError:  # a function without a signature
        return ""
    return ""


def _words(
    forward: str, taken: dict[str, inspect.Parameter], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> str:
    names = [name for name, parameter in taken.items() if parameter.kind not in ANY_NUMBER]
    positional = [name for name in names if taken[name].kind in BY_POSITION]
    has_args, has_kwargs = (any(each.kind is kind for each in taken.values()) for kind in ANY_NUMBER)
    if len(args) > len(positional) and not has_args and not positional:
        return (
            f"{forward} takes arguments by name only ({', '.join(names) or 'and has none'}), and the batch "
            f"has {len(args)} by position: pass a dict"
        )
    shown = ", ".join(positional)
    if len(args) > len(positional) and not has_args:
        takes = f"{forward} takes {_arguments(len(positional))} ({shown}), and the batch has {len(args)}"
        batch = shown if len(positional) == 1 else f"({shown})"
        if len(args) == len(positional) + 1:
            return f"{takes}: is the last one the target? Pass batch={batch} and {AS_LOSS}"
        return f"{takes}: pass batch={batch}, and targets in the loss ({AS_LOSS})"
    unknown = [name for name in kwargs if name not in names and not has_kwargs]
    given = {*positional[: len(args)], *kwargs}
    missing = [name for name in names if name not in given and taken[name].default is inspect.Parameter.empty]
    if kwargs and not args and len(unknown) == len(kwargs) and len(positional) == 1:
        return (
            f"{forward} takes 1 argument ({shown}), and the batch is a dict of keyword arguments "
            f"({_quoted(unknown)}): name its key '{shown}', or pass batch=(batch,) for the dict as one "
            "argument"
        )
    if unknown:
        meant = difflib.get_close_matches(unknown[0], [name for name in names if name not in given], n=1)
        next_step = (
            f"is '{meant[0]}' meant?"
            if meant
            else f"leave it out of the batch; a target goes into the loss ({AS_LOSS})"
        )
        return f"{forward} takes no argument {_quoted(unknown)}; it takes {', '.join(names)}: {next_step}"
    if missing:
        has = f"{_quoted(kwargs)} only" if kwargs else _arguments(len(args))
        return f"{forward} needs {_quoted(missing)}, and the batch has {has}: add it to the batch"
    twice = [name for name in kwargs if name in positional[: len(args)]]
    return f"the batch gives {_quoted(twice)} of {forward} twice, by position and by name: leave one out"


def _arguments(number: int) -> str:
    return f"{number or 'no'} argument{'' if number == 1 else 's'}"


def _quoted(names: Sequence[str] | Mapping[str, Any]) -> str:
    return ", ".join(f"'{name}'" for name in names)
