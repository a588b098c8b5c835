"""Values that leave for a store and come back: exact, and as many bytes as the plan says."""

from collections.abc import Callable

import pytest
import torch
from offload_plans import offload_plan
from torch import nn
from torch.nn import functional as F
from training import differences, measured_peak, train, twin

import lowtide
from lowtide.facts import Action
from lowtide.remat.offloaded import SMALLEST_BYTES
from lowtide.zoo.targets import Target

pytestmark = pytest.mark.slow

ROWS, WIDTH = 512, 64


class Layers(nn.Module):
    """Linear layers with something between them."""

    def __init__(self, between: Callable[[torch.Tensor], torch.Tensor], depth: int = 3) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(depth))
        self.between = between

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = self.between(layer(x))
        return x.square().mean()


class Images(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1)
        self.norm = nn.BatchNorm2d(8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.max_pool2d(self.norm(self.first(x)).relu(), 3, stride=1, padding=1)
        return self.second(x.to(memory_format=torch.channels_last)).sigmoid().mean()


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(50, WIDTH)
        self.block = nn.TransformerEncoderLayer(WIDTH, 4, 2 * WIDTH, batch_first=True)
        self.head = nn.Linear(WIDTH, 50)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self.head(self.block(self.words(tokens))).flatten(0, 1), tokens.flatten())


def parts(x: torch.Tensor) -> torch.Tensor:
    first, second = x.sin().chunk(2, dim=1)
    return torch.cat((first * second, second.exp().t().contiguous().t()), dim=1)


def conditions(x: torch.Tensor) -> torch.Tensor:
    return F.dropout(torch.where(x.sin().cumsum(1) > x, x.sigmoid(), x.relu()), 0.3) + 0.1 * x


def of_rows(model: nn.Module, dtype: torch.dtype = torch.float32) -> Target:
    model = model.to(dtype)
    batch = torch.randn(ROWS, WIDTH, dtype=dtype)
    return Target("layers", model, batch, torch.optim.Adam(model.parameters()), None)


def of_images() -> Target:
    model = Images()
    return Target("images", model, torch.randn(4, 3, 32, 32), torch.optim.SGD(model.parameters(), 0.1), None)


def of_words() -> Target:
    model = Words()
    return Target("words", model, torch.randint(50, (8, 64)), torch.optim.AdamW(model.parameters()), None)


TARGETS = {
    "parts of a value": lambda: of_rows(Layers(parts)),
    "conditions": lambda: of_rows(Layers(conditions)),
    "half precision": lambda: of_rows(Layers(F.gelu), torch.bfloat16),
    "images": of_images,
    "words": of_words,
}


def profile(target: Target, folder: object) -> lowtide.Profile:
    return lowtide.profile(target.model, target.batch, optimizer=target.optimizer, offload=f"disk:{folder}")


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("name", "delay", "ahead"),
    [
        ("half precision", 0, 0),
        *((name, 4, 5) for name in ("parts of a value", "conditions", "words")),
        *(pytest.param(name, 4, 5, marks=pytest.mark.long) for name in ("half precision", "images")),
    ],
)
def test_training_is_exact_and_takes_the_predicted_bytes(name, delay, ahead, tmp_path):
    torch.manual_seed(0)
    target = TARGETS[name]()
    found = profile(target, tmp_path)
    plan = offload_plan(found, delay=delay, ahead=ahead)
    assert plan.solution.offload.store_bytes >= 2 * SMALLEST_BYTES
    expected = train(twin(target))
    plan.apply(target.model)
    assert differences(expected, train(target)) == []
    assert measured_peak(target) == pytest.approx(plan.peak_bytes, rel=0.01)


def test_nothing_is_offloaded_unless_the_user_names_a_store(tmp_path):
    target = of_rows(Layers(F.gelu))
    plain = lowtide.profile(target.model, target.batch, optimizer=target.optimizer)
    assert plain.step.transfer_speed is None
    assert not any(node.movable for node in plain.nodes)
    assert "swap" not in dict(plain.step.rules)
    with_store = profile(target, tmp_path)
    offloads = [r for node in with_store.nodes for r in node.remats if r.action is Action.OFFLOAD]
    assert offloads and all(remat.seconds == 0 for remat in offloads)


def test_what_the_step_changes_in_place_is_not_offloaded(tmp_path):
    class Running(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(WIDTH, WIDTH)
            self.register_buffer("seen", torch.zeros(ROWS, WIDTH))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.layer(x)
            self.seen.add_(y.detach())
            return (y.sin() * self.seen).mean()

    target = of_rows(Running())
    plan = offload_plan(profile(target, tmp_path))
    expected = train(twin(target))
    plan.apply(target.model)
    assert differences(expected, train(target)) == []


def test_a_model_under_autocast(tmp_path):
    class Cast(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Layers(F.gelu)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with torch.autocast("cpu", torch.bfloat16):
                return self.inner(x)

    target = of_rows(Cast())
    plan = offload_plan(profile(target, tmp_path), delay=1, ahead=1)
    expected = train(twin(target))
    plan.apply(target.model)
    assert differences(expected, train(target)) == []
