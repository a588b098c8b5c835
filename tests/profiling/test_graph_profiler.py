"""The whole graph run for real: bytes to the byte, random state untouched."""

import pytest
import torch
from torch import fx

from lowtide.ops.calls import call_of
from lowtide.profiling.op_costs import measure_calls
from lowtide.profiling.whole_run import GraphProfiler

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
