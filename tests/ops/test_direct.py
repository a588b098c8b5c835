"""Ops that are called directly: the same op runs, and gives the same."""

import operator

import pytest
import torch
from torch import fx, nn
from torch.utils._python_dispatch import TorchDispatchMode

from lowtide.ops.direct import DIRECT, direct_function
from lowtide.ops.in_place import overwriting
from lowtide.ops.random_ops import _scale

aten = torch.ops.aten
MATRIX = torch.linspace(-1, 2, 12).reshape(3, 4)
BATCH = torch.linspace(-1, 2, 24).reshape(2, 3, 4)

ARGUMENTS = {
    aten.add.Tensor: [((MATRIX, MATRIX), {}), ((MATRIX, 2), {}), ((MATRIX, MATRIX), {"alpha": 3})],
    aten.addmm.default: [((MATRIX[:, 0], MATRIX, MATRIX.t()), {}), ((MATRIX[0, :3], MATRIX, MATRIX.t()), {})],
    aten.bmm.default: [((BATCH, BATCH.transpose(1, 2)), {})],
    aten.clone.default: [((MATRIX.t(),), {}), ((MATRIX.t(),), {"memory_format": torch.contiguous_format})],
    aten.detach.default: [((MATRIX,), {})],
    aten.div.Tensor: [((MATRIX, MATRIX + 3), {}), ((MATRIX, 3), {}), ((MATRIX, 0.3), {})],
    aten.embedding.default: [((MATRIX, torch.tensor([[0, 2]])), {}), ((MATRIX, torch.tensor([1]), 0), {})],
    aten.expand.default: [((MATRIX, [2, 3, 4]), {}), ((MATRIX, [2, -1, -1]), {"implicit": True})],
    aten.gelu.default: [((MATRIX,), {}), ((MATRIX,), {"approximate": "tanh"})],
    aten.mean.dim: [
        ((MATRIX, [-1], True), {}),
        ((BATCH, [0, 2]), {}),
        ((MATRIX, [0]), {"dtype": torch.float64}),
    ],
    aten.mm.default: [((MATRIX, MATRIX.t()), {})],
    aten.mul.Tensor: [((MATRIX, MATRIX), {}), ((MATRIX, 0.1), {}), ((MATRIX, MATRIX > 0), {})],
    aten.native_layer_norm.default: [
        ((MATRIX, [4], MATRIX[0], MATRIX[1], 1e-5), {}),
        ((MATRIX, [4], None, None, 1e-5), {}),
    ],
    aten.neg.default: [((MATRIX,), {})],
    aten.permute.default: [((BATCH, [2, 0, 1]), {})],
    aten.pow.Tensor_Scalar: [((MATRIX, 2), {}), ((MATRIX, 3.0), {}), ((MATRIX.abs(), 0.5), {})],
    aten.relu.default: [((MATRIX,), {})],
    aten.reshape.default: [((MATRIX, [4, 3]), {}), ((MATRIX.t(), [-1]), {}), ((MATRIX[:1, :1], []), {})],
    aten.rsqrt.default: [((MATRIX.abs() + 1,), {})],
    aten.select.int: [((BATCH, 1, -1), {})],
    aten.sub.Tensor: [((MATRIX, MATRIX), {}), ((MATRIX, 2), {}), ((MATRIX, MATRIX), {"alpha": 3})],
    aten.sum.dim_IntList: [
        ((MATRIX, [0], True), {}),
        ((BATCH, [0, 1]), {}),
        ((BATCH, None), {}),
        ((MATRIX, [0]), {"dtype": torch.float64}),
    ],
    aten.t.default: [((MATRIX,), {})],
    aten.transpose.int: [((BATCH, 1, -1), {})],
    aten.unsqueeze.default: [((MATRIX, -1), {})],
}


