"""The whole graph run for real: bytes to the byte, the same as op by op, and the same arguments."""

import logging

import pytest
import torch
from torch import fx, nn
from trouble import TROUBLE

import lowtide
from lowtide.api import profile
from lowtide.facts.sizes import BadSize
from lowtide.ops.calls import call_of
from lowtide.profiling import costing
from lowtide.profiling.op_costs import measure_calls
from lowtide.profiling.whole_run import GraphProfiler

pytestmark = pytest.mark.slow

aten = torch.ops.aten
KIB = 1024


def graph_module(build):
    """A module whose graph `build(graph, x)` makes, for one input of 1 KiB."""
    graph = fx.Graph()
    graph.output(build(graph, graph.placeholder("x")))
    return fx.GraphModule(torch.nn.Module(), graph)


def chain(graph, x):
    first = graph.call_function(aten.add.Tensor, (x, 1), name="first")
    view = graph.call_function(aten.view.default, (first, [16, 16]), name="view")
    second = graph.call_function(aten.mul.Tensor, (view, 2), name="second")
    graph.call_function(aten.split.Tensor, (second, 8), name="pair")
    return graph.call_function(aten.sum.default, (second,), name="total")


def test_bytes_follow_storages():
    rows = GraphProfiler(graph_module(chain)).profile(torch.ones(256))
    table = {name: (row.made_bytes, row.live_bytes, row.peak_bytes) for name, row in rows.items()}
    assert table == {
        "x": (0, KIB, KIB),
        "first": (KIB, 2 * KIB, 2 * KIB),
        "view": (0, 2 * KIB, 2 * KIB),
        "second": (KIB, 2 * KIB, 3 * KIB),
        # Nobody reads the pair, but the block it points to is still needed.
        "pair": (0, 2 * KIB, 2 * KIB),
        "total": (4, KIB + 4, 2 * KIB + 4),
    }


def test_a_value_that_nobody_reads_is_freed_at_once():
    def build(graph, x):
        graph.call_function(aten.add.Tensor, (x, 1), name="unread")
        return graph.call_function(aten.add.Tensor, (x, 2), name="kept")

    rows = GraphProfiler(graph_module(build)).profile(torch.ones(256))
    assert rows["unread"].live_bytes == KIB
    assert rows["kept"].peak_bytes == 2 * KIB


class Recorder(GraphProfiler):
    """Notes how many values are in the environment when a node starts."""

    def run_node(self, n):
        result = super().run_node(n)
        self.held = max(getattr(self, "held", 0), len(self.env))
        return result


def test_values_really_are_freed():
    def build(graph, x):
        for _ in range(20):
            graph.call_function(aten.add.Tensor, (x, 1))
            x = graph.call_function(aten.add.Tensor, (x, 1))
        return x

    profiler = Recorder(graph_module(build))
    profiler.profile(torch.ones(256))
    assert profiler.held <= 3


def test_random_state_is_left_alone():
    before = torch.get_rng_state()
    module = graph_module(lambda graph, x: graph.call_function(aten.native_dropout.default, (x, 0.5, True)))
    GraphProfiler(module).profile(torch.ones(256))
    assert torch.equal(before, torch.get_rng_state())


def test_each_node_is_timed_as_often_as_asked():
    calls = []

    def counted(x):
        calls.append(1)
        return x + 1

    module = graph_module(lambda graph, x: graph.call_function(counted, (x,), name="counted"))
    rows = GraphProfiler(module).profile(torch.ones(4), runs=5, warmup=2)
    assert len(calls) == 7
    assert rows["counted"].seconds > 0
    with pytest.raises(ValueError, match="warm-up"):
        GraphProfiler(module).profile(torch.ones(4), warmup=0)


def test_both_ways_agree_on_the_bytes_inside_a_convolution():
    image, weight = torch.randn(2, 8, 16, 16), torch.randn(8, 8, 3, 3)
    graph = fx.Graph()
    inputs = [graph.placeholder("image"), graph.placeholder("weight")]
    rest = (None, [1, 1], [1, 1], [1, 1], False, [0, 0], 1)
    node = graph.call_function(aten.convolution.default, (*inputs, *rest), name="conv")
    graph.output(node)
    for read, value in zip(inputs, (image, weight), strict=True):
        read.meta["val"] = value
    row = GraphProfiler(fx.GraphModule(torch.nn.Module(), graph)).profile(image, weight, workspace=True)[
        "conv"
    ]
    (cost,) = measure_calls([call_of(node)]).costs
    assert cost.workspace_bytes == row.workspace_bytes > 0
    assert row.peak_bytes == image.nbytes + weight.nbytes + row.made_bytes + row.workspace_bytes


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


MODES = ("ops", "run")


@pytest.fixture
def model() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64), nn.Tanh())


@pytest.mark.parametrize("mode", MODES)
def test_the_memory_limit_is_heeded(model: nn.Module, mode: str) -> None:
    batch = torch.randn(16384, 64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    small = lowtide.profile(model, batch, optimizer=optimizer, mode=mode, memory_limit="2MiB", cache=False)
    (norm,) = [node for node in small.nodes if "batch_norm" in node.op and node.remats]
    whole = lowtide.profile(model, batch, optimizer=optimizer, mode="ops", cache=False)
    assert sum(node.estimated for node in whole.nodes) == 0
    if mode == "ops":
        assert norm.estimated
    with pytest.raises(BadSize):
        lowtide.profile(model, batch, mode=mode, memory_limit="much")


@pytest.mark.parametrize("mode", MODES)
def test_progress_is_told(model: nn.Module, mode: str) -> None:
    told: list[tuple[int, int]] = []
    lowtide.profile(
        model,
        torch.randn(32, 64),
        mode=mode,
        cache=False,
        progress=lambda done, total: told.append((done, total)),
    )
    assert told and told[-1][0] == told[-1][1]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("cache", [True, False])
def test_the_cache_is_left_alone_on_request(
    model: nn.Module, mode: str, cache: bool, monkeypatch: pytest.MonkeyPatch, tmp_path
) -> None:
    monkeypatch.setenv("LOWTIDE_CACHE_DIR", str(tmp_path / "cache"))
    lowtide.profile(model, torch.randn(32, 64), mode=mode, cache=cache)
    assert (tmp_path / "cache").exists() is cache


def test_the_limit_reaches_what_is_measured_op_by_op(
    model: nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits = []
    plain = costing.measure_calls

    def spy(calls, *, memory_limit_bytes, **rest):
        limits.append(memory_limit_bytes)
        return plain(calls, memory_limit_bytes=memory_limit_bytes, **rest)

    monkeypatch.setattr(costing, "measure_calls", spy)
    lowtide.profile(model, torch.randn(32, 64), mode="run", memory_limit=123 << 20)
    assert limits == [123 << 20]
