"""What autograd holds of code that runs between the captured graphs: hooks, packed sequences, functions of
other libraries."""

from collections.abc import Container, Iterable, Iterator
from typing import Any

import torch

from lowtide.torchside.calls import iter_tensors, storage_key

SAVED = "_saved_"
"""How autograd's own nodes name what they hold; those of a `torch.autograd.Function` have `saved_tensors`."""


def held_outside(results: Iterable[torch.Tensor], known: Container[int]) -> dict[int, int]:
    """Bytes, by storage, of what autograd's nodes behind `results` hold; compiled graphs and the storages
    `known` are left out."""
    held: dict[int, int] = {}
    waiting = [tensor.grad_fn for tensor in results if tensor.grad_fn is not None]
    seen = set(waiting)
    while waiting:
        node = waiting.pop()
        if not _is_compiled(node):
            for tensor in _saved(node):
                if storage_key(tensor) not in known:
                    held[storage_key(tensor)] = tensor.untyped_storage().nbytes()
        following = {behind for behind, _ in node.next_functions if behind is not None} - seen
        seen |= following
        waiting += following
    return held


def _is_compiled(node: Any) -> bool:
    return "CompiledFunction" in type(node).__name__


def _saved(node: Any) -> Iterator[torch.Tensor]:
    names = [name for name in dir(node) if name.startswith(SAVED) or name == "saved_tensors"]
    for name in names:
        try:
            yield from iter_tensors(getattr(node, name))
        except RuntimeError:
            continue  # already freed, or changed in place since
