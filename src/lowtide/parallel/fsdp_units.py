"""Compile a model unit by unit, where its modules exchange parameters with other processes (FSDP2).

FSDP2 gathers the parameters of a unit in hooks around the unit's forward, outside of any graph. So each
unit's forward is compiled separately. The hooks run eagerly, and a graph reads the module's parameters of the
time when it is called. Units with equal code share their graphs.
"""

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from lowtide.torch_compat import dynamo, fsdp2
from lowtide.torch_compat.modules import ROUTE, call_model, own_call
from lowtide.trace.compile_settings import compiled

Watch = Callable[[int, bool, Any], None]
"""Called for every call of a unit, by the unit's number: before it with True and its arguments, after it with
False and its result."""


def compiled_model(
    model: nn.Module,
    backend: Callable[..., Any],
    *,
    units: Sequence[nn.Module] = (),
    watch: Watch | None = None,
) -> "dynamo.Compiled | CompiledUnits":
    """A function `(model, args, kwargs)` that calls `model` through graphs of `backend`.

    With `units`, or those that `fully_shard` made, each unit has its own graphs. `backend` must outlive the
    function.
    """
    units = units or fsdp2.units_of(model)
    if units:
        return CompiledUnits(model, units, backend, watch=watch)
    return compiled(dynamo.own_code(call_model), backend)


class CompiledUnits:
    """As `dynamo.Compiled`, for a model of units; the model itself is the outermost unit."""

    def __init__(
        self,
        model: nn.Module,
        units: Sequence[nn.Module],
        backend: Callable[..., Any],
        *,
        watch: Watch | None = None,
    ) -> None:
        self._units = list(dict.fromkeys((model, *units)))
        self._numbers = {unit: number for number, unit in enumerate(units)}
        self._backend = backend
        self._compiled: dict[Any, dynamo.Compiled] = {}
        self._watch = watch

    def __call__(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        try:
            with contextlib.ExitStack() as stack:
                for unit in self._units:
                    stack.enter_context(self._routed(unit, self._numbers.get(unit)))
                return call_model(model, args, kwargs)
        except BaseException:
            fsdp2.reset(model)
            raise

    @contextlib.contextmanager
    def _routed(self, unit: nn.Module, number: int | None) -> Iterator[None]:
        """Run a unit's call, with its hooks, without torch.compile, and its forward through graphs."""
        attributes = vars(unit)
        names = ("forward", ROUTE)
        before = {name: attributes[name] for name in names if name in attributes}
        forward = self._compiled_forward(unit)

        def call(*args: Any, **kwargs: Any) -> Any:
            if self._watch is None or number is None:
                return forward(*args, **kwargs)
            self._watch(number, True, (args, kwargs))
            result = forward(*args, **kwargs)
            self._watch(number, False, result)
            return result

        attributes["forward"] = call
        attributes[ROUTE] = torch.compiler.disable(own_call(unit))  # type: ignore[no-untyped-call]
        try:
            yield
        finally:
            for name in names:
                attributes.pop(name)
            attributes.update(before)

    def _compiled_forward(self, unit: nn.Module) -> Callable[..., Any]:
        """The forward of a unit, compiled once for all units with the same code."""
        forward = unit.forward
        own = forward.__func__ if inspect.ismethod(forward) and forward.__self__ is unit else None
        if own is None:
            self._compiled.setdefault(forward, compiled(forward, self._backend))
            return self._compiled[forward]
        if own.__code__ not in self._compiled:
            self._compiled[own.__code__] = compiled(dynamo.own_code(own), self._backend)
        return functools.partial(self._compiled[own.__code__], unit)

    @property
    def seconds(self) -> float:
        """Seconds of tracing so far."""
        return sum(each.seconds for each in self._compiled.values())

    def is_tracing(self, *_functions: Callable[..., Any]) -> bool:
        """Whether a call can still start over: never, since other processes are in the same call."""
        return False

    def forget(self) -> None:
        """Drop all compiled code."""
        for each in self._compiled.values():
            each.forget()

    def look_again(self) -> None:
        """While a failed call is handled: let torch retry code that it gave up on."""
        for each in self._compiled.values():
            each.look_again()
