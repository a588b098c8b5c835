"""Facts of an op by its schema; readers of a value, directly or through views."""

import operator
from collections.abc import Iterator
from typing import Any

import torch
from torch import fx
from torch.utils.flop_counter import flop_registry

from lowtide.ops.calls import Call
from lowtide.torch_compat.dispatch import OpOverload, can_decompose, packet_name, packet_of, schema_of

READS_VALUES = (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.equal.default)
"""Ops that give a number or a truth value of Python."""


COLLECTIVES = ("_c10d_functional", "c10d_functional", "c10d")
"""Namespaces of the ops by which processes talk to each other."""


def writes_inputs(target: Any) -> bool:
    """Whether an op writes to one of its arguments."""
    return isinstance(target, OpOverload) and bool(schema_of(target).is_mutable)


def talks_to_others(target: Any) -> bool:
    """Whether an op waits for other processes, which all have to run it."""
    return isinstance(target, OpOverload) and target.namespace in COLLECTIVES


def schema_name(target: Any) -> str:
    """`aten::embedding`; empty for a target without schema."""
    return str(schema_of(target).name) if isinstance(target, OpOverload) else ""


def short_name(target: Any) -> str:
    """`embedding` for an op of any overload."""
    return packet_name(target)


def may_have_flops(target: Any) -> bool:
    """Whether torch counts flops for an op, or for an op of its decomposition."""
    if not isinstance(target, OpOverload):
        return False
    return packet_of(target) in flop_registry or can_decompose(target)


def bound_arguments(call: Call) -> tuple[list[str], dict[str, Any]]:
    """Names of a call's positional arguments, and all arguments by name, defaults included."""
    if not isinstance(call.target, OpOverload):
        return [str(index) for index in range(len(call.args))], {}
    arguments = schema_of(call.target).arguments
    names = [argument.name for argument in arguments][: len(call.args)]
    bound = {argument.name: argument.default_value for argument in arguments}
    return names, bound | dict(zip(names, call.args, strict=True)) | call.kwargs


def is_view(call: Call) -> bool:
    """Whether the call only returns views of its inputs, by its schema, and writes nothing."""
    return call.target is operator.getitem or is_view_op(call.target)


def is_view_op(target: Any) -> bool:
    """Whether an op's result is a view of one tensor."""
    if not isinstance(target, OpOverload):
        return False
    schema = schema_of(target)
    writes = any(arg.alias_info is not None and arg.alias_info.is_write for arg in schema.arguments)
    return not writes and bool(schema.returns) and all(ret.alias_info is not None for ret in schema.returns)


def argument_names(target: Any) -> list[str]:
    """The names of an op's arguments, in order."""
    return [argument.name for argument in schema_of(target).arguments]


def readers(value: fx.Node) -> Iterator[tuple[fx.Node, fx.Node]]:
    """Every node, except views, that reads `value` or a view of it, with the node that it reads."""
    stack = [value]
    while stack:
        one = stack.pop()
        for user in one.users:
            if is_view_op(user.target):
                stack.append(user)
            else:
                yield user, one


def is_backward(node: fx.Node) -> bool:
    """Whether torch made a node for the backward pass."""
    return str(node.meta.get("partitioner_tag", "")) == "is_backward"


def read_in_backward(value: fx.Node) -> bool:
    return any(is_backward(reader) for reader, _ in readers(value))
