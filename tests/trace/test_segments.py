"""What follows from a graph is found once, and a graph that torch compiled at capture gets one plan."""

import pytest
import torch
from torch import nn

from lowtide.trace.segments import GraphBinding, GraphFunctions, Segment, edited
from lowtide.trace.trace_model import trace


def small_segment() -> Segment:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.ReLU())
    return trace(model, (torch.randn(3, 4),), {}, loss=torch.sum).executions[0].segment


def test_forward_and_backward_are_told_apart_once():
    segment = small_segment()
    assert segment.forward_ops is segment.forward_ops and segment.backward_ops is segment.backward_ops
    assert {*segment.forward_ops}.isdisjoint(segment.backward_ops)
    nodes = [node for node in segment.joint.graph.nodes if node.op not in ("placeholder", "output")]
    assert sorted((*segment.forward_ops, *segment.backward_ops), key=nodes.index) == nodes
    assert (*segment.outputs, *segment.gradients) == segment.results
    assert len(segment.primals) + len(segment.tangents) == len(
        segment.joint.graph.find_nodes(op="placeholder")
    )


def test_an_edited_segment_has_a_graph_and_a_split_of_its_own():
    segment = small_segment()
    before = segment.backward_ops, segment.structure

    def return_no_gradients(joint):
        output = joint.graph.output_node()
        output.args = ([*output.args[0][: segment.num_forward_outputs], *[None] * len(segment.gradients)],)
        joint.graph.eliminate_dead_code()

    without = edited(segment, return_no_gradients)
    assert len(without.backward_ops) < len(segment.backward_ops) and without.structure != segment.structure
    assert not any(without.has_gradients) and any(segment.has_gradients)
    assert (segment.backward_ops, segment.structure) == before


def functions(name: str) -> GraphFunctions:
    return GraphFunctions(lambda values: [name], lambda: lambda values: [f"{name} backward"])


def test_a_graph_runs_stand_ins_then_nothing_then_its_plan():
    binding = GraphBinding(functions("stand-in"))
    binding.compiled_to(lambda *inputs: binding.forward(list(inputs)))
    assert binding.run() == ["stand-in"] and binding.backward()([]) == ["stand-in backward"]
    binding.end_capture()
    with pytest.raises(AssertionError, match="has no plan"):
        binding.run()
    binding.bind(functions("plan"), around=lambda compiled: lambda *inputs: [*compiled(*inputs), "wrapped"])
    binding.end_capture()
    assert binding.run() == ["plan", "wrapped"] and binding.backward()([]) == ["plan backward"]


def test_a_graph_is_bound_to_one_plan():
    binding = GraphBinding(functions("stand-in"))
    with pytest.raises(AssertionError, match="when torch has compiled it"):
        binding.bind(functions("plan"), around=lambda compiled: compiled)
    binding.compiled_to(len)
    binding.bind(functions("plan"), around=lambda compiled: compiled)
    with pytest.raises(AssertionError, match="has its plan already"):
        binding.bind(functions("another"), around=lambda compiled: compiled)
