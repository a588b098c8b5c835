"""The bytes that uncaptured code makes and keeps live in one forward and backward pass.

`UncapturedWatch` sees every op of such code (hooks, packed sequences, functions of other libraries), with
fake results of the graphs. Where no watch can be on, `bytes_saved_by_autograd` walks the nodes of autograd
behind the output.

Shortcoming: only memory of torch is seen.
"""

import contextlib
from bisect import bisect
from collections.abc import Container, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import nn

from lowtide.facts import Region
from lowtide.ops.calls import Call, signature
from lowtide.ops.device_memory import CPU, is_on
from lowtide.torch_compat import aot_autograd, autograd_engine, dispatch
from lowtide.torch_compat.dispatch import iter_tensors, map_leaves, storage_key

SMALL_BYTES = 1024
"""A few numbers, which are counted around every graph."""


class UncapturedPoint(NamedTuple):
    """A time point between two graphs: in forward before `graph`, in backward after `graph`."""

    region: Region
    graph: int

    @property
    def order(self) -> tuple[bool, int]:
        """Larger for a later point."""
        is_backward = self.region is Region.BACKWARD
        return is_backward, -self.graph if is_backward else self.graph


class UncapturedRange(NamedTuple):
    """A live range: from one point to another, or to the end of the step."""

    first: UncapturedPoint
    last: UncapturedPoint | None

    def covers(self, point: UncapturedPoint) -> bool:
        return self.first.order <= point.order and (self.last is None or point.order <= self.last.order)


@dataclass(frozen=True, slots=True)
class UncapturedCode:
    """Bytes that uncaptured code kept live: by `live_ranges` across graphs, and `inside_bytes`, the most
    besides at one point. `live_outputs` are each (execution, output) that was live there.

    `gradients` of parameters that the code made: the point and the bytes, by the parameter's identity.
    `calls` are the ops at a point, each with the bytes live besides the ranges when the op ends; the
    workspace of an op is measured elsewhere.
    """

    live_ranges: dict[UncapturedRange, int] = field(default_factory=dict)
    inside_bytes: dict[UncapturedPoint, int] = field(default_factory=dict)
    live_outputs: dict[UncapturedPoint, tuple[tuple[int, int], ...]] = field(default_factory=dict)
    gradients: dict[int, tuple[UncapturedPoint, int]] = field(default_factory=dict)
    calls: dict[UncapturedPoint, list[tuple[Call, int]]] = field(default_factory=dict)


@dataclass(slots=True)
class _Storage:
    """One storage that uncaptured code made, live until `last`, or to the end of the step."""

    nbytes: int
    first: UncapturedPoint
    last: UncapturedPoint | None = None


