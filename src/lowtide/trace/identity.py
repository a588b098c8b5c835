"""What a step was captured from, in words that can be compared and shown."""

import hashlib
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from lowtide.facts import Graph, Kind
from lowtide.trace.segments import Segment, name_tensors
from lowtide.trace.split import tangent_outputs


def identify(model: nn.Module, batch: Any) -> tuple[tuple[str, str], ...]:
    """torch's version, the model's class and parameters, and the layout of the batch."""
    return (*identify_model(model), ("batch", layouts(batch)))


def identify_model(model: nn.Module) -> tuple[tuple[str, str], ...]:
    """The part of the identity that does not depend on a batch."""
    digest = hashlib.sha256()
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        digest.update(f"{name} {tensor.dtype}{tuple(tensor.shape)} {tensor.requires_grad}\n".encode())
    count = sum(parameter.numel() for parameter in model.parameters())
    return (
        ("torch", torch.__version__),
        ("model", f"{type(model).__module__}.{type(model).__qualname__}"),
        ("parameters", f"{count} in {digest.hexdigest()[:12]}"),
    )


def identify_inputs(segment: Segment) -> tuple[str, ...]:
    """What a graph reads of the batch, each with its layout, in its order."""
    tangents = tangent_outputs(segment.joint)
    primals = [node for node in segment.joint.graph.find_nodes(op="placeholder") if node not in tangents]
    return tuple(
        _layout(origin.name, node.meta["val"])
        for node, origin in zip(primals, segment.origins, strict=False)
        if origin.kind is Kind.INPUT and isinstance(node.meta.get("val"), torch.Tensor)
    )


def layouts(batch: Any) -> str:
    """What a batch consists of, each with its layout."""
    tensors = {id(leaf): leaf for leaf in pytree.tree_leaves(batch) if isinstance(leaf, torch.Tensor)}
    origins = name_tensors(nn.Module(), batch)
    return ", ".join(_layout(origin.name, tensors[key]) for key, origin in origins.items())


def _layout(name: str, tensor: torch.Tensor) -> str:
    """`input_ids int64[4x128]`"""
    shape = "x".join(map(str, tensor.shape))
    return f"{name} {str(tensor.dtype).removeprefix('torch.')}[{shape}]"


def why_unknown(segment: Segment, planned: Sequence[Graph]) -> str:
    """Why a graph is none of the planned ones, as far as its inputs tell."""
    now = identify_inputs(segment)
    alike = [graph.inputs for graph in planned if len(graph.inputs) == len(now)]
    if now in alike:
        return (
            "its inputs are as planned, so the model took another path through its code, or runs in another "
            "setting, such as autocast"
        )
    if not alike:
        return f"it reads {len(now)} inputs of the batch"
    new, old = next(pair for pair in zip(now, alike[0], strict=True) if pair[0] != pair[1])
    return f"its input {new} was planned as {old}"
