"""Both ways to profile see the same step."""

import logging

import pytest
import torch
from trouble import TROUBLE

import lowtide
from lowtide.api import profile

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(
    "name",
    [
        "batch-norms",
        pytest.param("shared-module", marks=pytest.mark.long),
        pytest.param("tuple-output", marks=pytest.mark.long),
        "losses-inside",
    ],
)
def test_both_modes_agree_on_every_byte(name: str, caplog: pytest.LogCaptureFixture) -> None:
    torch.manual_seed(0)
    case = TROUBLE[name]
    model, batch = case.build(), case.batch()
    before = [tensor.clone() for tensor in (*model.parameters(), *model.buffers())]
    alone = profile(model, batch, loss=case.loss)
    with caplog.at_level(logging.WARNING, logger="lowtide"):
        state = torch.get_rng_state()
        whole = profile(model, batch, loss=case.loss, mode="run")
        assert torch.equal(state, torch.get_rng_state())
    assert "for real" in caplog.text
    assert whole.peak_bytes == alone.peak_bytes
    assert [node.makes for node in whole.nodes] == [node.makes for node in alone.nodes]
    assert [node.workspace_bytes for node in whole.nodes] == [node.workspace_bytes for node in alone.nodes]
    assert whole.step_seconds > 0
    after = (*model.parameters(), *model.buffers())
    assert all(torch.equal(one, other) for one, other in zip(before, after, strict=True))


def test_an_unknown_mode_is_refused() -> None:
    with pytest.raises(lowtide.LowtideError, match="ops, run"):
        profile(torch.nn.Linear(2, 2), torch.ones(1, 2), mode="fast")
