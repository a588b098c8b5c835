"""What torch and Python would do without anybody asking for it, while graphs are made."""

import logging
import operator

import torch
from torch import fx, nn

from lowtide.ops.direct import direct_function
from lowtide.torch_compat import aot_autograd, dynamo
from lowtide.trace.segments import Segment
from lowtide.trace.tangents import without_tangents


def _sum_graph() -> fx.Graph:
    graph = fx.Graph()
    one, other = graph.placeholder("one"), graph.placeholder("other")
    graph.output([graph.call_function(operator.add, (one, other))])
    return graph


def test_the_structured_trace_can_find_out_that_nobody_reads_it() -> None:
    logging.getLogger("torch._dynamo")
    trace = logging.getLogger(dynamo.STRUCTURED_TRACE)
    with dynamo.unlogged():
        assert not trace.filters
        assert logging.getLogger("torch._dynamo").filters


def test_no_code_is_written_for_a_graph_that_nobody_runs(monkeypatch) -> None:
    written = []
    write = fx.Graph.python_code
    monkeypatch.setattr(fx.Graph, "python_code", lambda *a, **k: written.append(1) or write(*a, **k))
    module = aot_autograd.graph_module(nn.Module(), _sum_graph())
    assert not written
    run = direct_function(module)
    args = [torch.ones(2), torch.ones(2)]
    assert torch.equal(run(args)[0], torch.full((2,), 2.0))
    assert not args, "inputs are freed at their last use"
    assert not written


def test_a_graph_whose_gradients_are_all_asked_for_is_not_copied() -> None:
    module = aot_autograd.graph_module(nn.Module(), _sum_graph())
    segment = Segment(module, 1, [], differentiable=True, fingerprint="")
    assert without_tangents(segment, frozenset()) is segment
