"""Every differentiable op of torch, by torch's own samples: a planned model that calls it equals eager's.

Needs `expecttest`, which torch's samples import.
"""

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils import _pytree as pytree

import lowtide

samples = pytest.importorskip("torch.testing._internal.common_methods_invocations")

pytestmark = pytest.mark.long

NUM_SAMPLES = 2
OPS = [op for op in samples.op_db if op.supports_autograd and torch.float32 in op.dtypes]
REFUSED = {"index_fill", "narrow"}
"""Ops that Dynamo skips with an index that is a tensor without dimensions, in one line."""


class Calls(nn.Module):
    """A model that calls an op with the tensors of a sample as its parameters and buffers."""

    def __init__(self, op: Any, sample: Any) -> None:
        super().__init__()
        self.op = op
        self.leaves, self.spec = pytree.tree_flatten((sample.input, sample.args, sample.kwargs))
        for i, leaf in enumerate(self.leaves):
            if isinstance(leaf, torch.Tensor):
                self.leaves[i] = None
                if leaf.requires_grad:
                    self.register_parameter(f"tensor{i}", nn.Parameter(leaf.detach().clone()))
                else:
                    self.register_buffer(f"tensor{i}", leaf)

    def forward(self, scale: torch.Tensor) -> Any:
        leaves = [
            1 * getattr(self, f"tensor{i}") if f"tensor{i}" in self._parameters else leaf
            for i, leaf in enumerate(getattr(self, f"tensor{i}", leaf) for i, leaf in enumerate(self.leaves))
        ]
        value, args, kwargs = pytree.tree_unflatten(leaves, self.spec)
        results = pytree.tree_leaves(self.op(value, *args, **kwargs))
        found = [each for each in results if isinstance(each, torch.Tensor) and each.requires_grad]
        return sum((each.abs() if each.is_complex() else each).square().mean() * scale for each in found)


def trained(model: nn.Module) -> list[torch.Tensor | None]:
    """The loss and all gradients of one step."""
    torch.manual_seed(3)
    loss = model(torch.ones(()))
    loss.backward()
    return [loss.detach(), *(parameter.grad for parameter in model.parameters())]


def are_equal(one: torch.Tensor | None, other: torch.Tensor | None) -> bool:
    if one is None or other is None:
        return one is other
    return torch.equal(one.nan_to_num(), other.nan_to_num())


@pytest.mark.parametrize("op", OPS, ids=[op.full_name for op in OPS])
def test_a_planned_op_equals_eagers(op: Any) -> None:
    found = list(op.sample_inputs("cpu", torch.float32, requires_grad=True))
    compared = 0
    for sample in found[:: max(1, len(found) // NUM_SAMPLES)][:NUM_SAMPLES]:
        try:
            plain = Calls(op.op, sample)
            planned = copy.deepcopy(plain)
            expected = trained(plain)
        except (RuntimeError, TypeError, AttributeError):
            continue  # eager cannot train this sample: sparse, without a gradient, not a parameter
        try:
            lowtide.checkpoint(planned, torch.ones(()), budget="1GiB")
        except lowtide.LowtideError:
            assert op.full_name in REFUSED
            continue
        assert all(are_equal(*pair) for pair in zip(expected, trained(planned), strict=True))
        compared += 1
    if not compared:
        pytest.skip("no sample of this op trains in eager")
