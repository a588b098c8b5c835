"""`lowtide fit`: the largest and the fastest size that a budget allows, without and with a plan."""

from dataclasses import asdict, replace
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import RenderableType
from rich.text import Text

from lowtide.cli.command import command
from lowtide.cli.exit_codes import Exit, UsageError
from lowtide.cli.option_values import bytes_budgets
from lowtide.cli.options import OptionalBatchSize, TargetText
from lowtide.cli.sources import StepOptions, offers, on_device, profile_target
from lowtide.cli.terminal import Terminal, table
from lowtide.report.style import UNKNOWN, duration, percent, size
from lowtide.zoo.targets import TargetSpec, check_target

if TYPE_CHECKING:
    from lowtide.experiments.fit import Check, Fit, FitRow, Vary
    from lowtide.experiments.profiled_sizes import Source
    from lowtide.profiles import Profile


class Grows(StrEnum):
    BATCH_SIZE = "batch-size"
    SEQUENCE_LENGTH = "sequence-length"
    IMAGE_SIZE = "image-size"


MULTIPLES = {Grows.BATCH_SIZE: 1, Grows.SEQUENCE_LENGTH: 8, Grows.IMAGE_SIZE: 32}
"""The default of --multiple-of."""


@command
def fit(
    terminal: Terminal,
    target: TargetText,
    *,
    budget: Annotated[
        str,
        typer.Option(
            metavar="SIZE,...",
            help="Largest peak that the step may have: 8GiB, 500MB or auto, what the device has "
            "free. Several, as in 2GB,4GB, "
            "share captures and measurements.",
            show_default=False,
            callback=bytes_budgets,
        ),
    ],
    vary: Annotated[
        Grows, typer.Option(help="What grows; the last two for built-in targets that take them.")
    ] = Grows.BATCH_SIZE,
    multiple_of: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            min=1,
            help="Look at multiples of this alone. Without it: any batch size, sequence lengths by 8, image "
            "sizes by 32.",
            show_default=False,
        ),
    ] = None,
    most: Annotated[int | None, typer.Option(metavar="N", min=1, help="The largest size to look at.")] = None,
    no_check: Annotated[bool, typer.Option("--no-check", help="Predict only: run no step.")] = False,
    batch_size: OptionalBatchSize = None,
    step: Annotated[StepOptions, offers("device")],
) -> None:
    """Find the largest batch that fits into a budget, without and with a plan, and the fastest.

    All sizes are predicted: none is tried by running out of memory. "With a plan" is the largest size that a
    plan was found for; from which size on no plan can exist is said, too. Then two sizes are trained for a
    few steps, if this machine can hold them: the largest with its plan, and the first that does not fit
    without one. With --device all is estimated and nothing is trained. With several budgets, --json gives a
    list. Exits with 3 where no size fits or a measured peak is above its budget, with 4 when results differ.
    """
    given = {
        Grows.BATCH_SIZE: batch_size,
        Grows.SEQUENCE_LENGTH: step.sequence_length,
        Grows.IMAGE_SIZE: step.image_size,
    }
    if given[vary] is not None:
        raise UsageError(f"--{vary} {given[vary]} is what grows here: leave it out, or --vary another one")
    if vary is not Grows.BATCH_SIZE and batch_size is None:
        raise UsageError(f"the {_words(vary)} of how large a batch? Say --batch-size N")
    check_target(target)
    spec = step.spec(target, batch_size or 1)
    with terminal.working("starting"):
        from lowtide.experiments.fit import find_fits

    devices = ["cpu"]

    def profile(one: "Source") -> "Profile":
        assert isinstance(one, TargetSpec)
        terminal.note(f"looking at {_words(vary)} {getattr(one, vary.replace('-', '_'))}")
        found = profile_target(one, terminal, step)
        devices.append(found.step.device)
        return found

    def at(number: int) -> TargetSpec:
        changes: dict[str, Any] = {vary.replace("-", "_"): number}
        return replace(spec, **changes)

    found = find_fits(
        at,
        budgets=budget.split(","),
        vary=_vary(vary, spec.batch_size, multiple_of=multiple_of, most=most),
        check=not no_check and step.device is None,
        profile=profile,
        tell=terminal.note,
    )
    data = [{**fit_data(one, target=target), "device": devices[-1]} for one in found]
    terminal.data(data[0] if len(data) == 1 else data)
    for one in found:
        terminal.show(*fit_tables(one, name=on_device(target, devices[-1])))
    raise typer.Exit(max(map(fit_exit, found)))


def _words(vary: Grows) -> str:
    return vary.replace("-", " ")


def _vary(vary: Grows, batch_size: int, *, multiple_of: int | None, most: int | None) -> "Vary":
    from lowtide.experiments.fit import MOST, Vary

    common: dict[str, Any] = {
        "name": _words(vary),
        "multiple_of": multiple_of or MULTIPLES[vary],
        "most": most or MOST,
    }
    match vary:
        case Grows.BATCH_SIZE:
            return Vary(**common)
        case Grows.SEQUENCE_LENGTH:
            return Vary(unit="tokens", amount=lambda length: batch_size * length, degree=2, **common)
        case Grows.IMAGE_SIZE:
            return Vary(unit="pixels", amount=lambda height: batch_size * height**2, degree=2, **common)


