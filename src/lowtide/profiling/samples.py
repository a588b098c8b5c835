"""Random inputs with the layout of a call, and values that its op accepts.

Floats are spread over [-1, 1), integers are 0 or 1, unless the op has a rule (`rules`): an
index must lie inside what it indexes, a probability in [0, 1].
"""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from lowtide.profiling.rules import Values, values_for
from lowtide.torchside.calls import Call, span_elements, storage_key
from lowtide.torchside.ops.recurrent import with_forward_results
from lowtide.torchside.ops.recurrent_bytes import valid_batch_sizes
from lowtide.torchside.ops.schema import bound_arguments, schema_name

_TILE_ELEMENTS = 1 << 14

SAMPLE_EXTRA_BYTES = 3 * _TILE_ELEMENTS * 8
"""The most that making a sample holds beyond the sample itself."""


def make_sample(call: Call, *, fill: bool = True, seed: int = 0) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Real arguments for the call: same sizes, strides, dtypes, devices and sharing of storages.

    Without `fill` the memory is left as it comes, which is enough for a view. The global random
    state is neither read nor changed.
    """
    names, bound = bound_arguments(call)
    rule = values_for(schema_name(call.target), bound)
    smallest = min((int(size) for tensor in call.tensors for size in tensor.shape if size), default=1)
    maker = _Maker(_allocate(call.tensors), Values(0, min(2, smallest)), seed if fill else None)
    args = tuple(maker.make(arg, rule.get(name)) for name, arg in zip(names, call.args, strict=True))
    kwargs = {key: maker.make(arg, rule.get(key)) for key, arg in call.kwargs.items()}
    return valid_batch_sizes(call, with_forward_results(call, args)), kwargs


@dataclass
class _Maker:
    """Turns arguments into real ones, and fills each storage the first time it is met.

    A class, since a recursive closure would be a cycle that keeps the memory until it is collected.
    """

    bases: dict[int, tuple[Tensor, int]]
    integers: Values
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

    def tensor(self, like: Tensor, wanted: Values | None) -> Tensor:
        key = storage_key(like)
        base, start = self.bases[key]
        flat = base.view(like.dtype)
        if self.seed is not None and key not in self.filled:
            self.filled.add(key)
            generator = torch.Generator(like.device).manual_seed(self.seed + len(self.filled))
            _fill(flat, wanted or _default(like.dtype, self.integers), generator)
        made = flat.as_strided(like.shape, like.stride(), like.storage_offset() - start // like.itemsize)
        # an op that is given a conjugate may have to make it first
        return made.conj() if like.is_conj() else made


def _allocate(tensors: list[Tensor]) -> dict[int, tuple[Tensor, int]]:
    """For each storage: bytes for what the tensors reach of it, and where in it they start."""
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


def _default(dtype: torch.dtype, integers: Values) -> Values:
    if dtype == torch.bool:
        return Values(0, 2)
    return Values(-1.0, 1.0) if dtype.is_floating_point or dtype.is_complex else integers


def _fill(flat: Tensor, values: Values, generator: torch.Generator) -> None:
    """One tile of random numbers, copied on: drawing them all would cost more than the op."""
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