class Recorder(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.ops: list[object] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.ops.append(func)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("op", DIRECT, ids=str)
def test_a_direct_call_runs_the_op_itself(op) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        for given, kwargs in ARGUMENTS[op]:
            args = [
                arg.to(dtype) if isinstance(arg, torch.Tensor) and arg.is_floating_point() else arg
                for arg in given
            ]
            with torch.no_grad(), Recorder() as expected:
                want = op(*args, **kwargs)
            with torch.no_grad(), Recorder() as found:
                got = DIRECT[op](*args, **kwargs)
            assert found.ops == expected.ops
            for one, other in zip(
                *(some if isinstance(some, tuple) else (some,) for some in (got, want)), strict=True
            ):
                assert torch.equal(one, other)
                assert (one.dtype, one.stride()) == (other.dtype, other.stride())


def test_a_graph_calls_its_ops_without_torch_around_them(monkeypatch) -> None:
    graph = fx.Graph()
    value = graph.placeholder("value")
    negative = graph.call_function(aten.neg.default, (value,))
    graph.output([graph.call_function(aten.mul.Tensor, (negative, value))])
    run = direct_function(fx.GraphModule(nn.Module(), graph))
    monkeypatch.setattr(type(aten.neg.default), "__call__", None)
    args = [MATRIX]
    assert torch.equal(run(args)[0], -MATRIX * MATRIX)
    assert not args


def test_every_kind_of_argument_arrives() -> None:
    seen = []

    def look(*args, **kwargs):
        seen.append((args, kwargs))
        return args[0]

    root = nn.Module()
    root.inner = nn.Module()
    root.inner.constant = MATRIX
    graph = fx.Graph()
    value = graph.placeholder("op_0")  # a name that the code may use itself
    graph.placeholder("unread")
    constant = graph.get_attr("inner.constant")
    options = {
        "dtype": torch.float64,
        "where": {"a": [value, (1,)]},
        "size": float("inf"),
        "cut": slice(1, None),
    }
    looked = graph.call_function(look, (value, constant, "text", True, None, ()), options)
    row = graph.call_function(operator.getitem, (looked, 0))
    graph.output((row, [value, 3]))
    row, (same, three) = direct_function(fx.GraphModule(root, graph))([BATCH, MATRIX])
    assert row.data_ptr() == BATCH[0].data_ptr() and same is BATCH and three == 3
    ((args, kwargs),) = seen
    assert args[0] is BATCH and args[1] is MATRIX and args[2:] == ("text", True, None, ())
    assert kwargs["where"]["a"][0] is BATCH and kwargs["where"]["a"][1] == (1,)
    assert (kwargs["dtype"], kwargs["size"], kwargs["cut"]) == (torch.float64, float("inf"), slice(1, None))


@pytest.mark.parametrize("probability", [0.0, 0.1, 0.3, 0.9, 1.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_the_scale_of_a_dropout_is_a_number_of_its_type(probability, dtype) -> None:
    scale = _scale(dtype, probability)
    assert float(torch.tensor(scale, dtype=dtype)) == scale


def test_a_graph_looks_nothing_up_while_it_writes_over_an_input(monkeypatch) -> None:
    graph = fx.Graph()
    grad, value = graph.placeholder("grad"), graph.placeholder("value")
    call = overwriting(aten.threshold_backward.default, 0, (grad, value, 0), {})
    graph.output([graph.call_function(call.target, call.args, call.kwargs)])
    run = direct_function(fx.GraphModule(nn.Module(), graph))
    monkeypatch.setattr("lowtide.ops.in_place.schema_of", None)
    grads = torch.arange(12.0).reshape(3, 4)
    want = aten.threshold_backward(grads, MATRIX, 0)
    (found,) = run([grads, MATRIX])
    assert found is grads and torch.equal(found, want)
    rows = torch.arange(24.0).reshape(3, 8)[:, ::2]  # not dense: gets new memory
    kept, want = rows.clone(), aten.threshold_backward(rows, MATRIX, 0)
    assert torch.equal(run([rows, MATRIX])[0], want) and torch.equal(rows, kept)
