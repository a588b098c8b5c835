"""What cannot be captured is refused in one line that says why, and where in the user's code."""

import inspect
import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from nets import ROWS, WIDTH, Net, rows
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from lowtide.analyze.captured_step import capture
from lowtide.errors import CaptureError


@pytest.mark.parametrize(
    ("model", "batch", "loss", "words"),
    [
        (Net().eval(), rows(), None, r"eval mode: call model.train\(\)"),
        (Net(), "text", None, "the batch is a str: give a tensor, a tuple"),
        (Net(), None, None, "the batch is a NoneType"),
        (Net(lambda x: x.detach()), rows(), None, "does not depend on any parameter"),
        (Net(), rows(), lambda out: torch.zeros(()), "does not depend on any parameter"),
        (Net(), rows(), lambda out: 1.0, "does not depend on any parameter"),
        (Net(), rows(), lambda out: out * 2, r"shape \(10, 6\), not one element"),
        (Net().requires_grad_(False), rows(), None, "does not depend on any parameter"),
        (Net(lambda x: x.argmax(1)), rows(), None, "no floating tensor: pass `loss=`"),
        (Net(lambda x: torch.autograd.grad(x.sum(), x)[0]), rows(), None, "differentiates inside"),
    ],
)
def test_what_is_refused(model: nn.Module, batch: Any, loss: Any, words: str) -> None:
    with pytest.raises(CaptureError, match=words) as caught:
        capture(model, batch, loss=loss)
    assert "\n" not in str(caught.value)


def _raises(x: torch.Tensor) -> torch.Tensor:
    raise ValueError("my own trouble\nand more of it")


def _misses(x: torch.Tensor) -> torch.Tensor:
    return x.no_such_thing + 1  # type: ignore[attr-defined]


def _does_not_fit(x: torch.Tensor) -> torch.Tensor:
    return x @ torch.ones(3, 3)


def _breaks_then_raises(x: torch.Tensor) -> torch.Tensor:
    torch._dynamo.graph_break()
    raise KeyError("late")


@pytest.mark.parametrize(
    ("function", "kind", "message"),
    [
        (_raises, ValueError, "ValueError at .*: my own trouble"),
        (_misses, AttributeError, "no_such_thing"),
        (_does_not_fit, RuntimeError, r"10(x|, )6\W.*\W3(x|, )3"),
        (_breaks_then_raises, KeyError, "late"),
    ],
)
@pytest.mark.parametrize("where", ["model", "loss"])
def test_the_users_own_error(
    function: Callable[..., Any], kind: type, message: str, where: str, caplog: Any, capfd: Any
) -> None:
    model = Net(function) if where == "model" else Net()
    with pytest.raises(CaptureError, match=f"the {where} cannot be captured.*{message}") as caught:
        capture(model, rows(), loss=function if where == "loss" else None)
    assert type(caught.value.__cause__) is kind
    first_line = function.__code__.co_firstlineno
    assert any(f"{__file__}:{first_line + line}: " in str(caught.value) for line in (1, 2)), caught.value
    assert "\n" not in str(caught.value) and "FakeTensor" not in str(caught.value)
    assert capfd.readouterr() == ("", "")


@torch._dynamo.disable
def _disabled(self: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return self.first(x)


def test_a_model_that_torch_skips_whole() -> None:
    class Skipped(Net):
        forward = _disabled

    with pytest.raises(CaptureError, match=r"nothing of this model could be captured"):
        capture(Skipped(), rows())


def test_a_graph_break_inside_a_loop_is_followed() -> None:
    class Loop(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU()) for _ in range(2))
            self.layers[0].register_full_backward_hook(lambda module, grad_in, grad_out: None)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer in self.layers:
                x = layer(x)
            return x

    captured = capture(Loop(), rows())
    assert sum(graph.in_model for graph in captured.step.graphs) == 2, "with the hook, and without"


def test_a_loop_that_goes_on_after_a_graph_may_ask_for_identities() -> None:
    class Layer(nn.Linear):
        def chunk(self, x: torch.Tensor) -> torch.Tensor:
            return F.linear(x, self.weight, self.bias)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            assert len(inspect.signature(self.chunk).parameters) == 1  # which compares identities
            torch._dynamo.graph_break()
            return self.chunk(x)

    class Loop(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(Layer(WIDTH, WIDTH) for _ in range(3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for _, layer in enumerate(self.layers):
                x = layer(x)
            return x

    captured = capture(Loop(), rows())
    assert sum(graph.in_model for graph in captured.step.graphs) == 3


def test_sparse_gradients_are_refused() -> None:
    model = nn.Sequential(nn.Embedding(WIDTH, WIDTH, sparse=True), nn.Linear(WIDTH, WIDTH))
    with pytest.raises(CaptureError, match=r"layout torch.sparse_coo, and only dense"):
        capture(model, torch.randint(0, WIDTH, (ROWS,)))


class _Restarts(nn.Module):
    """Cuts autograd's graph, and goes on from a leaf of its own; `last` is behind the cut."""

    def __init__(self, *, last: bool) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH) if last else nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.first(x).detach().requires_grad_()).sum()


def test_a_loss_that_ends_in_tensors_of_the_forward_pass() -> None:
    with pytest.raises(CaptureError, match="the loss of _Restarts does not depend on any parameter"):
        capture(_Restarts(last=False), rows())


LATENT = nn.Parameter(torch.ones(WIDTH))


@pytest.mark.parametrize(
    ("model", "batch", "loss"),
    [
        (_Restarts(last=True), rows(), None),
        (Net().requires_grad_(False), rows().requires_grad_(), None),
        (Net(lambda x: x + LATENT).requires_grad_(False), rows(), None),
        (Net(lambda x: x.detach()), rows(), lambda out: (out * LATENT).sum()),
    ],
    ids=["behind a cut", "the input", "a latent in a variable", "of the loss"],
)
def test_a_loss_that_reaches_something_to_train_is_not_refused(
    model: nn.Module, batch: Any, loss: Any
) -> None:
    assert capture(model, batch, loss=loss).step.nodes


class _Checkpointed(nn.Module):
    """A block that breaks into graphs, inside of torch's checkpoint."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(self._block, x, use_reentrant=False).sum()

    def _block(self, x: torch.Tensor) -> torch.Tensor:
        torch._dynamo.graph_break()
        return self.first(x).relu()


def _reads_a_number(x: torch.Tensor) -> torch.Tensor:
    return x * x.sum().item()


@pytest.mark.parametrize(
    ("model", "words"),
    [
        (_Checkpointed(), "a checkpointed block"),
        (Net(_reads_a_number), "a number is read from a tensor, at /"),
    ],
)
def test_torchs_words_about_fake_tensors_are_for_the_log(
    model: nn.Module, words: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.DEBUG, logger="lowtide"):
        capture(model, rows())
    said = {record.levelno: record.getMessage() for record in reversed(caplog.records)}
    assert words in said[logging.WARNING]
    assert "FakeTensor" not in said[logging.WARNING] and "Exception" not in said[logging.WARNING]
    assert any("torch said: " in record.getMessage() for record in caplog.records)
