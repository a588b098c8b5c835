"""What can be captured as a training step, what is refused and how, and that nothing is left behind."""

import gc
import logging
import random
import warnings
import weakref
from collections import UserDict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from trouble import BATCH, EqualBlocks
from trouble import WIDTH as TROUBLE_WIDTH

import lowtide
from lowtide.capture import trace as segments
from lowtide.capture.step import Captured, capture
from lowtide.checking.peak import peak_above_start
from lowtide.errors import CaptureError
from lowtide.facts import Kind, Region, Step
from lowtide.torchside.hooks import FakeTensor, FakeTensorMode

WIDTH = 6
ROWS = 10


class Net(nn.Module):
    """Two layers; `tail` makes of the result what a test needs, `middle` stands between them."""

    def __init__(self, tail: Callable[..., Any] = lambda x: x, middle: Callable[..., Any] = lambda x: x):
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.tail, self.middle = tail, middle

    def forward(self, x: torch.Tensor, scale: torch.Tensor | float = 1.0) -> Any:
        return self.tail(self.last(self.middle(self.first(x)) * scale))


class Output(dict[str, Any]):
    """A mapping with attributes, as transformers returns it."""

    @property
    def loss(self) -> Any:
        return self["loss"]


def rows() -> torch.Tensor:
    return torch.randn(ROWS, WIDTH)


def gradients(step: Step) -> list[int]:
    return sorted(s.nbytes for s in step.storages if s.kind is Kind.GRADIENT)


def said(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name == "lowtide"]


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
        (_does_not_fit, RuntimeError, r"\[10, 6\] X \[3, 3\]"),
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
    assert "\n" not in str(caught.value)
    assert capfd.readouterr() == ("", "")


@torch._dynamo.disable
def _disabled(self: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return self.first(x)


def test_a_model_that_torch_skips_whole() -> None:
    class Skipped(Net):
        forward = _disabled

    with pytest.raises(CaptureError, match=r"nothing of this model could be captured"):
        capture(Skipped(), rows())


def test_a_graph_break_inside_a_loop_says_what_broke() -> None:
    class Loop(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU()) for _ in range(2))
            self.layers[0].register_full_backward_hook(lambda module, grad_in, grad_out: None)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer in self.layers:
                x = layer(x)
            return x

    with pytest.raises(CaptureError, match=r"gave up on its forward \(Module-level backwards hooks .*loop"):
        capture(Loop(), rows())


def test_sparse_gradients_are_refused() -> None:
    model = nn.Sequential(nn.Embedding(WIDTH, WIDTH, sparse=True), nn.Linear(WIDTH, WIDTH))
    with pytest.raises(CaptureError, match=r"layout torch.sparse_coo, and only dense"):
        capture(model, torch.randint(0, WIDTH, (ROWS,)))


def test_checkpointing_by_the_model_itself_is_noted() -> None:
    step = capture(Net(tail=lambda x: checkpoint(torch.tanh, x, use_reentrant=False)), rows()).step
    assert len(step.notes) == 1 and "torch.utils.checkpoint" in step.notes[0]
    assert capture(Net(), rows()).step.notes == ()


def test_what_was_traced_before_does_not_change_a_graph() -> None:
    model, batch = nn.LSTM(WIDTH, WIDTH), torch.randn(3, ROWS, WIDTH)
    FakeTensorMode.cache_clear()
    first = capture(model, batch, loss=lambda output: output[0].sum()).step.fingerprint
    assert capture(model, batch, loss=lambda output: output[0].sum()).step.fingerprint == first


def test_more_arguments_than_the_model_takes() -> None:
    with pytest.raises(CaptureError, match="takes from 2 to 3 positional arguments but 4 were given"):
        capture(Net(), (rows(), 1.0, 2.0))


