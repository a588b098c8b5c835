"""Profiling in a hurry: of several sizes of one step, most costs are scaled from those of the first."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING

from lowtide.ops.calls import OpCost

if TYPE_CHECKING:
    from lowtide.profiling.scaled_costs import Known


@dataclass(frozen=True, slots=True, kw_only=True)
class Hurry:
    """Ops are run a few times less, and not again if they are in `measured`, where the costs that are found
    go. With `like`, no op is timed that is in there at another size, and only what should hold
    `least_bytes` inside is run at all, once."""

    measured: dict[str, OpCost]
    like: "Known | None" = None
    least_bytes: int = 0


_now: ContextVar[Hurry | None] = ContextVar("hurry", default=None)


@contextmanager
def in_a_hurry(hurry: Hurry) -> Iterator[None]:
    """Whatever is measured inside is measured so."""
    token = _now.set(hurry)
    try:
        yield
    finally:
        _now.reset(token)


def hurry_now() -> Hurry | None:
    return _now.get()
