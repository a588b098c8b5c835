"""Chains of backward ops in chunks: the same bits as one by one, for all types, sizes and threads."""

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional as F

from lowtide.ops.pointwise_chunks import CHUNK, LARGE_CHUNK, backward_program, in_chunks, replaced_ops
from lowtide.ops.random_ops import apply_mask

aten = torch.ops.aten
Formula = Callable[[Tensor], Tensor]


@pytest.fixture(params=[1, 2])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


FORMULAS: dict[str, Formula] = {
    "gelu by hand": lambda x: 0.5 * x * (1 + torch.tanh(0.79788456 * (x + 0.044715 * x**3))),
    "swish by hand": lambda x: x * torch.sigmoid(1.702 * x),
    "mish": lambda x: x * torch.tanh(F.softplus(x)),
    "activations": lambda x: F.gelu(x) * F.silu(x) + F.elu(x) * F.leaky_relu(x) - F.hardtanh(x) * F.relu(x),
    "gelu and its like": lambda x: F.gelu(x, approximate="tanh") * torch.erf(x) / (1 + torch.exp(-x)),
    "functions": lambda x: torch.sin(x) * torch.cos(x) * torch.sqrt(x * x + 1) + torch.rsqrt(x * x + 2),
}


def backward_of(formula: Formula, x: Tensor, grad: Tensor) -> tuple[fx.GraphModule, fx.Node]:
    """The formula and its gradient in one graph, tagged as captured graphs are, and the last op of it."""

    def both(x: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
        value = formula(x.requires_grad_())
        return value, torch.autograd.grad(value, x, grad)[0]

    traced = make_fx(both, tracing_mode="fake")(x, grad)
    value, end = traced.graph.output_node().args[0]
    node = value.next
    while node.op == "call_function":
        node.meta["partitioner_tag"] = "is_backward"
        node = node.next
    return traced, end


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", FORMULAS)
def test_the_same_bits(name: str, dtype: torch.dtype, threads: int) -> None:
    torch.manual_seed(0)
    traced, end = backward_of(FORMULAS[name], *torch.ones(2, 999, dtype=dtype))
    found = backward_program(end)
    assert found is not None
    program, sources = found
    place = next(i for i, source in enumerate(sources) if source.name.startswith("grad"))
    for count in (threads * threads * CHUNK + 12345, 3 * threads * CHUNK - 1, 999):
        x, grad = torch.randn(2, count).mul_(3).to(dtype)
        values = fx.Interpreter(traced, garbage_collect_values=False)
        _, expected = values.run(x, grad)
        inputs = [values.env[source] for source in sources]
        assert torch.equal(in_chunks(program, inputs, dtype, LARGE_CHUNK), expected), count
        over = in_chunks(program, inputs, dtype, over=place)
        assert over is inputs[place]
        assert torch.equal(over, expected), count


def test_a_formula_needs_its_input_and_one_gradient_alone() -> None:
    x, grad = torch.randn(1000), torch.randn(1000)
    for name in ("gelu by hand", "swish by hand", "mish"):
        traced, end = backward_of(FORMULAS[name], x, grad)
        found = backward_program(end)
        assert found is not None
        assert {source.name.split("_")[0] for source in found[1]} == {"x", "grad"}, name
        assert {node.name for node in replaced_ops(end)} < {node.name for node in traced.graph.nodes}


def _graph(*ops: tuple[object, ...]) -> fx.Node:
    """A backward graph of these ops, each of (target, places of its arguments); two inputs come first."""
    graph = fx.Graph()
    values = [graph.placeholder("value"), graph.placeholder("mask")]
    values[0].meta["val"] = torch.zeros(4, 6)
    values[1].meta["val"] = torch.zeros(4, 6, dtype=torch.bool)
    for target, *args in ops:
        node = graph.call_function(target, tuple(values[a] if isinstance(a, int) else a for a in args))  # type: ignore[arg-type]
        node.meta["partitioner_tag"] = "is_backward"
        node.meta["val"] = target(*(values[a].meta["val"] if isinstance(a, int) else a for a in args))  # type: ignore[operator]
        values.append(node)
    graph.output(values[-1])
    return values[-1]


def test_a_dropout_is_part_of_a_chain() -> None:
    end = _graph((apply_mask, 0, 1, 0.1), (aten.mul.Tensor, 2, 0), (aten.add.Tensor, 3, 2))
    found = backward_program(end)
    assert found is not None
    assert [op for op, _, _ in found[0]] == [apply_mask, aten.mul.Tensor, aten.add.Tensor]


def test_what_runs_over_its_own_gradient_already_is_no_chain() -> None:
    assert backward_program(_graph((aten.neg.default, 0), (aten.abs.default, 2))) is None


def test_no_chain_where_layouts_differ_or_something_is_repeated() -> None:
    lying = _graph((aten.t.default, 0), (aten.mul.Tensor, 2, 2), (aten.add.Tensor, 3, 2))
    assert backward_program(lying) is None
    repeated = _graph((aten.amax.default, 0, [0]), (aten.mul.Tensor, 0, 2), (aten.add.Tensor, 3, 3))
    found = backward_program(repeated)
    assert found is None or len(found[0]) == 1


def test_inputs_that_lie_otherwise_run_whole() -> None:
    end = _graph((apply_mask, 0, 1, 0.1), (aten.mul.Tensor, 2, 0), (aten.add.Tensor, 3, 2))
    found = backward_program(end)
    assert found is not None
    value, mask = torch.randn(6, 4).t(), torch.rand(4, 6) > 0.5
    by_name = {"value": value, "mask": mask}
    got = in_chunks(found[0], [by_name[source.name] for source in found[1]], torch.float32)
    dropped = apply_mask(value, mask, 0.1)
    assert torch.equal(got, dropped * value + dropped)