def fit_data(found: "Fit", *, target: str) -> dict[str, Any]:
    fastest = found.fastest
    return {"target": target, **asdict(found), "fastest": None if fastest is None else fastest.size}


def fit_tables(found: "Fit", *, name: str) -> list[RenderableType]:
    if not found.largest:
        return [Text(_nothing_fits(found))]
    rows = [
        (
            f"{'' if row.profiled else '~'}{row.size}",
            size(row.plain_peak_bytes),
            size(row.peak_bytes),
            duration(row.step_seconds + row.recompute_seconds),
            percent(_overhead(row)),
            _rate(row.per_second),
        )
        for row in found.rows
    ]
    columns = (f"{found.vary}>", "baseline peak>", "planned>", "step>", "recompute>", f"{found.unit}/s>")
    lines = [
        f"largest {found.vary} without a plan: {_largest_plain(found)}",
        f"largest {found.vary} with a plan: {_largest(found)}",
    ]
    if found.no_plan_above is not None:
        lines.append(_proven(found, found.no_plan_above))
    if found.fastest is not None:
        lines.append(f"fastest: {found.fastest.size}{_speed(found, found.fastest.size)}")
    if any(not row.profiled for row in found.rows):
        lines.insert(0, "~ interpolated from the sizes around it; its plan may need less than the budget")
    return [
        table(f"{name} in {size(found.budget_bytes)}, predicted", columns, rows),
        *map(Text, lines),
        *(Text(_check(found, one)) for one in found.checks),
    ]


def _nothing_fits(found: "Fit") -> str:
    return (
        f"no {found.vary} fits into {size(found.budget_bytes)}: at {found.multiple_of} no plan "
        f"needs less than {size(found.lowest_bytes)}. Raise --budget, or see `lowtide profile`"
    )


def _largest_plain(found: "Fit") -> str:
    plain = found.largest_plain
    return f"{plain or 'none'}{_speed(found, plain)}{_limit(found, plain)}"


def _largest(found: "Fit") -> str:
    """A size, with its gain and its cost."""
    words = str(found.largest)
    if found.largest_plain and found.largest > found.largest_plain:
        words += f", {found.largest / found.largest_plain:.3g} times as large"
    return words + _speed(found, found.largest, than=found.largest_plain) + _limit(found, found.largest)


def _proven(found: "Fit", no_plan_above: int) -> str:
    """The precision of the answer."""
    first = no_plan_above + found.multiple_of
    if no_plan_above == found.largest:
        return f"no plan exists from {first} on"
    return f"no plan exists from {first} on; between, no plan was found and none is ruled out"


def _speed(found: "Fit", at: int, *, than: int = 0) -> str:
    """The throughput at a size, compared with another size; empty where unknown."""
    speeds = {row.size: row.per_second for row in found.rows}
    speed, other = speeds.get(at), speeds.get(than)
    if speed is None:
        return ""
    more = f", {percent(speed / other - 1)}" if other and than != at else ""
    return f" ({_rate(speed)} {found.unit}/s{more})"


def _limit(found: "Fit", largest: int) -> str:
    return "; no larger one was looked at" if largest == found.most else ""


def _overhead(row: "FitRow") -> float | None:
    return row.recompute_seconds / row.step_seconds if row.step_seconds else None


def _rate(per_second: float | None) -> str:
    if per_second is None:
        return UNKNOWN
    return f"{per_second:,.0f}" if per_second >= 100 else f"{per_second:.3g}"


def _check(found: "Fit", check: "Check") -> str:
    what = f"{found.vary} {check.size} {'with its plan' if check.planned else 'without a plan'}"
    if check.measured_peak_bytes is None:
        return f"{what}: not measured: {check.reason}"
    inside = check.measured_peak_bytes <= found.budget_bytes
    words = f"measured {size(check.measured_peak_bytes)} (predicted {size(check.predicted_peak_bytes)}), "
    words += "within the budget" if inside else "above the budget"
    if inside and not check.planned:
        words += " after all"
    if check.planned:
        words += {
            True: ", results exact",
            False: ", results DIFFER",
            None: ", not compared with eager, which does not fit here",
        }[check.exact]
    return "\n  ".join((f"{what}: {words}", *check.differences))


def fit_exit(found: "Fit") -> Exit:
    """Wrong results are worse than too much memory."""
    planned = [check for check in found.checks if check.planned]
    if any(check.exact is False for check in planned):
        return Exit.RESULTS_DIFFER
    above = any((check.measured_peak_bytes or 0) > found.budget_bytes for check in planned)
    return Exit.DOES_NOT_FIT if above or not found.largest else Exit.DONE
