"""Norms of a narrow input with wide weights, as autocast makes them on CPU.

Products of groups of rows, each with a matrix of its own: how experts are called in one op.
"""

import contextlib
import operator
import unittest.mock
from collections.abc import Iterator
from typing import Any

import torch
from torch import _meta_registrations as registrations
from torch import fx

aten = torch.ops.aten

WEIGHTS = {
    aten.native_layer_norm.default: (2,),
    aten._native_batch_norm_legit_functional.default: (1, 3),
    aten.native_group_norm.default: (1,),
}
"""Norms whose second and third results are mean and inverse deviation, and which arguments give those their
type, the first that is there: the weight, the running mean."""


def use_real_types(graph: fx.Graph) -> None:
    """Give mean and inverse deviation the type that the kernel gives them: that of the weight, where fake
    tensors say that of the input. Only what is known of their types changes."""
    for target, places in WEIGHTS.items():
        for node in graph.find_nodes(op="call_function", target=target):
            given = [node.args[place] for place in places]
            weight = next((each for each in given if isinstance(each, fx.Node)), None)
            if weight is not None and node.meta["val"][0].device.type == "cpu":
                _set_type(node, weight.meta["val"].dtype)


def _set_type(norm: fx.Node, dtype: torch.dtype) -> None:
    values = list(norm.meta["val"])
    if values[1].dtype is dtype:
        return
    with values[1].fake_mode:
        values[1:3] = [torch.empty_like(value, dtype=dtype) for value in values[1:3]]
    norm.meta["val"] = tuple(values)
    for item in norm.users:
        for index in (1, 2):
            if item.target is operator.getitem and item.args[1] == index:
                _set_value(item, values[index])


def _set_value(node: fx.Node, value: torch.Tensor) -> None:
    node.meta["val"] = value
    for user in node.users:
        if user.target is aten.detach.default:
            _set_value(user, value)


TORCHS = registrations._meta_grouped_mm_common


@contextlib.contextmanager
def grouped_products_of_any_type() -> Iterator[None]:
    """Let torch trace grouped products of all types that eager computes, and not of bfloat16 alone."""
    with unittest.mock.patch.object(registrations, "_meta_grouped_mm_common", _result):
        yield


def _result(mat_a: torch.Tensor, mat_b: torch.Tensor, **options: Any) -> Any:
    if options["scale_a"] is not None or mat_a.dtype is torch.bfloat16:
        return TORCHS(mat_a, mat_b, **options)
    make: Any = registrations._create_grouped_mm_output_tensor
    return make(mat_a, mat_b, options["offs"], options["out_dtype"])
