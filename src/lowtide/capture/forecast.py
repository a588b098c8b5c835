"""How many bytes a graph holds at once when it runs, from its fake values alone."""

import torch
from torch import fx
from torch.utils import _pytree as pytree

from lowtide.torchside.calls import storage_key


def peak_bytes(graph: fx.Graph) -> int:
    """Largest sum of living storages, inputs left out: they are there anyway."""
    last_use = {source: node for node in graph.nodes for source in node.all_input_nodes}
    dying: dict[fx.Node, list[fx.Node]] = {}
    for source, node in last_use.items():
        dying.setdefault(node, []).append(source)
    holders: dict[int, int] = {}
    sizes: dict[int, int] = {}
    inputs: set[int] = set()
    live = peak = 0
    for node in graph.nodes:
        storages = _storages(node)
        if node.op in ("placeholder", "get_attr"):
            inputs.update(storages)
            continue
        for key, nbytes in storages.items():
            if key not in inputs and not holders.get(key):
                sizes[key] = nbytes
                live += nbytes
            holders[key] = holders.get(key, 0) + 1
        peak = max(peak, live)
        for gone in [*dying.get(node, ()), *([] if node in last_use else [node])]:
            if gone.op in ("placeholder", "get_attr"):
                continue
            for key in _storages(gone):
                holders[key] -= 1
                if key not in inputs and not holders[key]:
                    live -= sizes[key]
    return peak


def _storages(node: fx.Node) -> dict[int, int]:
    tensors = [leaf for leaf in pytree.tree_leaves(node.meta.get("val")) if isinstance(leaf, torch.Tensor)]
    return {storage_key(tensor): int(tensor.untyped_storage().nbytes()) for tensor in tensors}
