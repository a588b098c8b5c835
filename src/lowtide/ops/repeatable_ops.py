"""Ops of other libraries that a plan may run again: a list of well-known ones, and those that the user names.

A name alone is no permission. `profiling.repeat_trials` tries each such op before a plan may use it; what any
run shows (other bits, inputs or a random state that changed) counts more than the name.

The names of bitsandbytes and torchao are those of versions 0.50 and 0.18; the others need a GPU and were
taken from their libraries' sources.
"""

import difflib
import re
from collections.abc import Iterable
from typing import Any

import torch

from lowtide.errors import LowtideError
from lowtide.torch_compat.dispatch import OpOverload, ops_in, overload_behind, schema_of

_NAME = re.compile(r"(\w+)::(\w+)(?:\.(\w+))?")

# fmt: off
_BY_NAMESPACE = {
    "bitsandbytes": (
        "dequantize_4bit", "dequantize_blockwise", "gemm_4bit", "gemv_4bit", "int8_double_quant",
        "int8_linear_matmul", "int8_mixed_scaled_mm", "int8_mm_dequant", "int8_scaled_mm",
        "int8_vectorwise_dequant", "int8_vectorwise_quant", "quantize_4bit", "quantize_blockwise",
    ),
    "flash_attn": ("_flash_attn_forward", "_flash_attn_varlen_forward"),
    "flash_attn_3": ("_flash_attn_forward",),
    "torchao": (
        "blockwise_scaled_mm", "da8w4_linear_cpu", "float8_linear_cpu", "mxfp8_quantize", "scaled_int8_mm",
        "triton_to_mxfp8_dim0", "triton_to_mxfp8_dim1",
    ),
    "torchvision": ("deform_conv2d", "nms", "ps_roi_align", "ps_roi_pool", "roi_align", "roi_pool"),
    "xformers_flash": ("flash_fwd",),
    "xformers_flash3": ("flash_fwd",),
}
# fmt: on

WELL_KNOWN = frozenset(f"{space}::{name}" for space, names in _BY_NAMESPACE.items() for name in names)
"""Ops that give the same result for the same inputs, by what their libraries say."""

_stated: dict[str, None] = {}


def repeatable(*ops: Any) -> None:
    """Let plans run these custom ops again in the backward pass, instead of keeping what they make.

    A custom op may do anything, so by default a plan keeps its results. An op named here is first tried while
    profiling: run several times on the same inputs, it must give the same bits, leave its inputs and all
    random states alone, and return memory of its own each time. An op that fails is kept as before, with the
    reason in `Plan.decisions` and in a note. The statement holds for this process, and a plan carries it to
    the processes that load the plan. Call this before `profile` or `checkpoint`, on every rank.

    Args:
        ops: Names as torch registers them (`"namespace::op"`, or `"namespace::op.overload"` for one
            overload), or the ops themselves (`torch.ops.namespace.op`, what `torch.library.custom_op` makes).
    """
    add_statements([_name_of(op) for op in ops])


def add_statements(names: Iterable[str]) -> None:
    """Take over names that were checked where they were said, as a plan from a file has them."""
    _stated.update(dict.fromkeys(names))


def stated() -> tuple[str, ...]:
    """What the user named in this process, in alphabetical order."""
    return tuple(sorted(_stated))


def is_named(op: Any) -> bool:
    """Whether an op of another library may be tried."""
    return bool(statement_of(op)) or full_name(op) in WELL_KNOWN


def statement_of(op: Any) -> str:
    """The name by which the user stated this op; empty where it was not."""
    schema = schema_of(op)
    overload = f"{schema.name}.{schema.overload_name or 'default'}"
    return next((name for name in (schema.name, overload) if name in _stated), "")


def full_name(op: Any) -> str:
    """`namespace::op`, without its overload."""
    return str(schema_of(op).name)


def functionalized(target: Any, args: tuple[Any, ...]) -> OpOverload[..., Any] | None:
    """The op that writes to its inputs, inside of the functional form in which torch captures it."""
    is_form = str(getattr(target, "__name__", "")).startswith("auto_functionalized")
    return args[0] if is_form and args and isinstance(args[0], OpOverload) else None


def _name_of(op: Any) -> str:
    if isinstance(op, OpOverload):
        return f"{schema_of(op).name}.{schema_of(op).overload_name or 'default'}"
    if isinstance(op, str):
        return _checked(op)
    overload = overload_behind(op)
    if overload is not None:
        return full_name(overload)
    raise LowtideError(
        f"repeatable() needs an op of torch's registry, not a {type(op).__name__}: write 'namespace::op', as "
        'in torch.library.custom_op("namespace::op", ...)'
    )


def _checked(name: str) -> str:
    found = _NAME.fullmatch(name.strip())
    if found is None:
        raise LowtideError(
            f"cannot read the op {name!r}: write 'namespace::op' or 'namespace::op.overload', as torch "
            "registers it"
        )
    space, short, overload = found.groups()
    packet = getattr(getattr(torch.ops, space), short, None)
    if packet is None:
        near = difflib.get_close_matches(short, ops_in(space), n=1)
        hint = f"did you mean '{space}::{near[0]}'?" if near else "import the library that registers it first"
        raise LowtideError(f"there is no op '{space}::{short}' in this process: {hint}")
    if overload is not None and overload not in packet.overloads():
        raise LowtideError(
            f"'{space}::{short}' has no overload '{overload}': it has {', '.join(packet.overloads())}"
        )
    return name.strip()
