"""Where a call of a module goes: through its own code, or through what took its place."""

from collections.abc import Callable
from typing import Any

from torch import nn


def call_model(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The model's own code, hooks included. This is the function that is compiled, at capture and at run
    time, so that both give the same graphs."""
    return model._call_impl(*args, **kwargs)  # type: ignore[no-untyped-call]


def entrance(model: nn.Module) -> list[Callable[..., Any]]:
    """The model's forward, where it is known to be the first of the user's code that a call runs."""
    forward = type(model).forward
    shared = any(type(module).forward is forward for module in model.modules() if module is not model)
    hooked = bool(model._forward_pre_hooks) or "forward" in vars(model)
    return [] if shared or hooked else [forward]


def hooks_of(model: nn.Module) -> list[Any]:
    """What modules call before and after their forward."""
    modules = list(model.modules())
    return [hook for m in modules for hook in (*m._forward_pre_hooks.values(), *m._forward_hooks.values())]


def route_of(model: nn.Module) -> Any:
    """What runs instead of the model's own code; None for nothing."""
    return model._compiled_call_impl


def set_route(model: nn.Module, route: Any) -> None:
    """Let `route` run instead of the model's own code; None gives that back."""
    model._compiled_call_impl = route


def is_compiled(model: nn.Module) -> bool:
    """Whether something runs instead of the model's own code, or torch.compile instead of its forward."""
    return route_of(model) is not None or hasattr(vars(model).get("forward"), "_torchdynamo_orig_callable")
