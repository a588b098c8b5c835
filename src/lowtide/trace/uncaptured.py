"""Watch what code between the captured graphs makes and holds, over one forward and backward pass.

Shortcomings: memory that is not torch's is not seen.

What autograd holds of code that runs between the captured graphs: hooks, packed sequences, functions of
other libraries.
"""

import contextlib
from bisect import bisect
from collections.abc import Collection, Container, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from lowtide.facts import Region
from lowtide.ops.calls import Call, signature
from lowtide.torch_compat import aot_autograd, autograd_engine, dispatch
from lowtide.torch_compat.dispatch import iter_tensors, map_leaves, storage_key

SMALL_BYTES = 1024
"""A few numbers, which are counted around every graph."""


class UncapturedPoint(NamedTuple):
    """Between two graphs: forward, before graph `graph`; backward, after that of `graph`."""

    region: Region
    graph: int

    @property
    def order(self) -> tuple[bool, int]:
        """Larger for a later one."""
        is_backward = self.region is Region.BACKWARD
        return is_backward, -self.graph if is_backward else self.graph


class Stay(NamedTuple):
    """From one moment to another, or for good."""

    first: UncapturedPoint
    last: UncapturedPoint | None

    def lasts_in(self, moment: UncapturedPoint) -> bool:
        return self.first.order <= moment.order and (self.last is None or moment.order <= self.last.order)


@dataclass(frozen=True, slots=True)
class UncapturedCode:
    """What code between the graphs held: bytes of `stays` over graphs that ran meanwhile, and `inside_bytes`,
    the most besides in one moment. `alive` are the (execution, output) of graphs that were there in it.

    `gradients` are those of parameters that it gave: the moment and the bytes, by the parameter's identity.
    `calls` are its ops in a moment, each with what is held besides stays when it ends: what an op holds
    inside of itself is for others to measure.
    """

    stays: dict[Stay, int] = field(default_factory=dict)
    inside_bytes: dict[UncapturedPoint, int] = field(default_factory=dict)
    alive: dict[UncapturedPoint, tuple[tuple[int, int], ...]] = field(default_factory=dict)
    gradients: dict[int, tuple[UncapturedPoint, int]] = field(default_factory=dict)
    calls: dict[UncapturedPoint, list[tuple[Call, int]]] = field(default_factory=dict)


class _Life:
    """Of one storage that code between graphs made."""

    def __init__(self, nbytes: int, first: UncapturedPoint) -> None:
        self.nbytes = nbytes
        self.first = first
        self.last: UncapturedPoint | None = first


