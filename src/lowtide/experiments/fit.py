"""How large a batch fits into a budget, without and with a plan, and which size is the fastest.

`fit` and its results. The search runs no step (`fit_search`). The answer can then be measured.
"""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, overload

from lowtide import api
from lowtide.errors import LowtideError
from lowtide.facts.sizes import check_budget, is_auto, step_budget
from lowtide.profiles import Profile, auto_budget_of
from lowtide.stage_log import say
from lowtide.units import format_size
from lowtide.zoo.targets import TargetSpec, call_factory

if TYPE_CHECKING:
    from lowtide.experiments.profiled_sizes import ProfiledSizes, Profiler, Source, Working

MOST = 1 << 20
"""The default of the largest size to consider."""

Budgets = list[str] | list[int] | list[str | int] | tuple[str | int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Vary:
    """The size that grows: its `name`, the `unit` of throughput, and the `amount` of that unit in a step.

    `degree`: the degree of the polynomial by which bytes grow. All sizes are multiples of `multiple_of`.
    """

    name: str = "batch size"
    unit: str = "samples"
    amount: Callable[[int], int] = lambda size: size
    degree: int = 1
    multiple_of: int = 1
    most: int = MOST

    def __post_init__(self) -> None:
        if self.multiple_of < 1:
            raise LowtideError(f"sizes cannot be multiples of {self.multiple_of}: say 1 or more")
        if self.most < self.multiple_of:
            raise LowtideError(
                f"there is no multiple of {self.multiple_of} up to {self.most}: allow larger sizes"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class FitRow:
    """One size that fits, all of it predicted. `peak_bytes` and `recompute_seconds` are with a plan that
    meets the budget, or without any where none is needed. A size that was not `profiled` itself has
    interpolated figures, and its peak is at most `peak_bytes`.
    """

    size: int
    plain_peak_bytes: int
    peak_bytes: int
    step_seconds: float
    recompute_seconds: float
    per_second: float | None
    profiled: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """The result of running a size. `exact` is None where nothing was compared; where nothing was measured,
    `reason` says why. `planned`: with its plan, else without any.
    """

    size: int
    planned: bool
    predicted_peak_bytes: int
    measured_peak_bytes: int | None = None
    exact: bool | None = None
    differences: tuple[str, ...] = ()
    reason: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """What fits into a budget; made by `lowtide.fit`.

    `largest_plain` fits without a plan, and the next size does not, by prediction; 0 where none fits.
    `largest` is the largest size for which a plan was found. It is proven that no plan exists above
    `no_plan_above`; between the two it is unknown; None where nothing is proven, or nothing larger was
    considered. No plan of the smallest profiled size needs less than `lowest_bytes`. No size above `most` was
    considered. `rows` are by size, `checks` were measured.
    """

    budget_bytes: int
    vary: str
    unit: str
    multiple_of: int
    most: int
    largest_plain: int
    largest: int
    lowest_bytes: int
    no_plan_above: int | None = None
    rows: tuple[FitRow, ...] = field(default=(), repr=False)
    checks: tuple[Check, ...] = field(default=(), repr=False)

    @property
    def fastest(self) -> FitRow | None:
        """Of the rows that fit, the one with the highest predicted throughput; the smallest of equals."""
        fitting = [row for row in self.rows if row.per_second is not None]
        return max(fitting, key=lambda row: (row.per_second, -row.size), default=None)

    def __repr__(self) -> str:
        fastest = "" if self.fastest is None else f", fastest={self.fastest.size}"
        return (
            f"Fit(budget={format_size(self.budget_bytes)}, {self.vary}: largest without a plan="
            f"{self.largest_plain}, largest={self.largest}{fastest}, {len(self.rows)} rows)"
        )


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

    Sizes are captured and profiled, not run: the result is predicted. Without a plan, the largest size fits
    and the next does not. With one, `largest` is the largest size that a plan was found for, and above
    `no_plan_above` there is none. A larger size is assumed to need more memory.

    Args:
        factory: A function of a batch size that returns `(model, batch)`, `(model, batch, optimizer)` or
            `(model, batch, optimizer, loss)`; its argument may be any size that makes the step larger.
        budget: Bytes, a size (`"8GiB"`) or `"auto"`; a list gives a list, and captured sizes serve all of it.
        multiple_of: Only multiples of this number are considered, where a model does not take all sizes.
        most: The largest size to consider.
        check: Train the largest size with its plan, and the first one that does not fit without, for a few
            steps, where they fit into this machine.
        seed: Decides random weights and data of the factory.
    """
    found = find_fits(
        lambda size: call_factory(factory, _name(factory), batch_size=size, seed=seed),
        budgets=budget if isinstance(budget, (list, tuple)) else [budget],
        vary=Vary(multiple_of=multiple_of, most=most),
        check=check,
    )
    return found if isinstance(budget, (list, tuple)) else found[0]


def find_fits(
    source: "Callable[[int], Source]",
    *,
    budgets: Sequence[str | int],
    vary: Vary,
    check: bool = True,
    profile: "Profiler | None" = None,
    working: "Working" = lambda _: nullcontext(),
    tell: Callable[[str], None] = say,
) -> list[Fit]:
    """`fit` for any source of sizes, for several budgets in their order.

    `working(text)` is open during long work; `tell` gets the sum behind the budget `auto`.
    """
    from lowtide.experiments.fit_search import Search
    from lowtide.experiments.profiled_sizes import ProfiledSizes

    for budget in budgets:
        check_bytes(budget)
    sizes = ProfiledSizes(source=source, vary=vary, profiler=profile or _profile, working=working)
    budgets_bytes = [_budget_bytes(budget, sizes, tell) for budget in budgets]
    found = {}
    # the largest first: sizes are interpolated better than extrapolated
    for budget_bytes in sorted(set(budgets_bytes), reverse=True):
        found[budget_bytes] = Search(sizes=sizes, budget_bytes=budget_bytes).answer(check=check)
    return [found[budget_bytes] for budget_bytes in budgets_bytes]


def _profile(source: "Source") -> Profile:
    target = source.load() if isinstance(source, TargetSpec) else source
    return api.profile(target.model, target.batch, optimizer=target.optimizer, loss=target.loss)


def _name(factory: Callable[[int], Any]) -> str:
    return getattr(factory, "__name__", type(factory).__name__)


def check_bytes(budget: str | int) -> None:
    """Refuse a budget that cannot be the same for all sizes, or cannot be read."""
    if isinstance(budget, str) and budget.strip().endswith("%"):
        raise LowtideError(
            f"'{budget}' is a share of one size's own peak, and here sizes differ: write bytes, such as 8GiB"
        )
    check_budget(budget)


def _budget_bytes(budget: str | int, sizes: "ProfiledSizes", tell: Callable[[str], None]) -> int:
    """Bytes of a budget; `auto` is of the device that the smallest size is on."""
    if not is_auto(budget):
        return step_budget(budget, whole=1)
    smallest = sizes.vary.multiple_of
    sizes.capture(smallest)
    found = auto_budget_of(sizes.captured[smallest].profile)
    tell(found.line)
    return found.nbytes
