"""What a step was captured from, in words that can be compared and shown."""

import hashlib
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from lowtide.capture.graphs import name_tensors
from lowtide.facts import Kind


def identify(model: nn.Module, batch: Any) -> tuple[tuple[str, str], ...]:
    """torch's version, the model's class and parameters, and the layout of the batch."""
    return (*identify_model(model), ("batch", _layouts(batch)))


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


def _layouts(batch: Any) -> str:
    parts = []
    for key, origin in name_tensors(nn.Module(), batch).items():
        tensor = next(t for t in _tensors(batch) if id(t) == key)
        assert origin.kind is Kind.INPUT
        shape = "x".join(map(str, tensor.shape))
        parts.append(f"{origin.name} {str(tensor.dtype).removeprefix('torch.')}[{shape}]")
    return ", ".join(parts)


def _tensors(batch: Any) -> list[torch.Tensor]:
    leaves = pytree.tree_leaves(batch)
    return [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
