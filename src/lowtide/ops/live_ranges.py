"""Live ranges of the storages in a graph of fake values: how many bytes are live at each op."""

import itertools
from collections.abc import Iterable, Sequence

import torch
from torch import fx

from lowtide.torch_compat.dispatch import iter_tensors, storage_key


def storages_of(node: fx.Node) -> dict[int, int]:
    """The storages of a node's fake value, by `storage_key`, with their bytes."""
    tensors = (t for t in iter_tensors(node.meta.get("val")) if t.layout is torch.strided)
    return {storage_key(tensor): int(tensor.untyped_storage().nbytes()) for tensor in tensors}


def live_bytes(
    ops: Sequence[fx.Node], *, uncounted: Iterable[fx.Node], results: Iterable[fx.Node] = ()
) -> list[int]:
    """The bytes that are live while each of `ops` runs, in this order, each storage once.

    A storage is live from the op that makes it to its last reader. A storage that no op makes is live from
    the first op on, a storage of `results` to the end. Storages of the nodes `uncounted` are left out.
    """
    sizes: dict[int, int] = {}
    first: dict[int, int] = {}
    last: dict[int, int] = {}
    for place, node in enumerate(ops):
        for source in node.all_input_nodes:
            for key, nbytes in storages_of(source).items():
                sizes[key], last[key] = nbytes, place
                first.setdefault(key, 0)
        for key, nbytes in storages_of(node).items():
            sizes[key] = nbytes
            first.setdefault(key, place)
            last.setdefault(key, place)
    last.update((key, len(ops) - 1) for node in results for key in storages_of(node) if key in last)
    for key in {key for node in uncounted for key in storages_of(node)}:
        sizes.pop(key, None)
    change = [0] * (len(ops) + 1)
    for key, nbytes in sizes.items():
        change[first[key]] += nbytes
        change[last[key] + 1] -= nbytes
    return list(itertools.accumulate(change))[:-1]
