"""Chains of pointwise ops in chunks: the same bits as whole, for all types, sizes and numbers of threads."""

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional as F

from lowtide.ops.pointwise_chunks import CHUNK, FEWEST_CHUNKS, GRAIN, chunks, forward_program, in_chunks

Chain = Callable[[Tensor, Tensor], Tensor]


@pytest.fixture(params=[1, pytest.param(2, marks=pytest.mark.long), 3])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


CHAINS: dict[str, Chain] = {
    "gelu by hand": lambda x, y: 0.5 * x * (1 + torch.tanh(0.79788456 * (x + 0.044715 * x**3))),
    "gated": lambda x, y: F.silu(x) * y,
    "upcast": lambda x, y: (F.gelu(x.float(), approximate="tanh") * y.double()).to(x.dtype) + 1,
    "rounding": lambda x, y: torch.add(x / 3, y, alpha=0.3).sub(x, alpha=0.7) * torch.rsqrt(y * y + 0.1),
    "chosen": lambda x, y: torch.where(x > 0, F.elu(x), F.leaky_relu(y)).masked_fill(y > 1, 0.5).abs(),
    "functions": lambda x, y: torch.erf(x) + torch.exp(-y * y) + torch.sin(x) * torch.cos(y) + x.sigmoid(),
    "others": lambda x, y: (
        F.softplus(x).sqrt() - F.hardtanh(y).clamp(-0.5, 0.5) / (2 + y.relu().reciprocal())
    ),
}


def graph_of(chain: Chain, *inputs: Tensor) -> torch.fx.GraphModule:
    return make_fx(chain, tracing_mode="fake")(*inputs)


@pytest.mark.sample(15)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("name", CHAINS)
def test_the_same_bits(name: str, dtype: torch.dtype, threads: int) -> None:
    torch.manual_seed(0)
    for count in (
        4 * threads * CHUNK,
        threads * threads * CHUNK + 12345,
        3 * threads * threads * CHUNK - 1,
        999,
    ):
        x, y = (torch.randn(count, dtype=torch.float64).mul(3).to(dtype) for _ in range(2))
        traced = graph_of(CHAINS[name], x, y)
        last = traced.graph.output_node().args[0]
        found = forward_program(last)
        assert found is not None and len(found[0]) >= 2
        program, sources = found
        values = torch.fx.Interpreter(traced, garbage_collect_values=False)
        expected = values.run(x, y)
        got = in_chunks(program, [values.env[source] for source in sources], last.meta["val"].dtype)
        assert torch.equal(got, expected), count


def test_slices_cover_all_and_are_small() -> None:
    for threads in (1, 2, 3, 16):
        for count in (1, 1000, threads * GRAIN, 3 * threads * CHUNK + 7, 5 * threads * threads * CHUNK - 1):
            found = list(chunks(count, threads))
            assert [first for first, _ in found] == [0, *(end for _, end in found[:-1])]
            assert found[-1][1] == count
            if count >= FEWEST_CHUNKS * threads * CHUNK:
                assert max(end - first for first, end in found) < 2 * threads * CHUNK
