"""Collectives, by which processes exchange values inside of a graph: storages of results, and workspaces."""

from functools import partial
from typing import Any

import torch
from torch import fx

from lowtide.ops.calls import Call
from lowtide.ops.schema import bound_arguments, short_name
from lowtide.torch_compat.dispatch import iter_tensors, map_leaves, storage_key
from lowtide.torch_compat.fsdp2 import WAIT, copies_in_group


def share_awaited(graph: fx.Graph) -> None:
    """A pass: let a value that is waited for share the storage of the collective's result, in place.

        all_reduce ── wait_tensor ── view        one storage, as where the step runs; on fake values, two

    Preserves all results: only the fake values change.
    """
    for wait in graph.nodes:
        source = wait.args[0] if wait.target is WAIT else None
        if not isinstance(source, fx.Node):
            continue
        same = partial(_in_storage, of=source.meta["val"], instead=storage_key(wait.meta["val"]))
        for node in (wait, *_after(wait)):
            node.meta["val"] = map_leaves(same, node.meta.get("val"))


def _in_storage(value: Any, *, of: torch.Tensor, instead: int) -> Any:
    """A fake value in the storage `of` another, if it is in the storage `instead` now."""
    if not isinstance(value, torch.Tensor) or storage_key(value) != instead or value.dtype != of.dtype:
        return value
    return of.as_strided(value.shape, value.stride(), value.storage_offset())


def _after(wait: fx.Node) -> list[fx.Node]:
    """The views of an awaited value, and what else reads it, and so on."""
    found: dict[fx.Node, None] = {}
    waiting = list(wait.users)
    while waiting:
        node = waiting.pop()
        if node.op != "output" and node not in found:
            found[node] = None
            waiting += node.users
    return list(found)


def inside_bytes(call: Call) -> int:
    """The bytes that a collective needs besides its arguments and its result: gloo copies what it gathers,
    and what it reduces and scatters."""
    name = short_name(call.target)
    if not name.startswith(("all_gather", "reduce_scatter")):
        return 0
    arguments = bound_arguments(call)[1]
    copies = copies_in_group(arguments["group_name"])
    given_bytes = sum(tensor.nbytes for tensor in iter_tensors(list(call.args)))
    if name.startswith("reduce_scatter"):
        return copies.reduce * given_bytes
    return copies.gather * given_bytes * int(arguments["group_size"])
