"""A batch that does not fit forward's arguments is refused before a capture, in one line; no other is."""

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import lowtide
from lowtide.errors import CaptureError
from lowtide.trace.batch_arguments import mismatch, refuse_other_arguments, refuse_other_loss
from lowtide.trace.model_call import call

X, Y = torch.ones(2, 4), torch.tensor([0, 1])
TARGET = r"is the last one the target\? Pass batch=x and loss=lambda output: F\.cross_entropy\(output, y\)$"


def with_ones(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def add(*args: Any) -> Any:
        return function(*args, torch.ones(4))

    return add


class OneArgument(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x)


class TwoArguments(OneArgument):
    def forward(self, x: torch.Tensor, mask: torch.Tensor, *, scale: float = 1.0) -> torch.Tensor:  # type: ignore[override]
        return self.layer(x) * mask * scale


class ByName(OneArgument):
    def forward(self, *, words: torch.Tensor, labels: Any = None) -> torch.Tensor:  # type: ignore[override]
        return self.layer(words)


class OfAnyNumber(OneArgument):
    def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        return self.layer(args[0])


class Decorated(OneArgument):
    """Gets one argument more than its caller gives."""

    @with_ones
    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return self.layer(x) * mask


class FailsInside(OneArgument):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x, x)


@pytest.mark.parametrize(
    ("model", "args", "kwargs", "words"),
    [
        (OneArgument(), (X, Y), {}, rf"of OneArgument takes 1 argument \(x\), and the batch has 2: {TARGET}"),
        (nn.Sequential(nn.Linear(4, 4)), (X, Y), {}, r"Sequential takes 1 argument \(input\)"),
        (OneArgument(), (X, Y, Y), {}, "the batch has 3: pass batch=x, and targets in the loss"),
        (TwoArguments(), (X,), {}, "needs 'mask', and the batch has 1 argument: add it"),
        (TwoArguments(), (X, Y, Y), {}, r"takes 2 arguments \(x, mask\), .* Pass batch=\(x, mask\)"),
        (TwoArguments(), (X,), {"x": X, "mask": Y}, "gives 'x' of .* twice"),
        (ByName(), (X,), {}, r"by name only \(words, labels\), and the batch has 1 by position: pass a dict"),
        (ByName(), (), {"word": X}, "takes no argument 'word'; it takes words, labels: is 'words' meant"),
        (ByName(), (), {"words": X, "kind": Y}, "takes no argument 'kind'.*a target goes into the loss"),
        (ByName(), (), {"labels": Y}, "needs 'words', and the batch has 'labels' only"),
        (
            OneArgument(),
            (),
            {"image": X, "box": Y},
            r"'image', 'box'\): name its key 'x', or pass batch=\(batch,\)",
        ),
    ],
)
def test_a_batch_that_does_not_fit(model: nn.Module, args: Any, kwargs: Any, words: str) -> None:
    with pytest.raises(CaptureError, match=words) as caught:
        refuse_other_arguments(model, args, kwargs)
    assert "\n" not in str(caught.value)


def hooked() -> nn.Module:
    """Its hook leaves the second argument out."""
    model = OneArgument()
    model.register_forward_pre_hook(lambda _model, args: args[:1])
    return model


def partial() -> nn.Module:
    model = OneArgument()
    model.forward = functools.partial(TwoArguments.forward, model, mask=torch.ones(4))  # type: ignore[arg-type, assignment]
    return model


@pytest.mark.parametrize(
    ("model", "args"),
    [
        (OfAnyNumber(), (X, Y)),
        (Decorated(), (X,)),
        (hooked(), (X, Y)),
        (partial(), (X,)),
        (torch.jit.script(OneArgument()), (X,)),
        (nn.DataParallel(OneArgument()), (X, Y)),
    ],
)
def test_what_a_signature_does_not_say_is_not_refused(model: nn.Module, args: Any) -> None:
    refuse_other_arguments(model, args, {})


def test_the_same_line_from_all_functions() -> None:
    plan = lowtide.profile(OneArgument(), X).plan("100%")
    calls: list[Callable[[], Any]] = [
        lambda: lowtide.profile(OneArgument(), (X, Y)),
        lambda: lowtide.checkpoint(OneArgument(), (X, Y), budget="100%"),
        lambda: lowtide.verify(OneArgument(), (X, Y), plan),
        lambda: lowtide.measure_step(OneArgument(), (X, Y)),
        lambda: call(OneArgument(), (X, Y)),
    ]
    for each in calls:
        with pytest.raises(CaptureError, match=TARGET):
            each()


def test_a_decorated_forward_is_explained_once_it_has_failed() -> None:
    class Wrapped(OneArgument):
        @functools.wraps(OneArgument.forward)
        def forward(self, *args: Any) -> torch.Tensor:
            return OneArgument.forward(self, *args)

    assert "takes 1 argument (x)" in mismatch(Wrapped(), (X, Y), {})
    with pytest.raises(CaptureError, match=TARGET):
        lowtide.profile(Wrapped(), (X, Y))


def test_an_error_inside_of_forward_keeps_its_own_words() -> None:
    with pytest.raises(
        CaptureError, match=r"TypeError at .*test_batch_arguments.py:\d+: .*takes 2 positional"
    ):
        lowtide.profile(FailsInside(), X)
    with pytest.raises(TypeError, match="takes 2 positional"):
        call(FailsInside(), X)


@pytest.mark.parametrize(
    ("loss", "words"),
    [
        (F.cross_entropy, r"cross_entropy takes 2 .*: .*loss=lambda output: F\.cross_entropy\(output, y\)$"),
        (F.mse_loss, r"mse_loss takes 2 arguments .*loss=lambda output: F\.mse_loss\(output, y\)$"),
        (nn.CrossEntropyLoss(), r"CrossEntropyLoss takes 2 .*loss=lambda output: criterion\(output, y\)$"),
        (
            lambda output, target: output,
            r"takes 2 arguments \(output, target\), and is called with the model's",
        ),
        (
            torch.ones(()),
            r"the loss is a Tensor, not a function: pass a function of the model's output, loss=",
        ),
    ],
)
def test_a_loss_that_needs_more_than_the_output_is_refused_before_the_capture(loss, words):
    with pytest.raises(CaptureError, match=words):
        lowtide.profile(OneArgument(), X, loss=loss)


@pytest.mark.parametrize(
    "loss",
    [
        None,
        lambda output: output,
        lambda output, weight=1.0: output,
        lambda *args: args,
        functools.partial(F.mse_loss, target=X),
    ],
)
def test_a_loss_of_the_output_alone_is_not_refused(loss):
    refuse_other_loss(loss)
