"""A graph is known again in the same setting, and in no other."""

import pytest
import torch
from torch import fx

from lowtide.torch_compat import aot_autograd
from lowtide.trace.identity import key_of


@pytest.fixture
def graph():
    graph = fx.Graph()
    graph.output(graph.call_function(torch.zeros, (3,)))
    return fx.GraphModule({}, graph)


def test_a_setting_of_autocast_is_part_of_the_key_on_every_type_of_device(graph):
    plain = key_of(graph)
    assert plain == key_of(graph) and plain is not None
    for kind in ("cpu", "cuda", "xpu"):
        before = torch.get_autocast_dtype(kind)
        torch.set_autocast_dtype(kind, torch.float16 if before is torch.bfloat16 else torch.bfloat16)
        try:
            assert key_of(graph) != plain, kind
        finally:
            torch.set_autocast_dtype(kind, before)
    assert key_of(graph) == plain


def test_a_compiled_graph_is_known_by_what_made_it():
    class CompiledFunction(torch.autograd.Function):
        """The user's own, of the same name."""

        @staticmethod
        def forward(ctx, x):
            return x * 2

        @staticmethod
        def backward(ctx, grad):
            return grad * 2

    x = torch.ones(2, requires_grad=True)
    torch._dynamo.reset()  # torch compiles only so many functions that are not of Python
    assert not aot_autograd.is_compiled_graph(CompiledFunction.apply(x).grad_fn)
    assert aot_autograd.is_compiled_graph(torch.compile(torch.sin, backend="aot_eager")(x).grad_fn)
