"""May an optimizer's step be split with the same bits, and how many bytes does each part of it make?

A small optimizer of the same kind answers the first: it takes whole and split steps. A trace of the whole
step, or of one chunk, over fake tensors answers the second.
"""

import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch

from lowtide.errors import LowtideError, Unsupported
from lowtide.optim.chunk_buffers import limit_bytes, turns
from lowtide.optim.joined_optimizers import inner_optimizers
from lowtide.optim.optimizer_trace import OptimizerTrace, ValueAnswers, peak_bytes, recorded_bytes
from lowtide.optim.resting_state import may_rest
from lowtide.optim.resting_step import RESTING_CHUNK_BYTES, ChunkPart, parts_of
from lowtide.optim.shadow_optimizer import (
    FakeFactories,
    ShadowOptimizer,
    random_gradients,
    real_device,
    seeded,
    shadow_optimizer,
    small_optimizer,
    small_parameter,
)
from lowtide.optim.split_step import CHUNK_BYTES, StepChunk, chunks_of, step_for, step_in_rows, take_step
from lowtide.torch_compat.dispatch import storage_key
from lowtide.torch_compat.modules import foreach_devices, global_step_hooks_off

Optimizer = torch.optim.Optimizer

TRIED_STEPS = 3
TRIED_PARAMETERS = 6
"""Per parameter group."""
TRIED_CHUNKS = 3
ODD_SIZE = 67
OWNER_ROUNDS = 4
MOST_KNOWN = 16


class StepSplit(NamedTuple):
    """Whether a step for one parameter, and for some rows of one, gives the bits of a whole step.

    `why_not`: the reason against a step for one parameter.
    """

    by_parameter: bool
    within_parameters: bool
    why_not: str = ""


_known: dict[Any, StepSplit] = {}
"""Keyed by class, settings and layouts of an optimizer, and the devices where torch takes `foreach`. The
oldest is first."""


def check_split(optimizer: Optimizer) -> StepSplit:
    """How the step of `optimizer` can be split; found once for all optimizers of the same kind."""
    found = [_known_split(each) for each in inner_optimizers(optimizer)]
    return StepSplit(
        by_parameter=all(split.by_parameter for split in found),
        within_parameters=all(split.within_parameters for split in found),
        why_not=next((split.why_not for split in found if split.why_not), ""),
    )


def update_bytes(optimizer: Optimizer | None) -> dict[int, int]:
    """For every parameter of `optimizer`, by identity, the peak bytes of the step for this parameter alone.

    Refuses an optimizer whose step cannot be taken for one parameter at a time.
    """
    if optimizer is None:
        raise LowtideError("step_in_backward=True needs to know the optimizer: pass optimizer=")
    split = check_split(optimizer)
    if not split.by_parameter:
        raise Unsupported(f"{split.why_not}: leave step_in_backward out")
    return update_bytes_of(inner_optimizers(optimizer), within_parameters=split.within_parameters)


def update_bytes_of(optimizers: Iterable[Optimizer], *, within_parameters: bool) -> dict[int, int]:
    """`update_bytes` of optimizers that are known to allow it.

    Numbers that the optimizer's code reads change no bytes; a branch on values may.
    """
    found: dict[int, int] = {}
    for optimizer in optimizers:
        with ValueAnswers(condition=False) as answers:
            shadow = _shadow_with_state(optimizer)
            measure = _chunk_measure(shadow)
            with _fake_gradients(shadow.fakes.values()):
                for key, fake in shadow.fakes.items():
                    chunks = chunks_of([fake], within_parameters=within_parameters, chunk_bytes=CHUNK_BYTES)
                    found[key] = max(map(measure, chunks))
        if answers.conditions:
            raise Unsupported(
                f"{type(optimizer).__name__} branches on values in its step, so that the bytes of an update "
                "are unknown: leave step_in_backward out"
            )
    return found


def chunked_step_bytes(
    optimizer: Optimizer, traced: OptimizerTrace, *, within_parameters: bool, sizes: Sequence[int]
) -> dict[int, int]:
    """By chunk size, the peak bytes of a step in such chunks: those of the worst chunk."""
    every = inner_optimizers(optimizer)
    if len(every) == 1 and traced.shadow is not None and traced.gradients:
        return _chunked_step_bytes(traced.shadow, traced, within_parameters=within_parameters, sizes=sizes)
    found = []
    for each in every:
        shadow = _shadow_with_state(each)
        with _fake_gradients(shadow.fakes.values()):
            found.append(_chunked_step_bytes(shadow, None, within_parameters=within_parameters, sizes=sizes))
    return {size: max(each[size] for each in found) for size in sizes}


def resting_chunk_bytes(
    optimizer: Optimizer,
    traced: OptimizerTrace,
    *,
    within_parameters: bool,
    sizes: Sequence[int],
    weights: bool = False,
) -> dict[int, int]:
    """By chunk size, the bytes of a step in such chunks whose state rests, and whose `weights` do: blocks and
    temporaries."""
    found: dict[int, int] = {}
    inner = inner_optimizers(optimizer)
    for each in inner:
        shadow = traced.shadow if len(inner) == 1 else None
        shadow = shadow or _shadow_with_state(each)
        every, measure = list(shadow.fakes.values()), _chunk_measure(shadow)
        with _fake_gradients(every):
            for size in sizes:
                parts = list(parts_of(every, within_parameters=within_parameters, chunk_bytes=size))
                nbytes = _resting_bytes(shadow, parts, measure, size=size, weights=weights)
                found[size] = max(found.get(size, 0), nbytes)
    return found


