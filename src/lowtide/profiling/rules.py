"""Which values an op accepts: one table, by op and by the names of its schema's arguments.

A rule says for some arguments of an op in which range their values must lie: an index inside what
it indexes, a probability in [0, 1]. An entry of a list argument can have a range of its own.
What a rule does not mention is free.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

import torch


@dataclass(frozen=True, slots=True)
class Values:
    """Numbers from `low` up to, but without, `high`."""

    low: float
    high: float


Bound = Mapping[str, Any]
Rule = Callable[[Bound], dict[str, Any]]

_PROBABILITY = Values(0.05, 0.95)
_POSITIVE = Values(0.05, 1.0)


def values_for(op: str, bound: Bound) -> dict[str, Any]:
    """Ranges for some of the arguments in `bound`; `op` is a schema name, `aten::embedding`.

    An in-place op has the rules of the functional one.
    """
    return _RULES.get(op.removesuffix("_"), _no_rule)(bound)


def _no_rule(bound: Bound) -> dict[str, Any]:
    return {}


def _below(name: str, size: Callable[[Bound], int]) -> Rule:
    return lambda bound: {name: Values(0, size(bound))}


def _within(**values: Values) -> Rule:
    return lambda bound: dict(values)


def _along_dim(bound: Bound) -> dict[str, Any]:
    """`index` points along dimension `dim` of `self`."""
    shape = bound["self"].shape
    return {"index": Values(0, shape[bound["dim"]] if shape else 1)}


def _per_dim(bound: Bound) -> dict[str, Any]:
    """`indices` is a list with one entry per leading dimension; a mask stands for as many as it has."""
    wanted: list[Values | None] = []
    dim = 0
    for index in bound["indices"]:
        wanted.append(None if index is None else Values(0, bound["self"].shape[dim]))
        is_mask = index is not None and index.dtype in (torch.bool, torch.uint8)
        dim += index.ndim if is_mask else 1
    return {"indices": wanted}


def _classes(bound: Bound) -> int:
    shape = bound["self"].shape
    return int(shape[1] if len(shape) > 1 else shape[0])


def _plane(name: str, dims: int) -> Callable[[Bound], int]:
    """Elements of the last `dims` dimensions of argument `name`: what a pooling index counts in."""
    return lambda bound: prod(bound[name].shape[-dims:])


def _bag(bound: Bound) -> dict[str, Any]:
    return {"indices": Values(0, bound["weight"].shape[0]), "offsets": Values(0, 1)}


def _bag_backward(bound: Bound) -> dict[str, Any]:
    """No bag is empty, and every entry is of a row that there is."""
    rows = Values(0, bound["num_weights"])
    bags = Values(0, max(1, bound["bag_size"].shape[0]))
    return {"indices": rows, "maximum_indices": rows, "offset2bag": bags, "bag_size": Values(1, 2)}


def _reduced(bound: Bound) -> int:
    sizes = bound["sizes"]
    return int(sizes[bound["dim"]]) if sizes else 1


def _full_length(bound: Bound) -> dict[str, Any]:
    length = bound["input"].shape[1 if bound["batch_first"] else 0]
    return {"lengths": Values(length, length + 1)}


def _one_group(bound: Bound) -> dict[str, Any]:
    """All rows belong to the first group; `offs` says where each group ends."""
    one, other = bound["self"], bound["mat2"]
    rows = other.shape[-1] if one.ndim > other.ndim else one.shape[0 if one.ndim < other.ndim else 1]
    return {"offs": Values(rows, rows + 1)}


def _shared_out(name: str, total: Callable[[Bound], int | None]) -> Rule:
    """Argument `name` has parts of a total, all alike; free where that cannot be divided so."""

    def rule(bound: Bound) -> dict[str, Any]:
        parts, whole = bound.get(name), total(bound)
        if parts is None or whole is None or not parts.numel() or whole % parts.numel():
            return {}
        each = whole // parts.numel()
        return {name: Values(each, each + 1)}

    return rule


def _rows(bound: Bound) -> int | None:
    """Of the data whose rows are divided into segments; None where each of several rows has its own."""
    return (
        int(bound["data"].shape[0]) if bound["lengths"] is not None and bound["lengths"].ndim == 1 else None
    )


def _targets(bound: Bound) -> dict[str, Any]:
    return {"target": Values(0, _classes(bound)), "is_target": _PROBABILITY}


_ALONG_DIM = "gather scatter scatter_add scatter_reduce index_select index_add index_copy index_fill"
_PER_DIM = "index index_put _unsafe_index _unsafe_index_put _index_put_impl _unsafe_masked_index"
_CLASSES = (
    "nll_loss nll_loss_forward nll_loss_backward nll_loss2d nll_loss2d_forward nll_loss2d_backward "
    "nll_loss_nd cross_entropy_loss multi_margin_loss multi_margin_loss_backward "
    "multilabel_margin_loss_forward"
)
_DIVISOR = "div floor_divide remainder fmod"

_RULES: dict[str, Rule] = {
    **{f"aten::{name}": _along_dim for name in _ALONG_DIM.split()},
    **{f"aten::{name}": _per_dim for name in _PER_DIM.split()},
    **{f"aten::{name}": _below("target", _classes) for name in _CLASSES.split()},
    **{f"aten::{name}": _within(other=Values(1, 2)) for name in _DIVISOR.split()},
    "aten::embedding": _below("indices", lambda bound: bound["weight"].shape[0]),
    "aten::embedding_renorm": _below("indices", lambda bound: bound["self"].shape[0]),
    "aten::embedding_dense_backward": _below("indices", lambda bound: bound["num_weights"]),
    "aten::embedding_backward": _below("indices", lambda bound: bound["num_weights"]),
    "aten::_embedding_bag": _bag,
    "aten::_embedding_bag_forward_only": _bag,
    "aten::_embedding_bag_backward": _bag_backward,
    "aten::repeat_interleave": _shared_out("repeats", lambda bound: bound.get("output_size")),
    "aten::segment_reduce": _shared_out("lengths", _rows),
    "aten::_segment_reduce_backward": _shared_out("lengths", _rows),
    "aten::masked_scatter": _within(mask=Values(0, 1)),
    "aten::masked_scatter_backward": _within(mask=Values(0, 1)),
    "aten::multilabel_margin_loss_backward": _targets,
    "aten::one_hot": _below("self", lambda bound: max(bound["num_classes"], 2)),
    "aten::take": _below("index", lambda bound: bound["self"].numel()),
    "aten::put": _below("index", lambda bound: bound["self"].numel()),
    "aten::value_selecting_reduction_backward": _below("indices", _reduced),
    "aten::max_pool2d_with_indices_backward": _below("indices", _plane("self", 2)),
    "aten::max_pool3d_with_indices_backward": _below("indices", _plane("self", 3)),
    "aten::adaptive_max_pool2d_backward": _below("indices", _plane("self", 2)),
    "aten::adaptive_max_pool3d_backward": _below("indices", _plane("self", 3)),
    "aten::fractional_max_pool2d_backward": _below("indices", _plane("self", 2)),
    "aten::fractional_max_pool3d_backward": _below("indices", _plane("self", 3)),
    "aten::max_unpool2d": _below("indices", lambda bound: prod(bound["output_size"])),
    "aten::max_unpool3d": _below("indices", lambda bound: prod(bound["output_size"])),
    "aten::_ctc_loss": lambda bound: {"targets": Values(1, bound["log_probs"].shape[-1])},
    "aten::_grouped_mm": _one_group,
    "aten::_pack_padded_sequence": _full_length,
    "aten::bernoulli": _within(self=_PROBABILITY, p=_PROBABILITY),
    "aten::binary_cross_entropy": _within(self=_PROBABILITY, target=_PROBABILITY),
    "aten::binary_cross_entropy_backward": _within(self=_PROBABILITY, target=_PROBABILITY),
    "aten::multinomial": _within(self=_PROBABILITY),
    "aten::poisson": _within(self=_POSITIVE),
    "aten::normal": _within(std=_POSITIVE),
    "aten::sqrt": _within(self=_POSITIVE),
    "aten::rsqrt": _within(self=_POSITIVE),
    "aten::log": _within(self=_POSITIVE),
    "aten::_foreach_sqrt": _within(self=_POSITIVE),
    "aten::_fused_adam": _within(exp_avg_sqs=_POSITIVE, max_exp_avg_sqs=_POSITIVE, state_steps=Values(1, 2)),
    "aten::_fused_adamw": _within(exp_avg_sqs=_POSITIVE, max_exp_avg_sqs=_POSITIVE, state_steps=Values(1, 2)),
    "aten::linalg_lu_solve": _within(pivots=Values(1, 2)),
    "aten::lu_unpack": _within(LU_pivots=Values(1, 2)),
    "aten::_linalg_check_errors": _within(info=Values(0, 1)),
    "aten::native_batch_norm": _within(running_var=_POSITIVE),
    "aten::_native_batch_norm_legit": _within(running_var=_POSITIVE),
    "aten::_native_batch_norm_legit_functional": _within(running_var=_POSITIVE),
    "aten::native_batch_norm_backward": _within(running_var=_POSITIVE, save_invstd=_POSITIVE),
}
