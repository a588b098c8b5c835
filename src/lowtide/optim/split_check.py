"""How far an optimizer's step can be taken in pieces with the same bits, and what each piece holds inside."""

import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch

from lowtide.errors import LowtideError, Unsupported
from lowtide.optim.joined_optimizers import each_of
from lowtide.optim.optimizer_estimate import give_gradients, real_device, seeded, small_one, small_parameter
from lowtide.optim.optimizer_trace import OptimizerTrace, peak_bytes, recorded_bytes
from lowtide.optim.shadow_optimizer import ShadowOptimizer, fake_like, shadow_of
from lowtide.optim.split_step import Piece, pieces_of, step_for, step_in_slices, take_step
from lowtide.torch_compat.dispatch import FakeTensorMode

Optimizer = torch.optim.Optimizer

TRIED_STEPS = 3
TRIED_PARAMETERS = 6
"""Of every group."""
TRIED_SLICES = 3
ODD_SIZE = 67
OWNER_ROUNDS = 4


class StepSplit(NamedTuple):
    """Whether parameters go their own ways (`apart`), and rows of a parameter do (`slices`).

    `why_not` says what speaks against the first.
    """

    apart: bool
    slices: bool
    why_not: str = ""


MOST_KNOWN = 16
_known: dict[Any, StepSplit] = {}
"""The splits that were found so far, the oldest first."""


def split_of(optimizer: Optimizer) -> StepSplit:
    """Steps of a small one of its kind, taken whole, one parameter at a time and in slices, tell.

    The result is remembered by what it depends on: the class, the settings, and the parameters' layouts.
    """
    found = [_known_split_of(each) for each in each_of(optimizer)]
    return StepSplit(
        apart=all(split.apart for split in found),
        slices=all(split.slices for split in found),
        why_not=next((split.why_not for split in found if split.why_not), ""),
    )


def _known_split_of(optimizer: Optimizer) -> StepSplit:
    settings = [
        (
            repr({key: value for key, value in group.items() if key != "params"}),
            *map(_layout, group["params"]),
        )
        for group in optimizer.param_groups
    ]
    key = (type(optimizer), *settings)
    if key not in _known:
        while len(_known) >= MOST_KNOWN:
            _known.pop(next(iter(_known)))
        _known[key] = _split_of(optimizer)
    return _known[key]


def updates_of(optimizer: Optimizer | None) -> dict[int, int]:
    """For every parameter of `optimizer`, by identity, the most that the step for it alone holds inside.

    Refuses an optimizer whose parameters do not go their own ways.
    """
    if optimizer is None:
        raise LowtideError("step_in_backward=True needs to know the optimizer: pass optimizer=")
    split = split_of(optimizer)
    if not split.apart:
        raise Unsupported(f"{split.why_not}: leave step_in_backward out")
    return inside_bytes(each_of(optimizer), slices=split.slices)


def inside_bytes(optimizers: Iterable[Optimizer], *, slices: bool) -> dict[int, int]:
    """The same for optimizers that are known to allow it."""
    return {key: n for each in optimizers for key, n in _inside_bytes(each, slices=slices).items()}


def pieces_bytes(
    optimizer: Optimizer, traced: OptimizerTrace, *, slices: bool, sizes: Sequence[int]
) -> dict[int, int]:
    """By size of a piece, the most that a whole step in such pieces holds inside: that of the largest."""
    every = each_of(optimizer)
    if len(every) == 1 and traced.double is not None and traced.gradients:
        return _pieces_bytes(traced.double, traced, slices=slices, sizes=sizes)
    found = []
    for each in every:
        double = _with_state(each)
        with _gradients(double.fakes.values()):
            found.append(_pieces_bytes(double, None, slices=slices, sizes=sizes))
    return {size: max(each[size] for each in found) for size in sizes}


def _split_of(optimizer: Optimizer) -> StepSplit:
    name = type(optimizer).__name__
    tried = {
        id(parameter) for group in optimizer.param_groups for parameter in group["params"][:TRIED_PARAMETERS]
    }
    results: dict[str, list[Any]] = {}
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for way in ("whole", "apart", "slices"):
            try:
                with seeded(optimizer):
                    results[way] = _trained(*small_one(optimizer, tried), way=way)
            except Exception as error:  # whatever the optimizer's own code raises
                what = (str(error).strip().splitlines() or [type(error).__name__])[0]
                if way != "slices":
                    return StepSplit(False, False, f"{name} cannot take its step for one parameter ({what})")
        alike = "slices" in results and _equal(results["whole"], results["slices"])
        slices = alike and _is_the_same_for_single_elements(optimizer)
    if not _equal(results["whole"], results["apart"]):
        why = f"{name} updates its parameters together: one by one gives other values"
        return StepSplit(False, False, why)
    return StepSplit(True, slices)


def _is_the_same_for_single_elements(optimizer: Optimizer) -> bool:
    """Whether the optimizer's ops round an element in a vector as they do at the end of a tensor, where none
    is filled: a cut moves the ends. Kernels differ by dtype and
    device, so each kind of parameter is tried."""
    build: Any = type(optimizer)
    results = []
    for way in ("whole", "rows"):
        groups: list[dict[str, Any]] = []
        with seeded(optimizer):
            for group in optimizer.param_groups:
                kinds = {(real_device(p), p.dtype): p for p in group["params"]}
                own = [small_parameter(parameter, (ODD_SIZE, 1)) for parameter in kinds.values()]
                groups.append({**group, "params": own})
            parameters = [parameter for group in groups for parameter in group["params"]]
            results.append(_trained(build(groups), parameters, way=way))
    return _equal(*results)


