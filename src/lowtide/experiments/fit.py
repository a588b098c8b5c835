"""How large a batch fits into a budget, without and with a plan, and which size is the fastest.

No step is run to find out (`fit_search`). What was found can then be measured.
"""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any, overload

from lowtide import api
from lowtide.experiments.fit_records import MOST, Budgets, Check, Fit, FitRow, Vary, budget_bytes_of
from lowtide.experiments.fit_search import Search
from lowtide.experiments.profiled_sizes import Profiler, Sizes, Source, Working
from lowtide.profiles import Profile
from lowtide.zoo.targets import TargetSpec, call_factory

__all__ = ["MOST", "Check", "Fit", "FitRow", "Source", "Vary", "find_fit", "find_fits", "fit"]


@overload
def fit(
    factory: Callable[[int], Any],
    *,
    budget: str | int,
    multiple_of: int = 1,
    most: int = MOST,
    check: bool = True,
    seed: int = 0,
) -> Fit: ...


@overload
def fit(
    factory: Callable[[int], Any],
    *,
    budget: Budgets,
    multiple_of: int = 1,
    most: int = MOST,
    check: bool = True,
    seed: int = 0,
) -> list[Fit]: ...


def fit(
    factory: Callable[[int], Any],
    *,
    budget: str | int | Budgets,
    multiple_of: int = 1,
    most: int = MOST,
    check: bool = True,
    seed: int = 0,
) -> Fit | list[Fit]:
    """The largest batch size that fits into `budget`, without and with a plan, and the fastest one.

    `factory(batch_size)` returns `(model, batch)`, `(model, batch, optimizer)` or `(model, batch, optimizer,
    loss)`; whatever its argument makes larger is what grows. Sizes are captured and profiled, not run, and
    predicted: without a plan, the largest size fits and the next does not; with one, it is the largest that a
    plan was found for, and `no_plan_above` says how much further anybody could go. It is taken for granted
    that a larger size needs more memory. With `check`, the largest size with its plan, and the first one that
    does not fit without, are then trained for a few steps, if this machine can hold them. Only multiples of
    `multiple_of` up to `most` are looked at; say it where a model does not take all sizes. A list of budgets
    gives a list, and what is captured serves all of them.
    """
    found = find_fits(
        lambda size: call_factory(factory, _name(factory), batch_size=size, seed=seed),
        budgets=budget if isinstance(budget, (list, tuple)) else [budget],
        vary=Vary(multiple_of=multiple_of, most=most),
        check=check,
    )
    return found if isinstance(budget, (list, tuple)) else found[0]


def find_fit(
    source: Callable[[int], Source],
    *,
    budget: str | int,
    vary: Vary,
    check: bool = True,
    profile: Profiler | None = None,
    working: Working = lambda _: nullcontext(),
) -> Fit:
    """`fit` for anything that can be profiled at a size. `working` is told what takes long."""
    [found] = find_fits(source, budgets=[budget], vary=vary, check=check, profile=profile, working=working)
    return found


def find_fits(
    source: Callable[[int], Source],
    *,
    budgets: Sequence[str | int],
    vary: Vary,
    check: bool = True,
    profile: Profiler | None = None,
    working: Working = lambda _: nullcontext(),
) -> list[Fit]:
    """`find_fit` for several budgets, in their order: what is captured and measured serves all of them."""
    budgets_bytes = [budget_bytes_of(budget) for budget in budgets]
    sizes = Sizes(source=source, vary=vary, profile=profile or _profile, working=working)
    found = {}
    # the largest first, whose sizes tell of those between, and not beyond
    for budget_bytes in sorted(set(budgets_bytes), reverse=True):
        found[budget_bytes] = Search(sizes=sizes, budget_bytes=budget_bytes).answer(check=check)
    return [found[budget_bytes] for budget_bytes in budgets_bytes]


def _profile(source: Source) -> Profile:
    target = source.load() if isinstance(source, TargetSpec) else source
    return api.profile(target.model, target.batch, optimizer=target.optimizer, loss=target.loss)


def _name(factory: Callable[[int], Any]) -> str:
    return getattr(factory, "__name__", type(factory).__name__)
