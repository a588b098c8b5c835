"""Random inputs with the shapes and strides of a call, and with values that its op accepts.

Floats are in [-1, 1) and integers are 0 or 1, unless the op has a rule. The table `_RULES` has ranges by op
and argument name: an index must be below the size of the indexed dimension, a probability in [0, 1]. An entry
of a list argument can have its own range.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from math import prod
from typing import Any

import torch
from torch import Tensor

from lowtide.ops.calls import Call, span_elements
from lowtide.ops.eager_batch_norm import with_real_reserve
from lowtide.ops.recurrent import valid_batch_sizes, with_forward_results
from lowtide.ops.recurrent_stack import with_recorded_graph
from lowtide.ops.schema import bound_arguments, schema_name
from lowtide.torch_compat.dispatch import storage_key


@dataclass(frozen=True, slots=True)
class AllowedValues:
    """Numbers from `low` up to, but without, `high`."""

    low: float
    high: float


Bound = Mapping[str, Any]
Rule = Callable[[Bound], dict[str, Any]]

_PROBABILITY = AllowedValues(0.05, 0.95)
_POSITIVE = AllowedValues(0.05, 1.0)


def values_for(op: str, bound: Bound) -> dict[str, Any]:
    """Ranges for some of the arguments in `bound`; `op` is a schema name, `aten::embedding`.

    An in-place op has the rules of the functional one.
    """
    return _RULES.get(op.removesuffix("_"), _no_rule)(bound)


def _no_rule(bound: Bound) -> dict[str, Any]:
    return {}


def _below(name: str, size: Callable[[Bound], int]) -> Rule:
    return lambda bound: {name: AllowedValues(0, size(bound))}


def _within(**values: AllowedValues) -> Rule:
    return lambda bound: dict(values)


def _along_dim(bound: Bound) -> dict[str, Any]:
    """`index` points along dimension `dim` of `self`."""
    shape = bound["self"].shape
    return {"index": AllowedValues(0, shape[bound["dim"]] if shape else 1)}


def _per_dim(bound: Bound) -> dict[str, Any]:
    """`indices` is a list with one entry per leading dimension; a mask stands for as many as it has."""
    wanted: list[AllowedValues | None] = []
    dim = 0
    for index in bound["indices"]:
        wanted.append(None if index is None else AllowedValues(0, bound["self"].shape[dim]))
        is_mask = index is not None and index.dtype in (torch.bool, torch.uint8)
        dim += index.ndim if is_mask else 1
    return {"indices": wanted}


def _classes(bound: Bound) -> int:
    shape = bound["self"].shape
    return int(shape[1] if len(shape) > 1 else shape[0])


def _plane(name: str, dims: int) -> Callable[[Bound], int]:
    """Elements of the last `dims` dimensions of argument `name`: the range of a pooling index."""
    return lambda bound: prod(bound[name].shape[-dims:])


def _bag(bound: Bound) -> dict[str, Any]:
    return {"indices": AllowedValues(0, bound["weight"].shape[0]), "offsets": AllowedValues(0, 1)}


def _bag_backward(bound: Bound) -> dict[str, Any]:
    """No bag is empty, and every entry is of an existing row."""
    rows = AllowedValues(0, bound["num_weights"])
    bags = AllowedValues(0, max(1, bound["bag_size"].shape[0]))
    return {"indices": rows, "maximum_indices": rows, "offset2bag": bags, "bag_size": AllowedValues(1, 2)}


def _reduced(bound: Bound) -> int:
    sizes = bound["sizes"]
    return int(sizes[bound["dim"]]) if sizes else 1


def _full_length(bound: Bound) -> dict[str, Any]:
    length = bound["input"].shape[1 if bound["batch_first"] else 0]
    return {"lengths": AllowedValues(length, length + 1)}


def _one_group(bound: Bound) -> dict[str, Any]:
    """All rows belong to the first group; `offs` says where each group ends."""
    one, other = bound["self"], bound["mat2"]
    rows = other.shape[-1] if one.ndim > other.ndim else one.shape[0 if one.ndim < other.ndim else 1]
    return {"offs": AllowedValues(rows, rows + 1)}


def _shared_out(name: str, total: Callable[[Bound], int | None]) -> Rule:
    """Argument `name` has equal parts of a total; free where the total cannot be divided."""

    def rule(bound: Bound) -> dict[str, Any]:
        parts, whole = bound.get(name), total(bound)
        if parts is None or whole is None or not parts.numel() or whole % parts.numel():
            return {}
        each = whole // parts.numel()
        return {name: AllowedValues(each, each + 1)}

    return rule


def _rows(bound: Bound) -> int | None:
    """Of the data whose rows are divided into segments; None where each of several rows has its own."""
    return (
        int(bound["data"].shape[0]) if bound["lengths"] is not None and bound["lengths"].ndim == 1 else None
    )


def _targets(bound: Bound) -> dict[str, Any]:
    return {"target": AllowedValues(0, _classes(bound)), "is_target": _PROBABILITY}


_ALONG_DIM = "gather scatter scatter_add scatter_reduce index_select index_add index_copy index_fill"
_PER_DIM = "index index_put _unsafe_index _unsafe_index_put _index_put_impl _unsafe_masked_index"
_CLASSES = (
    "nll_loss nll_loss_forward nll_loss_backward nll_loss2d nll_loss2d_forward nll_loss2d_backward "
    "nll_loss_nd cross_entropy_loss multi_margin_loss multi_margin_loss_backward "
    "multilabel_margin_loss_forward"
)
_DIVISOR = "div floor_divide remainder fmod"
_ROWS_OF_WEIGHT = "embedding_dense_backward embedding_backward"
_POOLS = ("max_pool{}d_with_indices", "adaptive_max_pool{}d", "fractional_max_pool{}d")
_POSITIVE_INPUT = "sqrt rsqrt log poisson _foreach_sqrt"
_NORMS = "native_batch_norm _native_batch_norm_legit _native_batch_norm_legit_functional"
_ADAM = _within(exp_avg_sqs=_POSITIVE, max_exp_avg_sqs=_POSITIVE, state_steps=AllowedValues(1, 2))


def _same(names: str, rule: Rule) -> dict[str, Rule]:
    return {f"aten::{name}": rule for name in names.split()}


_RULES: dict[str, Rule] = {
    **_same(_ALONG_DIM, _along_dim),
    **_same(_PER_DIM, _per_dim),
    **_same(_CLASSES, _below("target", _classes)),
    **_same(_DIVISOR, _within(other=AllowedValues(1, 2))),
    **_same(_ROWS_OF_WEIGHT, _below("indices", lambda bound: bound["num_weights"])),
    **_same("_embedding_bag _embedding_bag_forward_only", _bag),
    **_same("segment_reduce _segment_reduce_backward", _shared_out("lengths", _rows)),
    **_same("masked_scatter masked_scatter_backward", _within(mask=AllowedValues(0, 1))),
    **_same("take put", _below("index", lambda bound: bound["self"].numel())),
    **_same("max_unpool2d max_unpool3d", _below("indices", lambda bound: prod(bound["output_size"]))),
    **_same(
        "binary_cross_entropy binary_cross_entropy_backward", _within(self=_PROBABILITY, target=_PROBABILITY)
    ),
    **_same(_POSITIVE_INPUT, _within(self=_POSITIVE)),
    **_same("_fused_adam _fused_adamw", _ADAM),
    **_same(_NORMS, _within(running_var=_POSITIVE)),
    **{
        f"aten::{pool.format(dims)}_backward": _below("indices", _plane("self", dims))
        for pool in _POOLS
        for dims in (2, 3)
    },
    "aten::embedding": _below("indices", lambda bound: bound["weight"].shape[0]),
    "aten::embedding_renorm": _below("indices", lambda bound: bound["self"].shape[0]),
    "aten::_embedding_bag_backward": _bag_backward,
    "aten::repeat_interleave": _shared_out("repeats", lambda bound: bound.get("output_size")),
    "aten::multilabel_margin_loss_backward": _targets,
    "aten::one_hot": _below("self", lambda bound: max(bound["num_classes"], 2)),
    "aten::value_selecting_reduction_backward": _below("indices", _reduced),
    "aten::_ctc_loss": lambda bound: {"targets": AllowedValues(1, bound["log_probs"].shape[-1])},
    "aten::_grouped_mm": _one_group,
    "aten::_pack_padded_sequence": _full_length,
    "aten::bernoulli": _within(self=_PROBABILITY, p=_PROBABILITY),
    "aten::multinomial": _within(self=_PROBABILITY),
    "aten::normal": _within(std=_POSITIVE),
    "aten::linalg_lu_solve": _within(pivots=AllowedValues(1, 2)),
    "aten::lu_unpack": _within(LU_pivots=AllowedValues(1, 2)),
    "aten::_linalg_check_errors": _within(info=AllowedValues(0, 1)),
    "aten::native_batch_norm_backward": _within(running_var=_POSITIVE, save_invstd=_POSITIVE),
}

_TILE_ELEMENTS = 1 << 14

SAMPLE_EXTRA_BYTES = 3 * _TILE_ELEMENTS * 8
"""The most bytes that are live beyond the sample itself while it is made."""


def make_sample(call: Call, *, fill: bool = True, seed: int = 0) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Real arguments for the call: same sizes, strides, dtypes, devices and sharing of storages.

    Without `fill` the memory is not written, which is enough for a view. The global random state is neither
    read nor changed.
    """
    names, bound = bound_arguments(call)
    rule = values_for(schema_name(call.target), bound)
    smallest = min((int(size) for tensor in call.tensors for size in tensor.shape if size), default=1)
    maker = _Maker(_allocate(call.tensors), AllowedValues(0, min(2, smallest)), seed if fill else None)
    args = tuple(maker.make(arg, rule.get(name)) for name, arg in zip(names, call.args, strict=True))
    kwargs = {key: maker.make(arg, rule.get(key)) for key, arg in call.kwargs.items()}
    args = with_real_reserve(call, with_forward_results(call, args))
    return with_recorded_graph(call, valid_batch_sizes(call, args)), kwargs


