"""Eager's recurrent layers in one call, and the layouts of their results, from tiny layers on the device."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lowtide.ops.recurrent_cells import GRU_CELL, KINDS
from lowtide.torch_compat import dispatch

aten = torch.ops.aten

STEPS, BATCH, WIDTH, PROJECTED = 2, 3, 4, 2
"""Sizes of tiny layers; all differ, so that the strides of a result tell its memory order."""


def casting(device: torch.device, dtype: torch.dtype | None) -> torch.autocast:
    return torch.autocast(device.type, dtype=dtype, enabled=dtype is not None)


def run_stack(  # noqa: PLR0917 - what an op of eager takes
    kind: str,
    value: Tensor,
    batch_sizes: Tensor | None,
    hidden: list[Tensor],
    weights: list[Tensor],
    options: tuple[Any, ...],
) -> list[Tensor]:
    """Eager's own layers: their result and last states."""
    if kind == GRU_CELL:
        return [aten.gru_cell(value, hidden[0], *weights)]
    padded, packed = KINDS[kind]
    states = hidden if kind == "lstm" else hidden[0]
    if batch_sizes is None:
        return list(padded(value, states, weights, *options))
    return list(packed(value, batch_sizes, states, weights, *options[:-1]))


@dataclass(frozen=True, kw_only=True)
class TinyLayers:
    """A call of recurrent layers, without its sizes. `dtypes` are those of input, states and weights."""

    kind: str
    device: str
    dtypes: tuple[torch.dtype, ...]
    has_biases: bool
    num_layers: int
    train: bool
    bidirectional: bool
    batch_first: bool
    packed: bool
    projects: bool
    autocast: torch.dtype | None

    @property
    def shapes(self) -> list[tuple[int, ...]]:
        """The shapes of input, states and weights."""
        outer = PROJECTED if self.projects else WIDTH
        directions = 2 if self.bidirectional else 1
        shapes: list[tuple[int, ...]] = [(BATCH, WIDTH), (BATCH, WIDTH)]
        if self.kind != GRU_CELL:
            value = (BATCH, STEPS, WIDTH) if self.batch_first else (STEPS, BATCH, WIDTH)
            states = [outer, WIDTH] if self.kind == "lstm" else [WIDTH]
            shapes = [(STEPS * BATCH, WIDTH) if self.packed else value]
            shapes += [(self.num_layers * directions, BATCH, width) for width in states]
        gates = {"gru": 3, GRU_CELL: 3, "lstm": 4}.get(self.kind, 1) * WIDTH
        for layer in range(self.num_layers):
            width = outer * directions if layer else WIDTH
            one: list[tuple[int, ...]] = [(gates, width), (gates, outer)]
            one += [(gates,), (gates,)] if self.has_biases else []
            one += [(outer, WIDTH)] if self.projects else []
            shapes += one * directions
        return shapes


def result_layouts(layers: TinyLayers) -> list[tuple[torch.dtype, tuple[int, ...]]]:
    """Dtype and memory order (dimensions, outermost first) of each result, from a real run."""
    device = torch.device(layers.device)
    states = 2 if layers.kind == "lstm" else 1
    options = (layers.has_biases, layers.num_layers, 0.0, layers.train, layers.bidirectional)
    with dispatch.real_tensors(), casting(device, layers.autocast):
        value, *rest = [
            torch.zeros(shape, dtype=dtype, device=device)
            for shape, dtype in zip(layers.shapes, layers.dtypes, strict=True)
        ]
        sizes = torch.full((STEPS,), BATCH) if layers.packed else None
        results = run_stack(
            layers.kind, value, sizes, rest[:states], rest[states:], (*options, layers.batch_first)
        )
    return [(result.dtype, _memory_order(result)) for result in results]


def _memory_order(tensor: Tensor) -> tuple[int, ...]:
    strides = tensor.stride()
    return tuple(sorted(range(tensor.dim()), key=lambda dim: (-strides[dim], dim)))