def resting_update_bytes(
    optimizer: Optimizer, *, within_parameters: bool, weights: bool = False
) -> dict[int, int]:
    """For every parameter, by identity, the peak bytes of the step for this parameter whose state rests; with
    `weights`, it rests itself."""
    found: dict[int, int] = {}
    for each in inner_optimizers(optimizer):
        with ValueAnswers(condition=False):
            shadow = _shadow_with_state(each)
            measure = _chunk_measure(shadow)
            with _fake_gradients(shadow.fakes.values()):
                for key, fake in shadow.fakes.items():
                    parts = list(
                        parts_of([fake], within_parameters=within_parameters, chunk_bytes=RESTING_CHUNK_BYTES)
                    )
                    found[key] = _resting_bytes(
                        shadow, parts, measure, size=RESTING_CHUNK_BYTES, weights=weights
                    )
    return found


def _resting_bytes(
    shadow: ShadowOptimizer,
    parts: Sequence[ChunkPart],
    measure: Callable[[StepChunk], int],
    *,
    size: int,
    weights: bool,
) -> int:
    """The bytes of blocks and temporaries in a step part by part.

    Where only some of the state rests, blocks are smaller, and take no more bytes. But where the limit keeps
    a chunk from being read early, smaller blocks may be read: then the most of both count.
    """
    blocks = [_block_bytes(shadow, part) + (part.nbytes if weights else 0) for part in parts]
    limit = limit_bytes(blocks, [part.nbytes for part in parts], size=size)
    live = [turn.live_bytes for turn in turns(blocks, limit=limit)]
    temporaries = [measure(StepChunk(part.parameters, part.num_rows)) for part in parts]
    around = zip([0, *blocks], blocks, [*blocks[1:], 0], strict=False)
    if any(sum(three) > limit for three in around):
        return max(live, default=0) + max(temporaries, default=0)
    return max(map(sum, zip(live, temporaries, strict=True)), default=0)


def resting_owners(traced: OptimizerTrace) -> dict[int, int]:
    """By storage key of state that may rest, the parameter of this state, by identity."""
    if traced.shadow is None:
        return {}
    return {
        storage_key(value): key
        for optimizer in inner_optimizers(traced.shadow.optimizer)
        for key, fake in traced.shadow.fakes.items()
        for value in optimizer.state.get(fake, {}).values()
        if may_rest(value, fake)
    }


def _block_bytes(shadow: ShadowOptimizer, part: ChunkPart) -> int:
    """The bytes of the blocks for the state of a part."""
    return sum(
        part.share_of(value.nbytes)
        for parameter in part.parameters
        for value in shadow.optimizer.state.get(parameter, {}).values()
        if may_rest(value, parameter)
    )


def _known_split(optimizer: Optimizer) -> StepSplit:
    groups = [
        (
            repr({key: value for key, value in group.items() if key != "params"}),
            *map(_layout, group["params"]),
        )
        for group in optimizer.param_groups
    ]
    key = (type(optimizer), foreach_devices(), *groups)
    if key not in _known:
        while len(_known) >= MOST_KNOWN:
            _known.pop(next(iter(_known)))
        _known[key] = _try_split(optimizer)
    return _known[key]


def _try_split(optimizer: Optimizer) -> StepSplit:
    name = type(optimizer).__name__
    tried = {id(p) for group in optimizer.param_groups for p in group["params"][:TRIED_PARAMETERS]}
    results: dict[str, list[Any]] = {}
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for mode in ("whole", "by parameter", "chunks"):
            try:
                with seeded(optimizer):
                    results[mode] = _trained(*small_optimizer(optimizer, tried), mode=mode)
            except Exception as error:  # whatever the optimizer's own code raises
                what = (str(error).strip().splitlines() or [type(error).__name__])[0]
                if mode != "chunks":
                    return StepSplit(False, False, f"{name} cannot take its step for one parameter ({what})")
        if not same(results["whole"], results["by parameter"]):
            why = f"{name} updates its parameters together: one by one gives other values"
            return StepSplit(False, False, why)
        within = "chunks" in results and same(results["whole"], results["chunks"])
        return StepSplit(True, within and _rounds_single_elements_alike(optimizer))


def _rounds_single_elements_alike(optimizer: Optimizer) -> bool:
    """Whether ops round an element the same inside of a full vector and at the end of a tensor: a chunk ends
    elsewhere than the tensor. Kernels differ by dtype and device, so each kind of parameter is tried."""
    build: Any = type(optimizer)
    results = []
    for mode in ("whole", "single rows"):
        groups: list[dict[str, Any]] = []
        with seeded(optimizer):
            for group in optimizer.param_groups:
                kinds = {(real_device(p), p.dtype): p for p in group["params"]}
                own = [small_parameter(parameter, (ODD_SIZE, 1)) for parameter in kinds.values()]
                groups.append({**group, "params": own})
            parameters = [parameter for group in groups for parameter in group["params"]]
            results.append(_trained(build(groups), parameters, mode=mode))
    return same(*results)