class Stateful(nn.Module):
    """Leaves traces wherever a forward pass can."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.drop = nn.BatchNorm1d(WIDTH), nn.Dropout(0.5)
        self.first, self.calls = nn.Linear(WIDTH, WIDTH), 0
        self.register_buffer("mean", torch.zeros(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.drop(self.norm(self.first(x)))
        self.calls += 1
        self.last = x
        self.mean = self.mean * 0.9 + x.mean(0).detach() * 0.1
        if x.mean().item() > random.random() - 100:
            x = x + torch.randn_like(x)
        return x


def _settings() -> list[Any]:
    logger = logging.getLogger("torch")
    return [
        torch._dynamo.config.save_config(),
        torch._functorch.config.save_config(),
        list(warnings.filters),
        logger.level,
        torch.is_grad_enabled(),
        torch.get_rng_state().tolist(),
        random.getstate(),
    ]


@pytest.mark.parametrize("real", [False, True])
def test_nothing_is_left_behind(real: bool) -> None:
    model = Stateful() if real else nn.Sequential(*list(Stateful().children())[::-1])
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    identities = {name: id(tensor) for name, tensor in model.state_dict(keep_vars=True).items()}
    attributes = {name: list(vars(module)) for name, module in model.named_modules()}
    batch = rows()
    values, settings = batch.clone(), _settings()
    for _ in range(2):
        captured = capture(model, batch, optimizer=torch.optim.Adam(model.parameters()))
    assert ("one real forward" in " ".join(captured.step.notes)) is real
    assert settings == _settings()
    assert torch.equal(batch, values) and not batch.requires_grad
    assert model.training and all(parameter.grad is None for parameter in model.parameters())
    after = model.state_dict(keep_vars=True)
    assert identities == {name: id(tensor) for name, tensor in after.items()}
    assert all(torch.equal(before[name], tensor) for name, tensor in after.items())
    assert attributes == {name: list(vars(module)) for name, module in model.named_modules()}
    assert getattr(model, "calls", 0) == 0


class Remembers(nn.Module):
    """Keeps what it computes in lists and dicts, one inside of another."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.kept: dict[str, Any] = {"losses": [], "masks": {}}
        self.seen = [0]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        masks = self.kept["masks"]
        if len(x) not in masks:
            masks[len(x)] = torch.tril(torch.ones(WIDTH, WIDTH))
        x = self.first(x) @ masks[len(x)]
        self.kept["losses"].append(x.mean())
        self.seen[0] += 1
        return x


def test_a_batch_may_be_any_mapping() -> None:
    """Tokenizers give one that is no dict."""
    torch.manual_seed(0)
    model, x = Net(), rows()
    assert capture(model, UserDict({"x": x})).step == capture(model, {"x": x}).step


def test_lists_and_dicts_of_the_model_keep_their_contents() -> None:
    model = Remembers()
    losses = model.kept["losses"]
    capture(model, rows())
    assert model.kept == {"losses": [], "masks": {}} and model.seen == [0]
    assert model.kept["losses"] is losses
    model(rows()).sum().backward()


def test_parameters_in_one_storage_are_counted_once() -> None:
    model = Net()
    alone = capture(model, rows()).step.static_bytes
    flat = nn.utils.parameters_to_vector(model.parameters()).detach()
    start = 0
    for parameter in model.parameters():
        parameter.data = flat[start : start + parameter.numel()].view_as(parameter)
        start += parameter.numel()
    assert capture(model, rows()).step.static_bytes == alone


def test_a_failed_capture_leaves_nothing_behind_either() -> None:
    model, batch = Net(_raises), rows()
    settings = _settings()
    with pytest.raises(CaptureError):
        capture(model, batch)
    assert settings == _settings()


def test_a_model_can_be_captured_after_a_failure() -> None:
    model = Net(_breaks)
    before = capture(model, rows()).step
    model.tail = _raises
    with pytest.raises(CaptureError):
        capture(model, rows())
    model.tail = _breaks
    assert capture(model, rows()).step == before


def test_what_was_captured_goes_with_its_owner(monkeypatch: pytest.MonkeyPatch) -> None:
    collectors = []
    plain = segments.Collector.__init__
    monkeypatch.setattr(
        segments.Collector,
        "__init__",
        lambda self, **k: (collectors.append(weakref.ref(self)), plain(self, **k))[1],
    )
    model = Net(F.gelu)
    capture(model, rows())
    gc.collect()
    assert [reference() for reference in collectors] == [None]