class UncapturedWatch(dispatch.TorchDispatchMode):
    """Sees every op that runs while it is on, apart from those of graphs. Changes no result."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.moment = UncapturedPoint(Region.FORWARD, 0)
        self._is_inside = False
        self._lives: dict[int, _Life] = {}
        self._live: dict[int, dispatch.StorageWeakRef] = {}
        self._events: list[tuple[UncapturedPoint, int, bool]] = []
        self._calls: list[tuple[int, UncapturedPoint, Call]] = []
        """how many events there were when an op had ended, and the op"""
        self._known_calls: set[tuple[UncapturedPoint, str]] = set()
        self._fake = dispatch.FakeTensorMode()
        self._outputs: dict[int, tuple[tuple[int, int], dispatch.StorageWeakRef]] = {}
        self._alive: dict[UncapturedPoint, tuple[tuple[int, int], ...]] = {}
        self._counted: set[int] = set()
        self._gone: list[dispatch.StorageWeakRef] = []
        """as long as they are here, no other storage gets the place of theirs"""

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Let torch.compile work while this is on."""
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if not self._is_inside:
            read = {storage_key(tensor) for tensor in iter_tensors((args, kwargs)) if _has_bytes(tensor)}
            self._look()
            if self.moment not in self._alive:
                self._alive[self.moment] = tuple(
                    place for place, ref in self._outputs.values() if _is_there(ref)
                )
            for tensor in iter_tensors(result):
                if _has_bytes(tensor) and (key := storage_key(tensor)) not in read:
                    self._note(tensor, key)
            self._note_call(func, args, kwargs or {})
        return result

    @contextlib.contextmanager
    def inside_of_graph(self) -> Iterator[None]:
        """Look away while a graph runs."""
        before, self._is_inside = self._is_inside, True
        try:
            yield
        finally:
            self._is_inside = before

    def graph_ran(self, execution: int, outputs: dict[int, torch.Tensor]) -> None:
        """The forward pass of a graph is over, which made these outputs."""
        self.move(UncapturedPoint(Region.FORWARD, execution + 1))
        for output, tensor in outputs.items():
            reference = dispatch.StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]
            self._outputs.setdefault(storage_key(tensor), ((execution, output), reference))

    def move(self, moment: UncapturedPoint) -> None:
        """Whatever comes belongs to another moment."""
        self._look()
        self.moment = moment

    def leave_out(self, tensors: Iterable[torch.Tensor]) -> None:
        """Somebody else counts these."""
        self._counted.update(map(storage_key, tensors))

    def gradients_came(self, gradients: Iterable[torch.Tensor]) -> None:
        """A graph made these, and code between the graphs takes them."""
        for tensor in gradients:
            self._note(tensor, storage_key(tensor))

    def gradients_went(self, gradients: Iterable[torch.Tensor]) -> None:
        """A graph takes these, and counts them from now on."""
        self._look()
        for key in {storage_key(tensor) for tensor in gradients} & self._live.keys():
            self._end(key)

    def result(self, gradients: dict[int, torch.Tensor], *, left_out: Collection[int] = ()) -> UncapturedCode:
        """What was seen; what is there still stays for good. `gradients` are those of parameters, by the
        parameter's identity, and `left_out` storages that others count."""
        self._look()
        for key in self._live:
            self._lives[key].last = None
        own = {
            key: life for key, life in self._lives.items() if key not in self._counted and key not in left_out
        }
        keys = {parameter: storage_key(gradient) for parameter, gradient in gradients.items()}
        given = {
            parameter: (own[key].first, own[key].nbytes) for parameter, key in keys.items() if key in own
        }
        stays: dict[Stay, int] = {}
        for key, life in own.items():
            if life.last != life.first and key not in keys.values():
                stay = Stay(life.first, life.last)
                stays[stay] = stays.get(stay, 0) + life.nbytes
        for_good = [(Stay(first, None), nbytes) for first, nbytes in given.values()]
        inside = {
            moment: max(
                0, nbytes - sum(n for stay, n in (*stays.items(), *for_good) if stay.lasts_in(moment))
            )
            for moment, nbytes in self._most_bytes(own).items()
        }
        calls = self._calls_of(own, [*stays.items(), *for_good])
        busy = {moment for moment, nbytes in inside.items() if nbytes > SMALL_BYTES}
        alive = {
            moment: places for moment, places in self._alive.items() if moment in busy or moment in calls
        }
        return UncapturedCode(stays, {moment: inside[moment] for moment in busy}, alive, given, calls)

    def _calls_of(
        self, own: dict[int, _Life], stays: list[tuple[Stay, int]]
    ) -> dict[UncapturedPoint, list[tuple[Call, int]]]:
        held = [0]
        for _, key, is_born in self._events:
            nbytes = own[key].nbytes if key in own else 0
            held.append(held[-1] + (nbytes if is_born else -nbytes))
        found: dict[UncapturedPoint, list[tuple[Call, int]]] = {}
        for event, moment, call in self._calls:
            besides = held[event] - sum(nbytes for stay, nbytes in stays if stay.lasts_in(moment))
            found.setdefault(moment, []).append((call, max(0, besides)))
        return found

    def _most_bytes(self, own: dict[int, _Life]) -> dict[UncapturedPoint, int]:
        """The most at once in every moment."""
        most: dict[UncapturedPoint, int] = {}
        held = 0
        for moment, key, is_born in self._events:
            if key in own:
                held += own[key].nbytes if is_born else -own[key].nbytes
                most[moment] = max(most.get(moment, 0), held)
        return most

    def _note_call(self, func: Any, args: Any, kwargs: Any) -> None:
        """Keep an op by the layouts of its tensors: the tensors themselves have to be free to go."""
        tensors = list(iter_tensors((args, kwargs)))
        if func.namespace != "aten" or func.is_view or not all(map(_has_bytes, tensors)):
            return  # what others have written may do more than compute
        if sum(tensor.nbytes for tensor in tensors) <= SMALL_BYTES:
            return
        with self._fake:
            call = Call(func, *map_leaves(_like, (tuple(args), dict(kwargs))))
        known = self.moment, signature(call)
        if known not in self._known_calls:
            self._known_calls.add(known)
            self._calls.append((len(self._events), self.moment, call))

    def _look(self) -> None:
        """See what is gone since the last look."""
        for key in [key for key, reference in self._live.items() if not _is_there(reference)]:
            self._end(key)

    def _end(self, key: int) -> None:
        self._gone.append(self._live.pop(key))
        self._lives[key].last = self.moment
        self._events.append((self.moment, key, False))

    def _note(self, tensor: torch.Tensor, key: int) -> None:
        if key in self._lives or key in self._outputs:
            return
        storage = tensor.untyped_storage()
        self._live[key] = dispatch.StorageWeakRef(storage)  # type: ignore[no-untyped-call]
        self._lives[key] = _Life(storage.nbytes(), self.moment)
        self._events.append((self.moment, key, True))


