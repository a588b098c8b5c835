"""How recurrent layers of cells are traced: one op of `recurrent_cells` for each layer, with eager's dropout
between them, in place of torch's decompositions."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from lowtide.ops.recurrent import eager_runs_whole
from lowtide.ops.recurrent_cells import GRU_CELL, KINDS, Tensors, recurrent_cells
from lowtide.torch_compat import hooks

aten = torch.ops.aten


def cells_of(kind: str, torchs: Callable[..., Any]) -> Callable[..., Any]:
    """How to trace eager's op of `kind` for padded sequences; `torchs` is how torch does."""

    def trace(  # noqa: PLR0917 - torch calls it so
        value: torch.Tensor,
        hidden: Any,
        params: Any,
        has_biases: bool,
        num_layers: int,
        dropout: float,
        train: bool,
        bidirectional: bool,
        batch_first: bool,
    ) -> tuple[torch.Tensor, ...]:
        whole = kind == "lstm" and eager_runs_whole(value, hidden, [params])
        if whole or value.device.type != "cpu":
            options = (has_biases, num_layers, dropout, train, bidirectional, batch_first)
            results: tuple[torch.Tensor, ...] = torchs(value, hidden, params, *options)
            return results
        value = value.transpose(0, 1) if batch_first else value
        rate = dropout if train else 0.0
        output, *states = _layers(
            kind, value, None, hidden, params, has_biases, num_layers, rate, bidirectional
        )
        return output.transpose(0, 1) if batch_first else output, *states

    return trace


def packed_cells_of(kind: str, torchs: Callable[..., Any]) -> Callable[..., Any]:
    """The same for packed sequences."""

    def trace(  # noqa: PLR0917 - torch calls it so
        value: torch.Tensor,
        batch_sizes: torch.Tensor,
        hidden: Any,
        params: Any,
        has_biases: bool,
        num_layers: int,
        dropout: float,
        train: bool,
        bidirectional: bool,
    ) -> tuple[torch.Tensor, ...]:
        if value.device.type != "cpu":
            options = (has_biases, num_layers, dropout, train, bidirectional)
            results: tuple[torch.Tensor, ...] = torchs(value, batch_sizes, hidden, params, *options)
            return results
        rate = dropout if train else 0.0
        return _layers(kind, value, batch_sizes, hidden, params, has_biases, num_layers, rate, bidirectional)

    return trace


def cell_of(torchs: Callable[..., Any]) -> Callable[..., Any]:
    """How to trace a single cell of a GRU; `torchs` is how torch does."""

    def trace(  # noqa: PLR0917 - torch calls it so
        value: torch.Tensor,
        hidden: torch.Tensor,
        input_weight: torch.Tensor,
        hidden_weight: torch.Tensor,
        input_bias: torch.Tensor | None = None,
        hidden_bias: torch.Tensor | None = None,
    ) -> torch.Tensor:
        biases = [bias for bias in (input_bias, hidden_bias) if bias is not None]
        weights = [input_weight, hidden_weight, *biases]
        if value.device.type != "cpu" or len(biases) == 1:
            result: torch.Tensor = torchs(value, hidden, *weights)
            return result
        cell = recurrent_cells(GRU_CELL, value, None, [hidden], weights, bool(biases), False, _autocast())
        made: torch.Tensor = cell[0]
        return made

    return trace


def recurrent_rules() -> dict[hooks.OpOverload[..., Any], Callable[[Callable[..., Any]], Callable[..., Any]]]:
    """For each of eager's ops, from torch's way to trace it to ours."""
    padded = {ops[0]: partial(cells_of, kind) for kind, ops in KINDS.items()}
    packed = {ops[1]: partial(packed_cells_of, kind) for kind, ops in KINDS.items()}
    return {**padded, **packed, aten.gru_cell.default: cell_of}


def _layers(  # noqa: PLR0917
    kind: str,
    value: torch.Tensor,
    batch_sizes: torch.Tensor | None,
    hidden: Any,
    params: Any,
    has_biases: bool,
    num_layers: int,
    dropout: float,
    bidirectional: bool,
) -> tuple[torch.Tensor, ...]:
    """All layers, one op each, with the dropout between them."""
    directions = 2 if bidirectional else 1
    per_layer = len(params) // num_layers
    states = list(hidden) if kind == "lstm" else [hidden]
    ends: list[Tensors] = []
    for layer in range(num_layers):
        own = [state.narrow(0, layer * directions, directions) for state in states]
        weights = list(params[layer * per_layer : (layer + 1) * per_layer])
        value, *last, _ = recurrent_cells(
            kind, value, batch_sizes, own, weights, has_biases, bidirectional, _autocast()
        )
        ends.append(last)
        if dropout and layer < num_layers - 1:
            value = torch.dropout(value, dropout, train=True)
    joined = [each[0] if num_layers == 1 else torch.cat(each) for each in zip(*ends, strict=True)]
    return value, *joined


def _autocast() -> torch.dtype | None:
    return torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else None