@dataclass
class _Maker:
    """Turns arguments into real ones, and fills each storage once.

    This is a class because a recursive closure is a reference cycle, which keeps its memory live.
    """

    bases: dict[int, tuple[Tensor, int]]
    integers: AllowedValues
    seed: int | None
    filled: set[int] = field(default_factory=set)

    def make(self, value: Any, wanted: Any) -> Any:
        if isinstance(value, Tensor):
            return self.tensor(value, wanted)
        if isinstance(value, (list, tuple)):
            each = wanted if isinstance(wanted, list) else [wanted] * len(value)
            items = [self.make(item, want) for item, want in zip(value, each, strict=True)]
            return items if isinstance(value, list) else tuple(items)
        if isinstance(value, dict):
            return {key: self.make(item, wanted) for key, item in value.items()}
        return value

    def tensor(self, like: Tensor, wanted: AllowedValues | None) -> Tensor:
        key = storage_key(like)
        base, start = self.bases[key]
        flat = base.view(like.dtype)
        if self.seed is not None and key not in self.filled:
            self.filled.add(key)
            generator = torch.Generator(like.device).manual_seed(self.seed + len(self.filled))
            _fill(flat, wanted or _default(like.dtype, self.integers), generator)
        made = flat.as_strided(like.shape, like.stride(), like.storage_offset() - start // like.itemsize)
        # an op may have to materialize a conjugate first
        return made.conj() if like.is_conj() else made


def _allocate(tensors: list[Tensor]) -> dict[int, tuple[Tensor, int]]:
    """For each storage: memory for the part that the tensors reach, and the offset of that part."""
    reach: dict[int, tuple[int, int, torch.device]] = {}
    for tensor in tensors:
        start = int(tensor.storage_offset()) * tensor.itemsize
        stop = start + span_elements(tensor) * tensor.itemsize
        low, high, device = reach.get(storage_key(tensor), (start, stop, tensor.device))
        reach[storage_key(tensor)] = (min(low, start), max(high, stop), device)
    return {
        key: (torch.empty(high - low, dtype=torch.uint8, device=device), low)
        for key, (low, high, device) in reach.items()
    }


def _default(dtype: torch.dtype, integers: AllowedValues) -> AllowedValues:
    if dtype == torch.bool:
        return AllowedValues(0, 2)
    return AllowedValues(-1.0, 1.0) if dtype.is_floating_point or dtype.is_complex else integers


def _fill(flat: Tensor, values: AllowedValues, generator: torch.Generator) -> None:
    """Fill with copies of one random tile: drawing all numbers would take longer than the op."""
    count = min(flat.numel(), _TILE_ELEMENTS)
    if count == 0:
        return
    if flat.dtype.is_floating_point or flat.dtype.is_complex:
        unit = torch.rand(count, generator=generator, device=flat.device)
        tile = unit * (values.high - values.low) + values.low
    else:
        low, high = int(values.low), max(int(values.high), int(values.low) + 1)
        tile = torch.randint(low, high, (count,), generator=generator, device=flat.device)
    flat[:count].copy_(tile)
    while count < flat.numel():
        more = min(count, flat.numel() - count)
        flat[count : count + more].copy_(flat[:more])
        count += more