class UncapturedWatch(dispatch.TorchDispatchMode):
    """Sees every op that runs while it is on, except ops of graphs. Changes no result.

    `device` is the step's: tensors elsewhere take no memory of it, and are not counted.
    """

    def __init__(self, device: torch.device = CPU) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.device = device
        self.point = UncapturedPoint(Region.FORWARD, 0)
        self._is_inside = False
        self._storages: dict[int, _Storage] = {}
        self._live: dict[int, dispatch.StorageWeakRef] = {}
        self._gone: list[dispatch.StorageWeakRef] = []
        """kept, so that no new storage gets the key of a freed one"""
        self._events: list[tuple[UncapturedPoint, int, bool]] = []
        """a storage was made (True) or freed, in order"""
        self._calls: list[tuple[int, UncapturedPoint, Call]] = []
        """how many events there were when an op had ended, and the op"""
        self._known_calls: set[tuple[UncapturedPoint, str]] = set()
        self._fake = dispatch.FakeTensorMode()
        self._outputs: dict[int, tuple[tuple[int, int], dispatch.StorageWeakRef]] = {}
        self._live_outputs: dict[UncapturedPoint, tuple[tuple[int, int], ...]] = {}
        self._counted_elsewhere: set[int] = set()

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Let torch.compile work while the watch is on."""
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if not self._is_inside:
            read = {storage_key(tensor) for tensor in iter_tensors((args, kwargs)) if _has_bytes(tensor)}
            self._find_freed()
            if self.point not in self._live_outputs:
                live = tuple(place for place, reference in self._outputs.values() if _is_live(reference))
                self._live_outputs[self.point] = live
            for tensor in iter_tensors(result):
                if _has_bytes(tensor) and storage_key(tensor) not in read:
                    self._note(tensor)
            self._note_call(func, args, kwargs or {})
        return result

    @contextlib.contextmanager
    def inside_of_graph(self) -> Iterator[None]:
        """Pause the watch while a graph runs."""
        before, self._is_inside = self._is_inside, True
        try:
            yield
        finally:
            self._is_inside = before

    def graph_ran(self, execution: int, outputs: dict[int, torch.Tensor]) -> None:
        """Record the outputs of a graph at the end of its forward pass."""
        self.move(UncapturedPoint(Region.FORWARD, execution + 1))
        for output, tensor in outputs.items():
            self._outputs.setdefault(storage_key(tensor), ((execution, output), _reference(tensor)))

    def move(self, point: UncapturedPoint) -> None:
        """Count all later ops at another point."""
        self._find_freed()
        self.point = point

    def leave_out(self, tensors: Iterable[torch.Tensor]) -> None:
        """Do not count these tensors: they are inputs of a graph, and counted there."""
        self._counted_elsewhere.update(map(storage_key, tensors))

    def gradients_came(self, gradients: Iterable[torch.Tensor]) -> None:
        """Count gradients that go from a graph to uncaptured code."""
        for tensor in gradients:
            self._note(tensor)

    def gradients_went(self, gradients: Iterable[torch.Tensor]) -> None:
        """Stop counting gradients that go to a graph, which counts them from now on."""
        self._find_freed()
        for key in {storage_key(tensor) for tensor in gradients} & self._live.keys():
            self._free(key)

    def result(self, gradients: dict[int, torch.Tensor]) -> UncapturedCode:
        """All that was seen. A storage that is still live stays live to the end of the step. `gradients` of
        parameters are keyed by the parameter's identity."""
        self._find_freed()
        own = {key: each for key, each in self._storages.items() if key not in self._counted_elsewhere}
        keys = {parameter: storage_key(gradient) for parameter, gradient in gradients.items()}
        given = {
            parameter: (own[key].first, own[key].nbytes) for parameter, key in keys.items() if key in own
        }
        ranges: dict[UncapturedRange, int] = {}
        for key, storage in own.items():
            if storage.last != storage.first and key not in keys.values():
                live_range = UncapturedRange(storage.first, storage.last)
                ranges[live_range] = ranges.get(live_range, 0) + storage.nbytes
        for_good = [(UncapturedRange(first, None), nbytes) for first, nbytes in given.values()]

        def besides(point: UncapturedPoint, nbytes: int) -> int:
            """The part of `nbytes` live at a point that belongs to no range."""
            in_ranges = (n for live_range, n in (*ranges.items(), *for_good) if live_range.covers(point))
            return max(0, nbytes - sum(in_ranges))

        live = [0]
        most: dict[UncapturedPoint, int] = {}
        for point, key, is_made in self._events:
            nbytes = own[key].nbytes if key in own else 0
            live.append(live[-1] + (nbytes if is_made else -nbytes))
            if key in own:
                most[point] = max(most.get(point, 0), live[-1])
        calls: dict[UncapturedPoint, list[tuple[Call, int]]] = {}
        for event, point, call in self._calls:
            calls.setdefault(point, []).append((call, besides(point, live[event])))
        inside = {point: besides(point, nbytes) for point, nbytes in most.items()}
        busy = {point: nbytes for point, nbytes in inside.items() if nbytes > SMALL_BYTES}
        outputs = {
            point: live for point, live in self._live_outputs.items() if point in busy or point in calls
        }
        return UncapturedCode(ranges, busy, outputs, given, calls)

    def _note_call(self, func: Any, args: Any, kwargs: Any) -> None:
        """Record an op with the layouts of its tensors, without references to the tensors."""
        tensors = list(iter_tensors((args, kwargs)))
        if func.namespace != "aten" or func.is_view or not all(map(_has_bytes, tensors)):
            return  # an op of another library may do more than compute
        if not any(is_on(self.device, tensor) for tensor in tensors):
            return
        if sum(tensor.nbytes for tensor in tensors) <= SMALL_BYTES:
            return
        with self._fake:
            call = Call(func, *map_leaves(_like, (tuple(args), dict(kwargs))))
        known = self.point, signature(call)
        if known not in self._known_calls:
            self._known_calls.add(known)
            self._calls.append((len(self._events), self.point, call))

    def _find_freed(self) -> None:
        for key in [key for key, reference in self._live.items() if not _is_live(reference)]:
            self._free(key)

    def _free(self, key: int) -> None:
        self._gone.append(self._live.pop(key))
        self._storages[key].last = self.point
        self._events.append((self.point, key, False))

    def _note(self, tensor: torch.Tensor) -> None:
        key = storage_key(tensor)
        if key not in self._storages and key not in self._outputs and is_on(self.device, tensor):
            self._live[key] = _reference(tensor)
            self._storages[key] = _Storage(tensor.untyped_storage().nbytes(), self.point)
            self._events.append((self.point, key, True))


