"""A loss that does not fit another batch is left out; one that fails for another reason is told of."""

import logging

import pytest
import torch
from torch import nn

from lowtide.trace.trace_model import trace

TARGETS = torch.zeros(5, 2)


@pytest.mark.parametrize(
    ("loss", "told"),
    [
        (lambda output: (output - TARGETS).square().mean(), []),
        (
            lambda output: output.no_such_thing,
            ["the loss cannot be captured for this batch (AttributeError"],
        ),
    ],
    ids=["targets of another batch", "an error of its own"],
)
def test_a_loss_that_fails_for_another_batch(loss, told, caplog):
    caplog.set_level(logging.WARNING, logger="lowtide")
    model = nn.Linear(3, 2)
    found = trace(model, (torch.randn(4, 3),), {}, loss=loss, any_loss=True)
    assert [record.message[: len(text)] for record, text in zip(caplog.records, told, strict=True)] == told
    assert found.num_in_model == len(found.executions) == 1, "no graph of the loss"
    assert all(f"{__file__}:" in record.message for record in caplog.records)
    assert found.given == {(0, 0)}, "and any output may get a gradient"