def test_a_planned_model_goes_with_its_owner() -> None:
    model = Net(F.gelu)
    lowtide.checkpoint(model, rows(), budget="1MB")
    model(rows()).sum().backward()
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None


def _breaks(x: torch.Tensor) -> torch.Tensor:
    torch._dynamo.graph_break()
    return torch.relu(x)


def test_a_graph_break_needs_no_real_forward(caplog: pytest.LogCaptureFixture) -> None:
    seen = []
    captured = capture(Net(middle=lambda x: (seen.append(type(x)), _breaks(x))[1]), rows())
    assert seen and all(kind is FakeTensor or issubclass(kind, torch.Tensor) for kind in seen)
    step = captured.step
    assert [graph.in_model for graph in step.graphs] == [True, True, True, False]
    assert said(caplog) == []
    assert step.notes == ("the model breaks into 3 graphs; nothing is recomputed across them",)


def test_segments_are_ranked_in_the_order_they_run() -> None:
    step = capture(Net(middle=_breaks), rows()).step
    forward = [n.segment for n in step.nodes if n.region is Region.FORWARD]
    backward = [n.segment for n in step.nodes if n.region is Region.BACKWARD]
    assert forward == sorted(forward) and set(forward) == {0, 1, 2, 3}
    assert backward == sorted(backward, reverse=True) and set(backward) == {0, 1, 2, 3}


def test_graphs_that_differ_in_their_parameters_alone_are_told_apart() -> None:
    graphs = capture(EqualBlocks(), torch.randn(BATCH, TROUBLE_WIDTH)).step.graphs
    assert len({graph.fingerprint for graph in graphs if graph.in_model}) == 3


def test_links_between_segments() -> None:
    step = capture(Net(middle=_breaks), rows()).step
    for region, step_to in ((Region.FORWARD, 1), (Region.BACKWARD, -1)):
        links = [
            (step.nodes[read].segment, node.segment)
            for node in step.nodes
            for read in node.reads
            if node.region is region and node.op == "placeholder"
        ]
        assert links and all(to - start == step_to for start, to in links)
    linked = [n for n in step.nodes if n.op == "placeholder" and n.reads and n.region is Region.FORWARD]
    for node in linked:
        assert node.makes == () and node.holds == step.nodes[node.reads[0]].holds
        assert node.fixed == "comes from before a graph break"


def test_a_real_forward_is_announced_before_it_runs(caplog: pytest.LogCaptureFixture) -> None:
    before: list[int] = []

    def reads_values(x: torch.Tensor) -> torch.Tensor:
        if x.sum().item() > -1000:
            before.append(len(said(caplog)))
            return torch.relu(x)
        return x

    captured = capture(Net(middle=reads_values), rows())
    words, outside = said(caplog)
    assert before and before[0] == 1
    assert (
        "code outside of its graphs that torch.compile does not follow" in outside
    )  # the relu, after said()
    parameters = 2 * (WIDTH * WIDTH + WIDTH) * 4
    graph = ROWS * WIDTH * 4
    assert f"at least {parameters + graph} B: {parameters} B of parameters" in words
    assert f"{graph} B for the largest graph so far" in words and __file__ in words
    assert len(captured.segments) == 4


@torch._dynamo.disable
def _through_numpy(x: torch.Tensor) -> float:
    return float(x.detach().numpy().mean())


def test_code_that_fails_on_fake_tensors_gets_real_ones(caplog: pytest.LogCaptureFixture) -> None:
    captured = capture(Net(middle=lambda x: x * _through_numpy(x)), rows())
    assert "one real forward pass" in said(caplog)[0]
    assert len(captured.segments) == 4


def test_a_real_forward_saves_no_activations() -> None:
    def reads_values(x: torch.Tensor) -> torch.Tensor:
        return x if x.sum().item() > -1e9 else -x

    class Deep(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.Sequential(*(nn.Sequential(nn.Linear(128, 128), nn.GELU()) for _ in range(8)))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return reads_values(self.layers(x)) * 2

    batch = torch.randn(1000, 128)
    peak = peak_above_start(lambda: capture(Deep(), batch))
    assert batch.nbytes < peak < 5 * batch.nbytes