def _is_there(reference: dispatch.StorageWeakRef) -> bool:
    return not reference.expired()  # type: ignore[no-untyped-call]


def _like(value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device)


def _has_bytes(tensor: torch.Tensor) -> bool:
    return tensor.layout is torch.strided and not dispatch.is_wrapper(tensor)


@contextlib.contextmanager
def unwatched() -> Iterator[None]:
    """Let torch work on a graph as if no watch were on."""
    is_watched = any(isinstance(mode, UncapturedWatch) for mode in dispatch.active_modes())
    with dispatch.without_modes() if is_watched else contextlib.nullcontext():
        yield


def held_outside(
    results: Iterable[torch.Tensor], known: Container[int], *, num_graphs: int
) -> dict[int, int]:
    """Bytes of what autograd's nodes behind `results` hold, by how many of the `num_graphs` graphs with a
    backward pass had run before; the storages `known` are left out.

    All is under 0, as if it were there from the start, where some of these graphs cannot be seen from there.
    """
    nodes = _nodes(results)
    graphs = sorted(
        autograd_engine.creation_order(node) for node in nodes if aot_autograd.is_compiled_graph(node)
    )
    held: dict[int, int] = {}
    seen: set[int] = set()
    for node in nodes:
        if aot_autograd.is_compiled_graph(node):
            continue
        before = bisect(graphs, autograd_engine.creation_order(node)) if len(graphs) == num_graphs else 0
        for tensor in iter_tensors(list(autograd_engine.saved_values(node))):
            key = storage_key(tensor)
            if key not in known and key not in seen:
                seen.add(key)
                held[before] = held.get(before, 0) + tensor.untyped_storage().nbytes()
    return held


def leaves_behind(results: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """The tensors whose gradients a backward pass from `results` would keep."""
    return [node.variable for node in _nodes(results) if autograd_engine.is_leaf_node(node)]


def _nodes(results: Iterable[torch.Tensor]) -> list[Any]:
    """All of autograd's nodes behind these tensors, those that were made first in front."""
    waiting: list[Any] = [tensor.grad_fn for tensor in results if tensor.grad_fn is not None]
    seen = set(waiting)
    while waiting:
        following = {node for node, _ in waiting.pop().next_functions if node is not None} - seen
        seen |= following
        waiting += following
    return sorted(seen, key=autograd_engine.creation_order)
