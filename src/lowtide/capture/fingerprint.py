"""Tell graphs apart: the same model, shapes and torch give the same fingerprint."""

import hashlib
import operator
from collections.abc import Iterable
from typing import Any

import torch
from torch import fx

from lowtide.torchside.calls import target_name


def structure(graph: fx.GraphModule) -> str:
    """A short hash of a graph's ops and of which values each reads, whatever their shapes and numbers."""
    index = {node: position for position, node in enumerate(graph.graph.nodes)}
    digest = hashlib.sha256()
    for node in graph.graph.nodes:
        reads = " ".join(str(index[source]) for source in node.all_input_nodes)
        part = node.args[1] if node.target is operator.getitem else ""
        target = "" if node.op == "placeholder" else target_name(node.target)
        digest.update(f"{node.op} {target} {part} {reads}\n".encode())
    return digest.hexdigest()[:16]


def fingerprint(graph: fx.GraphModule, num_forward_outputs: int | None, weights: Iterable[str]) -> str:
    """A short hash of a graph's ops, their order, arguments and the shapes they make, and of the names of
    the parameters and buffers that it reads: equal blocks of one model are told apart.
    """
    index = {node: position for position, node in enumerate(graph.graph.nodes)}

    def plain(value: Any) -> str:
        if isinstance(value, fx.Node):
            return f"%{index[value]}"
        if isinstance(value, (list, tuple)):
            return "[" + ",".join(plain(item) for item in value) + "]"
        if isinstance(value, dict):
            return "{" + ",".join(f"{key}:{plain(value[key])}" for key in sorted(value)) + "}"
        return target_name(value) if callable(value) else repr(value)

    def made(value: Any) -> str:
        if isinstance(value, torch.Tensor):
            return f"{value.dtype}{tuple(value.shape)}{tuple(value.stride())}{value.device}"
        if isinstance(value, (list, tuple)):
            return ",".join(made(item) for item in value)
        return ""

    digest = hashlib.sha256(f"{torch.__version__}|{num_forward_outputs}|{' '.join(weights)}".encode())
    for node in graph.graph.nodes:
        inputs = f"{plain(node.args)} {plain(node.kwargs)}"
        line = f"{node.op} {target_name(node.target)} {inputs} {made(node.meta.get('val'))}\n"
        digest.update(line.encode())
    return digest.hexdigest()[:16]
