"""Collectives inside of a graph: what is waited for is the result itself, and no process runs one alone."""

import torch
from torch import fx

from lowtide.ops.calls import Call
from lowtide.ops.collectives import share_awaited
from lowtide.profiling.op_costs import measure_workspaces
from lowtide.torch_compat.dispatch import FakeTensorMode, storage_key
from lowtide.torch_compat.fsdp2 import WAIT

REDUCE = torch.ops._c10d_functional.all_reduce.default


def test_an_awaited_value_shares_the_storage_of_the_result():
    graph, mode = fx.Graph(), FakeTensorMode()
    with mode:
        given, made, awaited = (torch.empty(4, 6) for _ in range(3))
        parts = awaited.split(3, dim=1)
    x = graph.placeholder("x")
    reduce = graph.call_function(REDUCE, (x, "sum", "0"))
    wait = graph.call_function(WAIT, (reduce,))
    split = graph.call_function(torch.ops.aten.split.Tensor, (wait, 3, 1))
    for node, value in ((x, given), (reduce, made), (wait, awaited), (split, list(parts))):
        node.meta["val"] = value
    graph.output((split,))
    share_awaited(graph)
    values = [wait.meta["val"], *split.meta["val"]]
    assert {storage_key(value) for value in values} == {storage_key(made)} != {storage_key(given)}
    assert [value.storage_offset() for value in split.meta["val"]] == [0, 3]


def test_no_process_measures_a_collective_alone():
    call = Call(WAIT, (torch.empty(4),), {})
    assert measure_workspaces({"wait": (call, 0)}, memory_limit_bytes=1 << 30) == {}
