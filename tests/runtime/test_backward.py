"""A forward pass that is run again draws from the generators of all devices of its graph."""

from types import SimpleNamespace

import pytest
import torch
from torch import fx

from lowtide.ops import random_ops
from lowtide.runtime import backward


def test_every_device_of_a_graph_has_its_state_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    generators = {"cpu": torch.tensor([1]), "meta": torch.tensor([2])}
    monkeypatch.setattr(random_ops, "random_state", generators.__getitem__)
    monkeypatch.setattr(backward, "random_state", generators.__getitem__)
    monkeypatch.setattr(
        random_ops, "set_random_state", lambda state, device: generators.update({device: state})
    )
    graph = fx.Graph()
    graph.placeholder("x").meta["val"] = torch.empty(1, device="meta")
    graph.output([])
    calls = backward.FirstCalls(SimpleNamespace(joint=SimpleNamespace(graph=graph), mutated_inputs={}))
    start = calls.start_of([])
    generators["cpu"], generators["meta"] = torch.tensor([3]), torch.tensor([4])
    with random_ops.drawing_from(start.random_states):
        assert generators == {"cpu": torch.tensor([1]), "meta": torch.tensor([2])}
    assert generators == {"cpu": torch.tensor([3]), "meta": torch.tensor([4])}
