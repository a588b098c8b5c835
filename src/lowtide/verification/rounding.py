"""How far a plan that rounds is from eager, beside how far eager is from float64, over one step from the same
start.

Eager rounds as well: the same step in float64 says how much. A loss or a gradient of the plan that is ten
times as far from eager as eager is from float64 is no rounding, and counts as a difference; so do buffers and
random states with other bits.

Shortcoming: float64 takes the memory of a second, larger model, and some models do not run in it. `why_not`
says so then.
"""

import copy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lowtide.torch_compat.dispatch import map_leaves
from lowtide.trace.model_call import call, loss_of
from lowtide.verification.trained_steps import BUFFER, GRADIENT, Start, results_in
from lowtide.zoo.targets import Target

FURTHER = 10
"""Rounding is no further from eager than so many times eager's own distance from float64."""
LEAST = 1e-6
"""Distances below this are rounding of float32, whatever eager's own is."""


@dataclass(frozen=True, slots=True)
class Distance:
    """Relative distances: of the loss, and the largest of all gradients, by the norm of each; `parameter` has
    that gradient."""

    loss: float
    gradient: float
    parameter: str

    def __str__(self) -> str:
        return f"{self.loss:.1e} in the loss and up to {self.gradient:.1e} in gradients ({self.parameter})"


@dataclass(frozen=True, slots=True, kw_only=True)
class Rounding:
    """`from_eager`: the plan's distance from eager. `eager_from_float64`: eager's own from the same step in
    float64, None where that did not run; `why_not` has the reason then."""

    from_eager: Distance
    eager_from_float64: Distance | None = None
    why_not: str = ""

    def __str__(self) -> str:
        if self.eager_from_float64 is None:
            return f"{self.from_eager} from eager; eager in float64 did not run ({self.why_not})"
        return f"{self.from_eager} from eager, which itself is {self.eager_from_float64} from float64"


def measure_rounding(
    target: Target, start: Start, planned: list[Path], eager: list[Path]
) -> tuple[Rounding, list[str]]:
    """The distances of recorded first steps, and what differs by more than rounding. `target` is eager."""
    found, wanted = results_in(planned[0]), results_in(eager[0])
    try:
        precise, why = _in_float64(target, start), ""
    except Exception as error:  # a user's model may raise anything in another precision
        precise, why = None, f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
    rounding = Rounding(
        from_eager=_distance(found, wanted),
        eager_from_float64=None if precise is None else _distance(wanted, precise),
        why_not=why,
    )
    return rounding, [*_other_bits(found, wanted), *_too_far(rounding)]


def _in_float64(target: Target, start: Start) -> dict[str, Tensor]:
    def wider(leaf: Any) -> Any:
        is_float = isinstance(leaf, Tensor) and leaf.is_floating_point()
        return leaf.double() if is_float else leaf

    start.restore()
    model = copy.deepcopy(target.model).double()
    precise = Target(target.name, model, map_leaves(wider, target.batch), None, target.loss)
    loss = loss_of(call(precise.model, precise.batch), precise.loss)
    loss.backward()  # type: ignore[no-untyped-call]
    pairs = ((name, parameter.grad) for name, parameter in model.named_parameters())
    return {"loss": loss.detach()} | {f"{GRADIENT}{name}": grad for name, grad in pairs if grad is not None}


def _distance(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> Distance:
    gradients = {
        name.removeprefix(GRADIENT): _relative(found[name], value)
        for name, value in wanted.items()
        if name.startswith(GRADIENT) and name in found
    }
    parameter = max(gradients, key=lambda name: (gradients[name], name), default="")
    return Distance(_relative(found["loss"], wanted["loss"]), gradients.get(parameter, 0.0), parameter)


def _relative(one: Tensor, other: Tensor) -> float:
    one, other = one.detach().cpu().double(), other.detach().cpu().double()
    scale: float = other.norm().item()
    off: float = (one - other).norm().item()
    return off / scale if scale else off


def _other_bits(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> list[str]:
    exact = [name for name in wanted if name.startswith((BUFFER, "random state"))]
    missing = [f"{name}: is None without or with the plan" for name in found.keys() ^ wanted.keys()]
    return missing + [
        f"{name}, step 1: has other bits"
        for name in exact
        if name in found and not torch.equal(found[name], wanted[name])
    ]


def _too_far(rounding: Rounding) -> list[str]:
    own = rounding.eager_from_float64
    if own is None:
        return []
    pairs = (
        ("loss", rounding.from_eager.loss, own.loss),
        (f"{GRADIENT}{rounding.from_eager.parameter}", rounding.from_eager.gradient, own.gradient),
    )
    return [
        f"{name}, step 1: {far:.1e} from eager, which is {least:.1e} from float64: more than rounding"
        for name, far, least in pairs
        if not far <= max(LEAST, FURTHER * least)
    ]
