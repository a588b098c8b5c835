"""Calls are known by layout: signatures, views, storages."""

import operator

import pytest
import torch
from torch import fx

from lowtide.ops.calls import Call, call_of, signature, storages_bytes
from lowtide.ops.schema import is_view
from lowtide.profiling.work import Work, fresh_storages, work_of

aten = torch.ops.aten


def add(left, right):
    return Call(aten.add.Tensor, (left, right))


def test_signature_ignores_values_and_objects():
    first = add(torch.zeros(4, 8), torch.ones(4, 8))
    second = add(torch.rand(4, 8), torch.rand(4, 8))
    assert signature(first) == signature(second)


@pytest.mark.parametrize(
    "other",
    [
        add(torch.empty(4, 8), torch.empty(4, 1)),
        add(torch.empty(4, 8), torch.empty(8, 4).t()),
        add(torch.empty(4, 8), torch.empty(4, 8, dtype=torch.float64)),
        add(torch.empty(4, 8), torch.empty(4, 8, device="meta")),
        Call(aten.add.Tensor, (torch.empty(4, 8), torch.empty(4, 8)), {"alpha": 2}),
        Call(aten.sub.Tensor, (torch.empty(4, 8), torch.empty(4, 8))),
    ],
    ids=["shape", "stride", "dtype", "device", "argument", "target"],
)
def test_signature_sees(other):
    assert signature(other) != signature(add(torch.empty(4, 8), torch.empty(4, 8)))


def test_signature_sees_shared_storage():
    block = torch.empty(4, 8)
    assert signature(add(block, block)) != signature(add(block, torch.empty(4, 8)))


def test_signature_reads_into_lists_and_has_no_addresses():
    lists = Call(aten._foreach_add.List, ([torch.empty(2)], [torch.empty(2)]))
    assert "float32[2]" in signature(lists)
    generator = Call(aten.bernoulli.default, (torch.empty(2),), {"generator": torch.Generator()})
    assert "0x" not in signature(generator)


def test_call_of_a_node_takes_the_values_of_its_inputs():
    graph = fx.Graph()
    read = graph.placeholder("x")
    read.meta["val"] = torch.empty(3, 5)
    node = graph.call_function(aten.cat.default, ([read, read], 1))
    call = call_of(node)
    assert [tuple(tensor.shape) for tensor in call.tensors] == [(3, 5), (3, 5)]
    with pytest.raises(ValueError, match="placeholder"):
        call_of(read)


@pytest.mark.parametrize(
    ("call", "expected"),
    [
        (Call(aten.view.default, (torch.empty(4), [2, 2])), True),
        (Call(aten.t.default, (torch.empty(4, 2),)), True),
        (Call(aten.split.Tensor, (torch.empty(4, 2), 2)), True),
        (Call(operator.getitem, ((torch.empty(4),), 0)), True),
        (add(torch.empty(2), torch.empty(2)), False),
        (Call(aten.add_.Tensor, (torch.empty(2), torch.empty(2))), False),
        (Call(aten._foreach_add_.Scalar, ([torch.empty(2)], 1)), False),
        (Call(torch.add, (torch.empty(2), torch.empty(2))), False),
    ],
)
def test_is_view(call, expected):
    assert is_view(call) is expected


def test_bytes_count_each_storage_once_and_only_what_is_reached():
    block = torch.empty(10, 10)
    assert storages_bytes([block, block.t(), block[2:4]]) == 400
    assert storages_bytes([block[2:4]]) == 80
    assert storages_bytes([torch.empty(10, 1).expand(10, 50)]) == 40
    assert storages_bytes([torch.empty(0, 5)]) == 0


def test_fresh_storages_are_those_of_new_storages():
    block = torch.empty(8)
    assert fresh_storages([block.view(2, 4), torch.empty(4), torch.empty(1)], [block]) == (16, 4)


def test_work_has_flops_where_torch_knows_them():
    mm = work_of(Call(aten.mm.default, (torch.empty(8, 16), torch.empty(16, 4))))
    assert mm == Work(flops=2 * 8 * 16 * 4, input_bytes=(8 * 16 + 16 * 4) * 4, outputs=(8 * 4 * 4,))
    in_place = work_of(Call(aten.relu_.default, (torch.empty(8),)))
    assert in_place == Work(flops=0, input_bytes=32, outputs=())
    assert mm.ratio_to(Work(flops=512, input_bytes=1, outputs=(1,))) == 2
    assert in_place.ratio_to(Work(flops=512, input_bytes=8, outputs=(8,))) == 2