def _trained(small: Optimizer, parameters: Sequence[torch.Tensor], *, mode: str) -> list[Any]:
    """Parameters, state and settings of a small optimizer after some steps."""
    for _ in range(TRIED_STEPS):
        random_gradients(parameters)
        if mode != "whole":
            # the gradients of the last layers come first
            for parameter in reversed(parameters):
                if mode == "by parameter" or not parameter.dim():
                    step_for(small, [parameter])
                else:
                    rows = 1 if mode == "single rows" else max(1, len(parameter) // TRIED_CHUNKS)
                    step_in_rows(small, parameter, rows)
                parameter.grad = None
        with global_step_hooks_off():
            small.step()
        for parameter in parameters:
            parameter.grad = None
    settings = [{k: v for k, v in group.items() if k != "params"} for group in small.param_groups]
    return [parameters, [small.state[parameter] for parameter in parameters], settings]


def same(one: Any, other: Any) -> bool:
    """Whether two nested values are equal, tensors in them to the last bit."""
    if isinstance(one, torch.Tensor):
        return isinstance(other, torch.Tensor) and torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(same(a, b) for a, b in zip(one, other, strict=True))
    return bool(one == other)


def _chunked_step_bytes(
    shadow: ShadowOptimizer, traced: OptimizerTrace | None, *, within_parameters: bool, sizes: Iterable[int]
) -> dict[int, int]:
    every, measure = list(shadow.fakes.values()), _chunk_measure(shadow, traced)
    return {
        size: max(
            map(measure, chunks_of(every, within_parameters=within_parameters, chunk_bytes=size)), default=0
        )
        for size in sizes
    }


def _chunk_measure(
    shadow: ShadowOptimizer, traced: OptimizerTrace | None = None
) -> Callable[[StepChunk], int]:
    """A function from a chunk to the peak bytes of the step for this chunk.

    Where each op of the `traced` whole step belongs to one parameter, this trace gives the bytes of any chunk
    of whole parameters. For a parameter in chunks of rows, two chunks are traced: leftovers of the first are
    live beside the second. Chunks of equal layouts are traced once.
    """
    keys = {id(fake): key for key, fake in shadow.fakes.items()}
    groups = shadow.optimizer.param_groups
    group_of = {id(fake): number for number, group in enumerate(groups) for fake in group["params"]}
    owners = None if traced is None else _owners(traced)
    known: dict[Any, int] = {}

    def measure(chunk: StepChunk) -> int:
        if traced is not None and owners is not None and not chunk.rows:
            own = {keys[id(parameter)] for parameter in chunk.parameters}
            pairs = zip(traced.ops, owners, strict=True)
            return peak_bytes((op for op, owner in pairs if owner in own), traced.sizes)
        kind = (chunk.rows, *((group_of[id(p)], _layout(p)) for p in chunk.parameters))
        if kind not in known:
            step = partial(chunk.take_step, shadow.optimizer)
            if chunk.rows:
                step = partial(step_in_rows, shadow.optimizer, chunk.parameters[0], chunk.rows, most_chunks=2)
            with warnings.catch_warnings(), torch.no_grad():
                warnings.simplefilter("ignore")
                known[kind] = recorded_bytes(step, shadow)
        return known[kind]

    return measure


def _owners(traced: OptimizerTrace) -> list[int] | None:
    """For each op of a step its parameter, by identity; None where an op serves several parameters."""
    owner = {**traced.parameters, **traced.gradients}
    found: list[int | None] = [None] * len(traced.ops)
    # an op may change state that only a later op reads with the gradient: repeat until all owners are known
    for _ in range(OWNER_ROUNDS):
        for place, op in enumerate(traced.ops):
            keys = (*op.reads, *op.makes)
            own = {owner[key] for key in keys if key in owner}
            if len(own) > 1:
                return None
            for one in own:
                found[place] = one
                owner.update(dict.fromkeys(keys, one))
        if None not in found:
            break
    return None if None in found else [one for one in found if one is not None]


def _shadow_with_state(optimizer: Optimizer) -> ShadowOptimizer:
    """A shadow after its first step."""
    shadow = shadow_optimizer(optimizer)
    every = list(shadow.fakes.values())
    with warnings.catch_warnings(), torch.no_grad(), _fake_gradients(every), FakeFactories(shadow.mode):
        warnings.simplefilter("ignore")
        take_step(shadow.optimizer, every, within_parameters=False)
    return shadow


@contextmanager
def _fake_gradients(fakes: Iterable[torch.Tensor]) -> Iterator[None]:
    for fake in fakes:
        fake.grad = torch.empty_like(fake, requires_grad=False)
    yield
    for fake in fakes:
        fake.grad = None


def _layout(parameter: torch.Tensor) -> tuple[Any, ...]:
    return parameter.shape, parameter.stride(), parameter.dtype, parameter.device
