"""Peaks that disagree are told, with the op and the reason."""

import pytest
import torch
from torch import nn

from lowtide.verification.measure_step import peak_above_start, peak_and_op, train_step
from lowtide.verification.verdict import agreement_note, prediction_note

MIB = 1 << 20


@pytest.mark.parametrize(
    ("predicted", "words"), [(1000, ""), (1009, ""), (1016, "1.6% above"), (980, "2.0% below")]
)
def test_a_prediction_that_is_off_names_the_op(predicted: int, words: str) -> None:
    note = prediction_note("without the plan", predicted=predicted, measured=1000, op="aten::mm")
    assert bool(note) is bool(words)
    assert not note or (words in note and note.endswith("measured at aten::mm"))


@pytest.mark.parametrize(
    ("resident", "words"),
    [(None, ""), (101 * MIB, ""), (98 * MIB, ""), (103 * MIB, "does not count"), (97 * MIB, "never wrote")],
)
def test_two_measured_peaks_that_disagree(resident: int | None, words: str) -> None:
    note = agreement_note("with the plan", measured=100 * MIB, resident=resident)
    assert bool(note) is bool(words) and words in note


def test_small_steps_are_below_what_the_kernel_can_tell() -> None:
    assert not agreement_note("with the plan", measured=10_000, resident=900_000)


class Large(nn.Module):
    """Its largest moment is a product in the backward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 4096))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x @ self.weight).tanh().sum()


def test_the_op_at_the_peak_is_found() -> None:
    model, x = Large(), torch.randn(64, 8)
    train_step(model, x)
    peak_bytes, op = peak_and_op(lambda: train_step(model, x))
    assert peak_bytes == peak_above_start(lambda: train_step(model, x))
    assert op == "aten::tanh_backward in TanhBackward0"


def test_the_optimizer_is_named() -> None:
    model, x = nn.Linear(256, 256), torch.randn(2, 256)
    optimizer = torch.optim.Adam(model.parameters(), foreach=True)
    for _ in range(2):
        train_step(model, x, optimizer)
    assert peak_and_op(lambda: train_step(model, x, optimizer))[1].endswith("in Adam.step")
