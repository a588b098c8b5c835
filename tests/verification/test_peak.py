"""Peaks that disagree are told, with the op and the reason."""

import pytest
import torch
from torch import nn

from lowtide.verification.measure_step import peak_above_start, peak_and_op, train_step
from lowtide.verification.verdict import agreement_notes, prediction_note

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
    notes = agreement_notes([("with the plan", 100 * MIB, resident)])
    assert len(notes) == bool(words) and all(words in note for note in notes)


def test_two_steps_that_disagree_in_the_same_way_are_one_line() -> None:
    rows = [("without the plan", 67 * MIB, 62 * MIB), ("with the plan", 40 * MIB, 34 * MIB)]
    (note,) = agreement_notes(rows)
    assert "peaks without the plan and with the plan disagree" in note
    assert "torch counts 67.0 MiB and 40.0 MiB, the kernel 62.0 MiB and 34.0 MiB (" in note
    assert len(agreement_notes([rows[0], ("with the plan", 40 * MIB, 45 * MIB)])) == 2


def test_small_steps_are_below_what_the_kernel_can_tell() -> None:
    assert not agreement_notes([("with the plan", 10_000, 900_000)])


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
