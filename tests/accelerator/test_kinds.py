"""What torch names after a kind of device: lowtide asks for the accelerator's own name."""

import pytest
import torch
from accelerator_cases import mlp, on

import lowtide
from lowtide.ops.random_ops import COMPOSED
from lowtide.torch_compat import dynamo_paths


def test_a_used_gradient_moves_by_the_devices_own_method(device: torch.device) -> None:
    target = on(mlp(), device)
    assert target.optimizer is not None
    lowtide.checkpoint(
        target.model,
        target.batch,
        budget="90%",
        optimizer=target.optimizer,
        loss=target.loss,
        step_in_backward=True,
    )
    target.loss(target.model(*target.batch)).backward()
    target.optimizer.step()
    target.model.cpu()
    getattr(target.model, device.type)()
    assert all(p.grad is None or p.grad.device == p.device for p in target.model.parameters())


def test_questions_about_graph_capture_are_those_of_the_device(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    def ask() -> bool:
        return False

    monkeypatch.setattr(torch.get_device_module(device), "is_current_stream_capturing", ask, raising=False)
    assert ask in dynamo_paths._asks_for_capture()


def test_dropout_is_one_op_where_it_is_not_composed(device: torch.device) -> None:
    for kind in ("cpu", device.type):
        drawn = torch.dropout(torch.ones(4, device=kind, requires_grad=True), 0.5, True)
        assert ("NativeDropout" in drawn.grad_fn.name()) == (kind not in COMPOSED)
