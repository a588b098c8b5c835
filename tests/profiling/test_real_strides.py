"""Layouts of real results where fake ones differ: found by one run, handed on to all that read them."""

import operator

import pytest
import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode

from lowtide.profiling import real_strides as layouts_module
from lowtide.profiling.cache import CostCache
from lowtide.profiling.devices import device_for
from lowtide.profiling.real_strides import real_values

aten = torch.ops.aten
CPU = torch.device("cpu")
SHAPE = (4, 6, 10)
TRANSPOSED = (60, 1, 6)
CONTIGUOUS = (60, 10, 1)


def graph_of(build, *inputs):
    """Nodes by name of the graph that `build(call, *inputs)` makes, with fake values of a fake run."""
    graph = fx.Graph()
    with FakeTensorMode():

        def call(name, target, *args):
            node = graph.call_function(target, args, name=name)
            node.meta["val"] = target(*fx.node.map_arg(args, lambda read: read.meta["val"]))
            return node

        sources = []
        for position, strides in enumerate(inputs):
            source = graph.placeholder(f"input_{position}")
            source.meta["val"] = torch.empty_strided(SHAPE, strides)
            sources.append(source)
        build(call, *sources)
    return {node.name: node for node in graph.nodes}


def elu_chain(call, gradient, result):
    back = call("back", aten.elu_backward.default, gradient, 1.0, 1.0, 1.0, True, result)
    turned = call("turned", aten.transpose.int, back, 1, 2)
    call("sine", aten.sin.default, turned)
    call("other", aten.sin.default, result)


@pytest.mark.parametrize("limit", [1 << 20, 1000])
def test_a_wrong_layout_is_corrected_in_all_that_follows(limit):
    nodes = graph_of(elu_chain, TRANSPOSED, CONTIGUOUS)
    assert nodes["back"].meta["val"].stride() == CONTIGUOUS
    before = torch.get_rng_state()
    values = real_values(nodes.values(), device=CPU, limit_bytes=limit)
    strides = {node.name: value.stride() for node, value in values.items()}
    assert strides == {"back": TRANSPOSED, "turned": (60, 6, 1), "sine": (60, 6, 1)}
    back, turned = values[nodes["back"]], values[nodes["turned"]]
    assert back.untyped_storage()._cdata == turned.untyped_storage()._cdata
    assert torch.equal(before, torch.get_rng_state())


def test_one_result_of_several_is_corrected():
    def build(call, gradient, value):
        rows = call("rows", aten.mean.dim, value, [2], True)
        args = (gradient, value, [10], rows, rows, None, None, [True, False, False])
        first = call("first", operator.getitem, call("back", BACK, *args), 0)
        call("sine", aten.sin.default, first)

    nodes = graph_of(build, TRANSPOSED, CONTIGUOUS)
    values = real_values(nodes.values(), device=CPU, limit_bytes=1 << 20)
    assert nodes["first"].meta["val"].stride() == TRANSPOSED
    assert values[nodes["first"]].stride() == values[nodes["sine"]].stride() == CONTIGUOUS
    assert values[nodes["back"]][1:] == nodes["back"].meta["val"][1:] == (None, None)


BACK = aten.native_layer_norm_backward.default


@pytest.mark.parametrize("strides", [(CONTIGUOUS, CONTIGUOUS), (TRANSPOSED, TRANSPOSED)])
def test_right_layouts_are_left_alone(strides):
    nodes = graph_of(elu_chain, *strides)
    assert real_values(nodes.values(), device=CPU, limit_bytes=1 << 20) == {}


def refuses(tensor):
    if not isinstance(tensor, torch._subclasses.FakeTensor):
        raise RuntimeError("not on random data")
    return tensor.contiguous()


def test_what_cannot_run_keeps_its_layout():
    nodes = graph_of(lambda call, source: call("made", refuses, source), TRANSPOSED)
    assert real_values(nodes.values(), device=CPU, limit_bytes=1 << 20) == {}


def test_layouts_are_remembered_on_disk(tmp_path, monkeypatch):
    def strides(cache):
        nodes = graph_of(elu_chain, TRANSPOSED, CONTIGUOUS)
        values = real_values(nodes.values(), device=CPU, limit_bytes=1 << 20, cache=cache)
        return {node.name: value.stride() for node, value in values.items()}

    first = strides(CostCache(device_for(CPU), directory=tmp_path))
    monkeypatch.setattr(layouts_module, "_real_orders", lambda *args, **options: pytest.fail("run again"))
    assert strides(CostCache(device_for(CPU), directory=tmp_path)) == first != {}
