"""Restore the user's model, objects and random states after a capture."""

import copy
import functools
import inspect
import itertools
import operator
import random
import sys
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from types import CellType, FunctionType, MethodType, SimpleNamespace
from typing import Any

import numpy
import torch
from torch import nn

from lowtide.generators import generators_kept
from lowtide.torch_compat.modules import forward_hooks
from lowtide.trace.identity import user_tensors

Container = dict[Any, Any] | list[Any] | set[Any] | deque[Any]
CONTAINERS = (dict, list, set, deque, OrderedDict, defaultdict)


@contextmanager
def user_state_restored(model: nn.Module, batch: object = ()) -> Iterator[None]:
    """Restore the model's attributes, those of its objects (a config, say), the contents of its lists, dicts
    and buffers, and all random states: of Python, of numpy, of the devices of the model and its batch, and of
    generators that are attributes of the model, or global in the files of its classes.

    A forward pass may store a result (`self.last = x`), which at capture is a fake tensor. Uncaptured code
    runs on real tensors, and changes buffers.
    """
    python, numbers = random.getstate(), numpy.random.get_state()
    seen: set[int] = set()
    own = [vars(module) for module in model.modules()]
    containers = _containers(own, seen=seen)
    containers += _containers((vars(v) for at in own for v in at.values() if _is_plain(v)), seen=seen)
    # a hook may append to a user's list, or count in an attribute or a variable
    hooks = forward_hooks(model)
    named = [value for hook in hooks for value in _named_by(hook)]
    named += [vars(value) for value in named if _is_plain(value)]
    containers += _containers(named, seen=seen)
    variables = [variable for hook in hooks for variable in _variables_of(hook)]
    buffers = [(buffer, buffer.detach().clone()) for buffer in model.buffers()]
    generators = [_restorer(each) for each in _generators(model, containers)]
    try:
        with generators_kept(tensor.device for tensor in user_tensors(model, batch)):
            yield
    finally:
        random.setstate(python)
        numpy.random.set_state(numbers)
        for restore in generators:
            restore()
        for container, before in containers:
            _refill(container, before)
        for variable in variables:
            variable.restore()
        with torch.no_grad():
            for buffer, contents in buffers:
                if not torch.equal(buffer, contents):
                    buffer.copy_(contents)


def _is_plain(value: Any) -> bool:
    """Whether this is an object with attributes, of a class that is neither torch's nor Python's."""
    own = ("torch", "builtins", "types", "functools", "logging", "threading")
    is_theirs = type(value).__module__.split(".")[0] in own and not isinstance(value, SimpleNamespace)
    return hasattr(value, "__dict__") and not is_theirs and not isinstance(value, type | nn.Module)


def _containers(values: Iterable[Any], *, seen: set[int]) -> list[tuple[Container, Container]]:
    """Every plain container in `values`, nested ones too, each with a shallow copy."""
    found: list[tuple[Container, Container]] = []
    for value in values:
        if type(value) in CONTAINERS and id(value) not in seen:
            seen.add(id(value))
            found.append((value, copy.copy(value)))
            inside = list(value.values() if isinstance(value, dict) else value)
            found += _containers(inside, seen=seen)
    return found


def _functions_of(hook: Any) -> list[FunctionType]:
    """The functions that a call of `hook` begins with: its own, of a method, a partial, or an object."""
    if isinstance(hook, functools.partial):
        return _functions_of(hook.func)
    if isinstance(hook, MethodType):
        return _functions_of(hook.__func__)
    if isinstance(hook, FunctionType):
        return [hook]
    call = inspect.getattr_static(type(hook), "__call__", None)
    return [call] if isinstance(call, FunctionType) else []


def _named_by(hook: Any) -> list[Any]:
    """The values that the code of a hook reads: its object, and values outside of its function."""
    found: list[Any] = [hook]
    if isinstance(hook, functools.partial):
        found += [*hook.args, *hook.keywords.values(), *_named_by(hook.func)]
    elif isinstance(hook, MethodType):
        found.append(hook.__self__)
    for function in _functions_of(hook):
        found += [*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]
        try:
            around = inspect.getclosurevars(function)
        except ValueError:  # a variable that has no value yet
            continue
        found += around.nonlocals.values()
        found += (value for value in around.globals.values() if type(value) in CONTAINERS)
    return found


class _Cell:
    """A variable of an outer function, which an inner one may set (`nonlocal`)."""

    def __init__(self, cell: CellType) -> None:
        self.cell, self.value = cell, cell.cell_contents

    def restore(self) -> None:
        if self.cell.cell_contents is not self.value:
            self.cell.cell_contents = self.value


class _Global:
    """A variable of a module, which a function may set (`global`)."""

    def __init__(self, names: dict[str, Any], name: str) -> None:
        self.names, self.name, self.value = names, name, names[name]

    def restore(self) -> None:
        if self.names.get(self.name) is not self.value:
            self.names[self.name] = self.value


def _variables_of(hook: Any) -> list[_Cell | _Global]:
    """The variables outside of a hook's functions that their code may set."""
    found: list[_Cell | _Global] = []
    for function in _functions_of(hook):
        found += [_Cell(cell) for cell in function.__closure__ or () if cell != CellType()]
        names = [name for name in function.__code__.co_names if name in function.__globals__]
        found += [_Global(function.__globals__, name) for name in names]
    return found


Generator = torch.Generator | random.Random | numpy.random.Generator | numpy.random.RandomState


def _generators(model: nn.Module, containers: list[tuple[Container, Container]]) -> list[Generator]:
    """Generators in these containers, and global variables in the files of the model's classes."""
    values = [value for one, _ in containers for value in (one.values() if isinstance(one, dict) else one)]
    classes = {each for module in model.modules() for each in type(module).__mro__}
    files = sorted({each.__module__ for each in classes} - {"builtins"})
    values += [value for name in files for value in vars(sys.modules.get(name, torch)).values()]
    found = [value for value in values if isinstance(value, Generator)]
    return list({id(each): each for each in found}.values())


def _restorer(generator: Generator) -> Callable[[], object]:
    """A function that sets a generator to its present state."""
    if isinstance(generator, torch.Generator):
        return functools.partial(generator.set_state, generator.get_state())
    if isinstance(generator, random.Random):
        return functools.partial(generator.setstate, generator.getstate())
    if isinstance(generator, numpy.random.RandomState):
        return functools.partial(generator.set_state, generator.get_state())
    return functools.partial(setattr, generator.bit_generator, "state", generator.bit_generator.state)


def _refill(container: Container, before: Container) -> None:
    if len(container) == len(before) and all(map(operator.is_, _inside(container), _inside(before))):
        return
    container.clear()
    if isinstance(container, list | deque):
        container.extend(before)
    else:
        container.update(before)


def _inside(container: Container) -> Iterable[Any]:
    return itertools.chain.from_iterable(container.items()) if isinstance(container, dict) else container
