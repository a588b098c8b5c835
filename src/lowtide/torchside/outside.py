"""What autograd holds of code that runs between the captured graphs: hooks, packed sequences, functions of
other libraries."""

from bisect import bisect
from collections.abc import Container, Iterable, Iterator
from typing import Any

import torch

from lowtide.torchside import hooks
from lowtide.torchside.calls import iter_tensors, storage_key

SAVED = "_saved_"
"""How autograd's own nodes name what they hold; those of a `torch.autograd.Function` have `saved_tensors`."""


def held_outside(
    results: Iterable[torch.Tensor], known: Container[int], *, num_graphs: int
) -> dict[int, int]:
    """Bytes of what autograd's nodes behind `results` hold, by how many of the `num_graphs` graphs with a
    backward pass had run before; the storages `known` are left out.

    All is under 0, as if it were there from the start, where some of these graphs cannot be seen from there.
    """
    nodes = _nodes(results)
    graphs = sorted(hooks.order_of(node) for node in nodes if _is_compiled(node))
    held: dict[int, int] = {}
    seen: set[int] = set()
    for node in nodes:
        if _is_compiled(node):
            continue
        before = bisect(graphs, hooks.order_of(node)) if len(graphs) == num_graphs else 0
        for tensor in _saved(node):
            key = storage_key(tensor)
            if key not in known and key not in seen:
                seen.add(key)
                held[before] = held.get(before, 0) + tensor.untyped_storage().nbytes()
    return held


def leaves_behind(results: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """The tensors whose gradients a backward pass from `results` would keep."""
    return [node.variable for node in _nodes(results) if type(node).__name__ == "AccumulateGrad"]


def _nodes(results: Iterable[torch.Tensor]) -> list[Any]:
    """All of autograd's nodes behind these tensors, those that were made first in front."""
    waiting: list[Any] = [tensor.grad_fn for tensor in results if tensor.grad_fn is not None]
    seen = set(waiting)
    while waiting:
        following = {node for node, _ in waiting.pop().next_functions if node is not None} - seen
        seen |= following
        waiting += following
    return sorted(seen, key=hooks.order_of)


def _is_compiled(node: Any) -> bool:
    return "CompiledFunction" in type(node).__name__


def _saved(node: Any) -> Iterator[torch.Tensor]:
    names = [name for name in dir(node) if name.startswith(SAVED) or name == "saved_tensors"]
    for name in names:
        try:
            yield from iter_tensors(getattr(node, name))
        except RuntimeError:
            continue  # already freed, or changed in place since
