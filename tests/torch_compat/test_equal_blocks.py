"""The joint graph made from five equal blocks is the one that a trace of all blocks gives, node for node."""

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import fx, nn
from training import differences, train, twin

import lowtide
from lowtide.analyze.captured_step import Captured, capture
from lowtide.torch_compat import aot_autograd, aot_blocks, joint_copies
from lowtide.torch_compat.dispatch import storage_key
from lowtide.torch_compat.equal_blocks import layout_of
from lowtide.torch_compat.joint_blocks import tensors_of
from lowtide.zoo.targets import Target

WIDTH, DEPTH = 8, 7
WHOLE = "are traced one by one"


class Block(nn.Module):
    """A residual block with dropout, a view of what it reads, and a value that it reads twice."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 12), nn.Linear(12, WIDTH)

    def forward(self, x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        inner = nn.functional.gelu(self.up(self.norm(x.view(-1, WIDTH))))
        made: torch.Tensor = x + nn.functional.dropout(self.down(inner * scale), 0.1).view_as(x)
        return made


class Wide(Block):
    def forward(self, x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = super().forward(x, scale) * scale.sum().tanh()
        return made


class Normed(Block):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH)  # type: ignore[assignment]


class Numbered(Block):
    count = 0

    def __init__(self) -> None:
        super().__init__()
        Numbered.count += 1
        self.number = float(Numbered.count)

    def forward(self, x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = super().forward(x, scale) * self.number
        return made


class Stack(nn.Module):
    """Blocks between two linear layers; the first layer requires a gradient and gets none."""

    def __init__(self, *kinds: Callable[[], nn.Module], depth: int = DEPTH, collects: bool = False) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 3)
        self.blocks = nn.ModuleList([kinds[i % len(kinds)]() for i in range(depth)])
        self.scale = nn.Parameter(torch.ones(1))
        self.collects = collects

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden, seen = self.first(x).detach(), []
        for block in self.blocks:
            hidden = block(hidden, self.scale)
            seen.append(hidden)
        made = self.last(hidden)
        result: torch.Tensor = made.square().mean()
        return result + sum(each.mean() for each in seen) if self.collects else result


class Tied(Stack):
    """All blocks have one linear layer in common."""

    def __init__(self) -> None:
        super().__init__(Block)
        for block in self.blocks:
            block.up = self.blocks[0].up


def _batch() -> torch.Tensor:
    torch.manual_seed(1)
    return torch.randn(2, 3, WIDTH)


def _captured(model: nn.Module, *, whole: bool, monkeypatch: pytest.MonkeyPatch) -> Captured:
    with monkeypatch.context() as patch:
        if whole:
            patch.setattr(aot_autograd, "find_chain", lambda _: None)
        return capture(model, _batch())


def _rows(graph: fx.Graph) -> list[Any]:
    """All that later stages read of a graph, with storages by the first tensor that has them."""
    rows: list[Any] = []
    first: dict[int, tuple[int, int]] = {}
    numbers = [node.meta["seq_nr"] for node in graph.nodes if "seq_nr" in node.meta]
    for index, node in enumerate(graph.nodes):
        tensors = tensors_of(node)
        homes = [first.setdefault(storage_key(t), (index, place)) for place, t in enumerate(tensors)]
        meta = {
            key: repr(value)
            for key, value in node.meta.items()
            if key not in ("val", "tensor_meta", "from_node", "torch_fn", "seq_nr")
        }
        seq_nr = node.meta.get("seq_nr")
        rows.append(
            (
                node.name,
                node.op,
                str(node.target),
                str(node.args),
                str(node.kwargs),
                layout_of(node.meta.get("val")),
                homes,
                [tensor.untyped_storage().nbytes() for tensor in tensors],
                meta,
                None if seq_nr is None else seq_nr - numbers[0],
            )
        )
    return rows


@pytest.mark.parametrize(
    "build",
    [
        lambda: Stack(Block),
        pytest.param(lambda: Stack(Block, Wide, depth=14), marks=pytest.mark.long),
        Tied,
        pytest.param(lambda: Stack(Wide, *[Block] * 9, depth=8), marks=pytest.mark.long),
    ],
    ids=["one kind", "two kinds in turn", "tied weights", "another first block"],
)
def test_the_graph_is_that_of_a_whole_trace(
    build: Callable[[], nn.Module], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    torch.manual_seed(0)
    model = build()
    whole = _captured(model, whole=True, monkeypatch=monkeypatch)
    shorts: list[fx.GraphModule] = []
    expanded = joint_copies.expanded

    def seen(joint: fx.GraphModule, *rest: Any) -> fx.GraphModule:
        shorts.append(joint)
        return expanded(joint, *rest)

    monkeypatch.setattr(aot_blocks, "expanded", seen)
    with caplog.at_level(logging.INFO, "lowtide"):
        once = _captured(model, whole=False, monkeypatch=monkeypatch)
    assert len(shorts) == 1, "the blocks were not traced once"
    assert WHOLE not in caplog.text
    for one, other in zip(whole.segments, once.segments, strict=True):
        assert len(shorts[0].graph.nodes) < len(one.joint.graph.nodes)
        for mine, its in zip(_rows(one.joint.graph), _rows(other.joint.graph), strict=True):
            assert mine == its
    assert whole.step == once.step


@pytest.mark.parametrize(
    ("build", "is_found"),
    [
        (lambda: Stack(Normed), True),
        (lambda: Stack(Numbered), False),
        (lambda: Stack(Block, collects=True), False),
    ],
    ids=["writes into buffers", "numbers differ", "outputs of all blocks are read"],
)
def test_other_blocks_are_traced_one_by_one(
    build: Callable[[], nn.Module],
    is_found: bool,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    torch.manual_seed(0)
    model = build()
    whole = _captured(model, whole=True, monkeypatch=monkeypatch)
    with caplog.at_level(logging.INFO, "lowtide"):
        once = _captured(model, whole=False, monkeypatch=monkeypatch)
    assert (WHOLE in caplog.text) == is_found
    assert whole.step == once.step


def test_a_deep_model_trains_as_in_eager() -> None:
    torch.manual_seed(0)
    model = Stack(Block)
    target = Target("stack", model, _batch(), torch.optim.SGD(model.parameters(), lr=0.1))
    eager = twin(target)
    lowtide.checkpoint(model, target.batch, budget="80%", optimizer=target.optimizer)
    assert not differences(train(eager), train(target))