def _reference(tensor: torch.Tensor) -> dispatch.StorageWeakRef:
    return dispatch.StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]


def _is_live(reference: dispatch.StorageWeakRef) -> bool:
    return not reference.expired()  # type: ignore[no-untyped-call]


def _like(value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device)


def _has_bytes(tensor: torch.Tensor) -> bool:
    return tensor.layout is torch.strided and not dispatch.is_wrapper(tensor)


def hook_stand_in(*given: Any) -> None:
    """Runs in the place of a user's hook: takes as many bytes for a moment as the gradients that it gets."""
    for tensor in iter_tensors([value for value in given if not isinstance(value, nn.Module)]):
        torch.empty_like(tensor)


@contextlib.contextmanager
def unwatched() -> Iterator[None]:
    """Let torch work on a graph as if no watch were on."""
    is_watched = any(isinstance(mode, UncapturedWatch) for mode in dispatch.active_modes())
    with dispatch.without_modes() if is_watched else contextlib.nullcontext():
        yield


def bytes_saved_by_autograd(
    results: Iterable[torch.Tensor], known: Container[int], *, num_graphs: int, device: torch.device = CPU
) -> dict[int, int]:
    """Bytes that autograd's nodes behind `results` save on the step's `device`, by how many of the
    `num_graphs` graphs with a backward pass had run before; the storages `known` are left out.

    All bytes are under 0, as if live from the start, if `results` do not lead to all of these graphs.
    """
    nodes = _nodes(results)
    graphs = sorted(map(autograd_engine.creation_order, filter(aot_autograd.is_compiled_graph, nodes)))
    saved: dict[int, int] = {}
    seen: set[int] = set()
    for node in nodes:
        if aot_autograd.is_compiled_graph(node):
            continue
        before = bisect(graphs, autograd_engine.creation_order(node)) if len(graphs) == num_graphs else 0
        for tensor in iter_tensors(list(autograd_engine.saved_values(node))):
            key = storage_key(tensor)
            if key not in known and key not in seen and is_on(device, tensor):
                seen.add(key)
                saved[before] = saved.get(before, 0) + tensor.untyped_storage().nbytes()
    return saved


def leaves_behind(results: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """The tensors whose gradients a backward pass from `results` would keep."""
    return [node.variable for node in _nodes(results) if autograd_engine.is_leaf_node(node)]


def _nodes(results: Iterable[torch.Tensor]) -> list[Any]:
    """All of autograd's nodes behind these tensors, in the order in which they were made."""
    waiting: list[Any] = [tensor.grad_fn for tensor in results if tensor.grad_fn is not None]
    seen = set(waiting)
    while waiting:
        following = {node for node, _ in waiting.pop().next_functions if node is not None} - seen
        seen |= following
        waiting += following
    return sorted(seen, key=autograd_engine.creation_order)
