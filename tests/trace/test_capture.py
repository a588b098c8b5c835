"""What can be captured as a training step: batches, losses, and what is counted."""

from collections import UserDict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from nets import ROWS, WIDTH, Net, rows
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from lowtide.analyze.captured_step import Captured, capture
from lowtide.facts import Kind, Region, Step
from lowtide.torch_compat.dispatch import FakeTensorMode


class Output(dict[str, Any]):
    """A mapping with attributes, as transformers returns it."""

    @property
    def loss(self) -> Any:
        return self["loss"]


def gradients(step: Step) -> list[int]:
    return sorted(s.nbytes for s in step.storages if s.kind is Kind.GRADIENT)


def backward_ops(captured: Captured) -> list[str]:
    return [node.op for node in captured.step.nodes if node.region is Region.BACKWARD]


@pytest.mark.parametrize(
    "batch",
    [
        rows(),
        (rows(),),
        [rows(), torch.tensor(2.0)],
        {"x": rows()},
        {"x": rows(), "scale": torch.tensor(2.0)},
        (rows(), 3.0),
    ],
    ids=["tensor", "tuple", "list", "dict", "dict of two", "number beside a tensor"],
)
def test_batches(batch: Any) -> None:
    step = capture(Net(), batch).step
    assert gradients(step) == [4 * WIDTH, 4 * WIDTH, 4 * WIDTH**2, 4 * WIDTH**2]
    inputs = [s for s in step.storages if s.kind is Kind.INPUT]
    tensors = [t for t in torch.utils._pytree.tree_leaves(batch) if isinstance(t, torch.Tensor)]
    assert sorted(s.nbytes for s in inputs) == sorted(t.nbytes for t in tensors)


@pytest.mark.parametrize(
    ("tail", "loss", "op"),
    [
        (lambda x: x, lambda out: F.mse_loss(out, torch.zeros(ROWS, WIDTH)), "mse_loss_backward"),
        (lambda x: Output(loss=F.l1_loss(x, x.detach() + 1), logits=x), None, "aten.sgn"),
        (lambda x: {"loss": F.softplus(x).mean(), "logits": x}, None, "softplus_backward"),
        (lambda x: F.huber_loss(x, torch.zeros_like(x)), None, "huber_loss_backward"),
        (lambda x: (x, x.argmax(1), torch.tanh(x)), None, "tanh_backward"),
    ],
    ids=["given", "attribute", "key", "scalar", "sum of the floating outputs"],
)
def test_losses(tail: Callable[..., Any], loss: Callable[..., Any] | None, op: str) -> None:
    found = backward_ops(capture(Net(tail), rows(), loss=loss))
    assert any(op in name for name in found), found


def test_logits_beside_a_loss_get_no_gradient() -> None:
    alone = capture(Net(lambda x: F.softplus(x).mean()), rows())
    beside = capture(Net(lambda x: {"loss": F.softplus(x).mean(), "logits": x}), rows())
    assert backward_ops(beside) == backward_ops(alone)
    assert beside.step.graphs[0].missing != ()


def test_checkpointing_by_the_model_itself_is_noted() -> None:
    step = capture(Net(tail=lambda x: checkpoint(torch.tanh, x, use_reentrant=False)), rows()).step
    assert len(step.notes) == 1 and "torch.utils.checkpoint" in step.notes[0]
    assert capture(Net(), rows()).step.notes == ()


def test_what_was_traced_before_does_not_change_a_graph() -> None:
    model, batch = nn.LSTM(WIDTH, WIDTH), torch.randn(3, ROWS, WIDTH)
    FakeTensorMode.cache_clear()
    first = capture(model, batch, loss=lambda output: output[0].sum()).step.fingerprint
    assert capture(model, batch, loss=lambda output: output[0].sum()).step.fingerprint == first


def test_a_batch_may_be_any_mapping() -> None:
    """Tokenizers give one that is no dict."""
    torch.manual_seed(0)
    model, x = Net(), rows()
    assert capture(model, UserDict({"x": x})).step == capture(model, {"x": x}).step


def test_parameters_in_one_storage_are_counted_once() -> None:
    model = Net()
    alone = capture(model, rows()).step.static_bytes
    flat = nn.utils.parameters_to_vector(model.parameters()).detach()
    start = 0
    for parameter in model.parameters():
        parameter.data = flat[start : start + parameter.numel()].view_as(parameter)
        start += parameter.numel()
    assert capture(model, rows()).step.static_bytes == alone


def test_what_a_hook_keeps_counts_as_held() -> None:
    model, kept = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 4)), []
    plain = capture(model, torch.randn(64, 8)).step
    model[1].register_forward_hook(lambda _module, _args, output: kept.append(output.detach()))
    step = capture(model, torch.randn(64, 8)).step
    pinned = [sum(s.nbytes for s in each.storages if s.pinned) for each in (plain, step)]
    assert pinned[1] - pinned[0] == 64 * 32 * 4
