"""The same op on the same inputs."""

import operator
from typing import Any

import torch
from torch import fx

from lowtide.ops.calls import Call
from lowtide.ops.eager_batch_norm import eager_batch_norm
from lowtide.ops.head_chunks import HEAD_OPS
from lowtide.ops.loss_chunks import log_probabilities
from lowtide.ops.random_ops import dropout_output, is_random
from lowtide.ops.recurrent import RUNS_ONCE, recurrent_layer
from lowtide.ops.recurrent_cells import CELLS
from lowtide.ops.recurrent_stack import DRAWN_ONCE, STACK, draws_dropout
from lowtide.ops.repeatable_ops import functionalized, is_named
from lowtide.ops.schema import is_view_op, talks_to_others, writes_inputs
from lowtide.remat import batch_norm
from lowtide.remat.rule import Kept, RematRule
from lowtide.torch_compat.dispatch import OpOverload, is_number

REPEATABLE_NAMESPACES = {"aten", "prims", "mkldnn", "mkl", "onednn"}
"""Ops of these namespaces give the same result twice."""

UNKNOWN = "a custom op: not known to give the same result twice (see lowtide.repeatable)"
WRITES = "writes to one of its inputs"


class Recompute(RematRule):
    name = "again"
    words = "recomputed"
    costs_as_first = True

    def why_not(self, node: fx.Node) -> str | None:
        if is_random(node) or batch_norm.counts_statistics(node) or dropout_output(node) is not None:
            return None  # other rules fit these
        if node.target is operator.getitem:
            return batch_norm.COUNTED_ONCE if batch_norm.is_statistic(node) else ""
        return reason_unrepeatable(node)

    def call(self, node: fx.Node, kept: tuple[Kept, ...]) -> Call:
        assert callable(node.target)
        return Call(node.target, node.args, node.kwargs)


def reason_unrepeatable(node: fx.Node) -> str:
    """Why a second run of an op would not give the same result; empty when it would."""
    target = node.target
    if node.op == "placeholder":
        return "an input of the step"
    if node.op == "get_attr":
        return "a constant"
    if target is recurrent_layer:
        return RUNS_ONCE
    if target in (log_probabilities, eager_batch_norm, *HEAD_OPS):
        return ""
    if functionalized(target, node.args) is not None:
        return WRITES
    if not isinstance(target, OpOverload):
        return "a higher-order op"
    if writes_inputs(target):
        return WRITES
    if talks_to_others(target):
        return "talks to other processes"
    if target is STACK:
        return DRAWN_ONCE if draws_dropout(node) else ""
    if is_foreign(target):
        return _reason_foreign(node, target)
    if node.kwargs.get("generator") is not None:
        return "draws from a generator of its own"
    if not _makes_tensors(node.meta.get("val")):
        return "does not make tensors"
    return ""


def is_foreign(target: OpOverload[..., Any]) -> bool:
    """Whether an op belongs to another library than torch."""
    return target.namespace not in REPEATABLE_NAMESPACES and target is not CELLS


def _reason_foreign(node: fx.Node, target: OpOverload[..., Any]) -> str:
    """What the schema of another library's op says; what only a run shows is tried while profiling."""
    if not is_named(target):
        return UNKNOWN
    if is_random(node):
        return "draws random numbers"
    if is_view_op(target):
        return "returns memory of its inputs"
    return "" if _makes_tensors(node.meta.get("val")) else "does not make tensors"


def _makes_tensors(value: Any) -> bool:
    """Whether results are tensors; numbers may be among them, as for attention in one op."""
    if isinstance(value, (list, tuple)):
        rest = [item for item in value if not (item is None or isinstance(item, int) or is_number(item))]
        return bool(rest or not value) and all(_makes_tensors(item) for item in rest)
    return isinstance(value, torch.Tensor)