def _trained(small: Optimizer, parameters: Sequence[torch.Tensor], *, way: str) -> list[Any]:
    """Parameters, state and settings of a small optimizer after some steps."""
    for _ in range(TRIED_STEPS):
        give_gradients(parameters)
        if way != "whole":
            # the last layers' gradients come first
            for parameter in reversed(parameters):
                if way != "apart" and parameter.dim():
                    rows = 1 if way == "rows" else max(1, len(parameter) // TRIED_SLICES)
                    step_in_slices(small, parameter, rows)
                else:
                    step_for(small, [parameter])
                parameter.grad = None
        small.step()
        for parameter in parameters:
            parameter.grad = None
    settings = [{k: v for k, v in group.items() if k != "params"} for group in small.param_groups]
    return [parameters, [small.state[parameter] for parameter in parameters], settings]


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return isinstance(other, torch.Tensor) and torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(_equal(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(_equal(a, b) for a, b in zip(one, other, strict=True))
    return bool(one == other)


def _inside_bytes(optimizer: Optimizer, *, slices: bool) -> dict[int, int]:
    """What the step for each parameter holds, traced once for every layout of every group."""
    double, fakes, mode = _with_state(optimizer)
    known: dict[Any, int] = {}
    found: dict[int, int] = {}
    for number, group in enumerate(optimizer.param_groups):
        for parameter in group["params"]:
            layout = (number, _layout(parameter))
            if layout not in known:
                known[layout] = _traced_bytes(double, [fakes[id(parameter)]], mode, slices=slices)
            found[id(parameter)] = known[layout]
    return found


def _pieces_bytes(
    double: ShadowOptimizer, traced: OptimizerTrace | None, *, slices: bool, sizes: Iterable[int]
) -> dict[int, int]:
    """What a step in pieces holds, by their size.

    Where each op of the `traced` whole step is for one parameter, it tells of any piece but slices of rows,
    of which two tell: what stays of the first is there beside the second. Other pieces are traced, those
    that are alike once.
    """
    fakes = {id(fake): key for key, fake in double.fakes.items()}
    groups = double.optimizer.param_groups
    number_of = {id(fake): number for number, group in enumerate(groups) for fake in group["params"]}
    owners = None if traced is None else _owners(traced)
    known: dict[Any, int] = {}

    def inside_bytes(piece: Piece) -> int:
        if traced is not None and owners is not None and not piece.rows:
            own = {fakes[id(parameter)] for parameter in piece.parameters}
            pairs = zip(traced.ops, owners, strict=True)
            return peak_bytes((op for op, owner in pairs if owner in own), traced.sizes)
        alike = (piece.rows, *((number_of[id(p)], _layout(p)) for p in piece.parameters))
        if alike not in known:
            known[alike] = recorded_bytes(partial(_rehearse, piece, double.optimizer), double.mode)
        return known[alike]

    every = list(double.fakes.values())
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        return {
            size: max(map(inside_bytes, pieces_of(every, slices=slices, piece_bytes=size)), default=0)
            for size in sizes
        }


def _rehearse(piece: Piece, double: Optimizer) -> None:
    if piece.rows:
        step_in_slices(double, piece.parameters[0], piece.rows, most_slices=2)
    else:
        piece.take_step(double)


def _owners(traced: OptimizerTrace) -> list[int] | None:
    """For each op of a step the parameter that it is for, by identity; None where one is for several."""
    owner = {**traced.parameters, **traced.gradients}
    found: list[int | None] = [None] * len(traced.ops)
    # an op may change a moment before another reads it together with the gradient: look until all are told
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


def _with_state(optimizer: Optimizer) -> ShadowOptimizer:
    """A double after its first step."""
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    fakes = {
        id(parameter): fake_like(parameter, mode)
        for group in optimizer.param_groups
        for parameter in group["params"]
    }
    double, every = shadow_of(optimizer, fakes, mode), list(fakes.values())
    with warnings.catch_warnings(), torch.no_grad(), _gradients(every):
        warnings.simplefilter("ignore")
        take_step(double, every, slices=False)
    return ShadowOptimizer(double, fakes, mode)


def _traced_bytes(double: Optimizer, fakes: list[torch.Tensor], mode: FakeTensorMode, *, slices: bool) -> int:
    with warnings.catch_warnings(), torch.no_grad(), _gradients(fakes):
        warnings.simplefilter("ignore")
        return recorded_bytes(lambda: take_step(double, fakes, slices=slices), mode)


@contextmanager
def _gradients(fakes: Iterable[torch.Tensor]) -> Iterator[None]:
    for fake in fakes:
        fake.grad = torch.empty_like(fake, requires_grad=False)
    yield
    for fake in fakes:
        fake.grad = None


def _layout(parameter: torch.Tensor) -> tuple[Any, ...]:
    return parameter.shape, parameter.stride(), parameter.dtype, parameter.device
