"""Ways to train: batches of other sizes, lengths and masks than the one that was planned for."""

import itertools
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn

from .case import STEPS, Training, Values, step
from .net import LENGTH, ROW_BYTES, ROWS, SENTENCES, WIDTH, training_of


def _sizes(training: Training, *, sizes: tuple[int, ...]) -> Values:
    for size in sizes:
        yield from step(training, torch.randn(size, WIDTH))


def _lengths(training: Training) -> Values:
    for length in (LENGTH, LENGTH - 2, LENGTH, LENGTH - 1):
        yield from step(training, torch.randn(SENTENCES, length, WIDTH))


class Sequences(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.TransformerEncoderLayer(WIDTH, 4, 48, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.mix(x)
        return result


class Masked(Sequences):
    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        padding = None if mask.all() else mask == 0
        result: torch.Tensor = self.mix(x, src_key_padding_mask=padding)
        return result


def _masks(training: Training) -> Values:
    x, mask = training.batch
    padded = mask.clone()
    padded[:, -2:] = 0
    for each in (mask, padded, mask):
        yield from step(training, (x, each))


def _loader(training: Training) -> Values:
    data = torch.utils.data.TensorDataset(torch.randn(2 * ROWS + ROWS // 2, WIDTH))
    for (rows,) in torch.utils.data.DataLoader(data, batch_size=ROWS, shuffle=True):
        yield from step(training, rows)


def _infinite(training: Training) -> Values:
    for rows in itertools.islice(iter(lambda: torch.randn(ROWS, WIDTH), None), STEPS):
        yield from step(training, rows)


def _square(output: Any) -> torch.Tensor:
    value: torch.Tensor = output.square().mean()
    return value


BATCHES: dict[str, Callable[[], Training]] = {
    "smaller-last-batch": partial(
        training_of, partial(_sizes, sizes=(ROWS, ROWS, 5)), loop_bytes=ROWS * ROW_BYTES
    ),
    "larger-batch": partial(
        training_of, partial(_sizes, sizes=(ROWS, ROWS + 4)), loop_bytes=ROWS * ROW_BYTES
    ),
    "changing-lengths": partial(
        training_of,
        _lengths,
        model=Sequences,
        loss=_square,
        batch=lambda: torch.randn(SENTENCES, LENGTH, WIDTH),
        loop_bytes=SENTENCES * LENGTH * ROW_BYTES,
    ),
    "changing-masks": partial(
        training_of,
        _masks,
        model=Masked,
        loss=_square,
        batch=lambda: (
            torch.randn(SENTENCES, LENGTH, WIDTH),
            torch.ones(SENTENCES, LENGTH, dtype=torch.long),
        ),
    ),
    "data-loader": partial(training_of, _loader, loop_bytes=(3 * ROWS + ROWS // 2) * ROW_BYTES),
    "endless-batches": partial(training_of, _infinite, loop_bytes=ROWS * ROW_BYTES),
}
