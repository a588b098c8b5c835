"""One style for page, plots and tables: order, labels and colours of kinds, formats of numbers, and the
figures of static plots.

The hues stay apart for readers with any of the common kinds of colour blindness; neighbours in the stack also
differ in lightness. Figures are made without pyplot, so no window, backend or setting of the caller changes.
matplotlib is imported for the first figure.
"""

import io
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from markupsafe import Markup

from lowtide.errors import LowtideError
from lowtide.facts import TEMPORARIES, Kind, Region, ReservedBytes
from lowtide.facts.files import write_atomic
from lowtide.units import format_seconds

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from lowtide.report.results import TradeoffPoint

STACK = (
    Kind.PARAMETER,
    Kind.OPTIMIZER_STATE,
    Kind.BUFFER,
    Kind.INPUT,
    Kind.GRADIENT,
    Kind.ACTIVATION,
    Kind.OTHER,
)
"""From the bottom up: static kinds first, kinds that a plan can change on top."""

LABELS = {
    Kind.PARAMETER: "parameters",
    Kind.OPTIMIZER_STATE: "optimizer state",
    Kind.BUFFER: "buffers",
    Kind.INPUT: "batch",
    Kind.GRADIENT: "gradients",
    Kind.ACTIVATION: "activations",
    Kind.OTHER: TEMPORARIES,
}

COLOURS = {
    Kind.PARAMETER: "#33608c",
    Kind.OPTIMIZER_STATE: "#8a6fb0",
    Kind.BUFFER: "#5b6770",
    Kind.INPUT: "#a9b4bd",
    Kind.GRADIENT: "#2f9e7e",
    Kind.ACTIVATION: "#f0a63c",
    Kind.OTHER: "#c9553d",
}

BEFORE = "#5b6770"
AFTER = "#0a6ebd"
RECOMPUTE = "#d1495b"
REGION_COLOURS = {Region.FORWARD: "#4a90c2", Region.BACKWARD: "#2f9e7e", Region.OPTIMIZER: "#8a6fb0"}
DIRECTIONS = {"to the store": "#9a5b1e", "from the store": "#0f7b8a"}
BUDGET = "#b3261e"


UNKNOWN = "–"
HOW_TIMED = "Times are medians of runs in turn, baseline and plan; time added is the second over the first."
MOST_NOISE = 0.25
"""The largest noise of a useful figure, as a share of the step's time."""
QUIET = 0.02
"""The noise, as a share of the step's time, below which any figure is good enough: steps are timed until
then."""

NOT_BY_RECOMPUTING = (
    "the captured graph gives these results without any recompute, too: the model takes another path of "
    "its own code while it is captured, or one of its ops rounds in another way there"
)


def size(nbytes: int | None) -> str:
    """Binary units, four or more digits: two peaks that differ by a percent must look different."""
    if nbytes is None:
        return UNKNOWN
    value = float(nbytes)
    for unit, digits in (("B", 0), ("KiB", 1), ("MiB", 1), ("GiB", 2)):
        if abs(value) < 1024:
            return f"{value:.{digits}f} {unit}"
        value /= 1024
    return f"{value:.3f} TiB"


def breakable(name: str) -> Markup:
    """A dotted name, escaped, that may wrap after its dots."""
    return Markup(".<wbr>").join(name.split("."))


def breakable_path(text: str) -> Markup:
    """Text, escaped, whose paths may wrap after their slashes."""
    return Markup("/<wbr>").join(text.split("/"))


def short_source(source: str) -> str:
    """A source line without the folder of an installed package."""
    return re.sub(r"^.*/(?:site|dist)-packages/", "", source)


def reserved_text(found: ReservedBytes) -> str:
    """What an allocator is predicted to reserve, in words."""
    low, high = size(found.least_bytes), size(found.most_bytes)
    words = high if low == high else f"{low} to {high}"
    how = "with expandable segments, " if found.expandable_segments else ""
    return f"{words} by the allocator, {how}predicted; baseline {size(found.baseline_bytes)}"


def percent(share: float | None) -> str:
    """A change with its sign: `+6.2 %`, `−38.0 %`."""
    if share is None:
        return UNKNOWN
    return f"{'−' if share < 0 else '+'}{abs(share) * 100:.1f} %"


def how_good(gap: float | None) -> str:
    """The largest distance of a plan from the optimum: `at most 3.1 % above optimal`."""
    if gap is None:
        return "how far above optimal is not known"
    return "optimal (proven)" if gap < 5e-4 else f"at most {100 * gap:.1f} % above optimal (proven)"


def is_noisy(share: float | None, noise: float | None) -> bool:
    """Whether the noise is larger than the change, or large by itself."""
    return share is not None and noise is not None and noise > min(abs(share), MOST_NOISE)


def is_too_noisy(share: float | None, noise: float | None) -> bool:
    """Whether nothing can be said of the change, not even that it is small."""
    return is_noisy(share, noise) and (noise or 0.0) > QUIET


def added(share: float | None, noise: float | None) -> str:
    """The time added: `+6.2 %`, or `+0.6 % (noise: ± 9.0 %)` where the noise is larger than that."""
    if not is_noisy(share, noise):
        return percent(share)
    return f"{percent(share)} (noise: ± {(noise or 0.0) * 100:.1f} %)"


def measured_place(point: "TradeoffPoint") -> tuple[int, float] | None:
    """The measured peak and time added of a plan; None where unknown, or where the time is mostly noise."""
    peak_bytes, overhead = point.measured_peak_bytes, point.measured_overhead
    if peak_bytes is None or overhead is None or is_too_noisy(overhead, point.measured_noise):
        return None
    return peak_bytes, overhead


def duration(seconds: float | None) -> str:
    return UNKNOWN if seconds is None else format_seconds(seconds)


INK, MUTED, GRID = "#17212b", "#5a6876", "#e4e8ed"
_UNITS = (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10), ("B", 1))
_TIMES = (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6))


def new_figure(title: str, *, width: float = 9, height: float = 4.5) -> tuple["Figure", "Axes"]:
    """An empty figure with one axes. LowtideError where matplotlib is not installed."""
    figure, panels = new_panels(title, (1,), width=width, height=height)
    return figure, panels[0]


def new_panels(
    title: str, heights: Sequence[float], *, width: float = 9, height: float = 4.5
) -> tuple["Figure", list["Axes"]]:
    """Axes above each other with one horizontal axis; `heights` are their relative heights."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise LowtideError("plots need matplotlib: pip install lowtide[plots]") from error
    figure = Figure(figsize=(width, height), facecolor="white")
    figure.set_layout_engine("constrained", w_pad=0.12, h_pad=0.12)
    grid = figure.subplots(len(heights), 1, sharex=True, squeeze=False, height_ratios=list(heights))
    panels: list[Axes] = [row[0] for row in grid]
    _set_title(panels[0], title)
    for axes in panels:
        axes.spines[["top", "right"]].set_visible(False)
        axes.spines[["left", "bottom"]].set_color(MUTED)
        axes.tick_params(colors=MUTED, labelsize=9)
        axes.grid(axis="y", color=GRID, linewidth=0.8)
        axes.set_axisbelow(True)
    return figure, panels


def name_figure(figure: "Figure", name: str) -> None:
    """Write the model and batch above the title of a figure."""
    axes = figure.axes[0]
    _set_title(axes, f"{name}\n{axes.get_title(loc='left')}")


def _set_title(axes: "Axes", title: str) -> None:
    axes.set_title(title, loc="left", fontsize=12, fontweight="bold", color=INK, pad=18)


def byte_unit(largest: float) -> tuple[str, int]:
    """The unit that writes `largest` as a number of at least 2, and its bytes."""
    return next((unit for unit in _UNITS if largest >= 2 * unit[1]), _UNITS[-1])


def time_unit(largest: float) -> tuple[str, float]:
    return next((unit for unit in _TIMES if largest >= 2 * unit[1]), _TIMES[-1])


def label_axes(axes: "Axes", x: str, y: str) -> None:
    axes.set_xlabel(x, color=MUTED, fontsize=10)
    axes.set_ylabel(y, color=MUTED, fontsize=10)


def legend(axes: "Axes", *, columns: int = 4) -> None:
    """A legend below the plot, where it covers no data."""
    axes.figure.legend(loc="outside lower center", ncols=columns, frameon=False, fontsize=9, labelcolor=INK)


def write_beside(axes: "Axes", text: str, place: tuple[float, float], colour: str, **options: Any) -> None:
    """Bold text next to a place, with a white rim that keeps it readable on lines and areas."""
    from matplotlib.patheffects import withStroke

    axes.annotate(
        text,
        place,
        textcoords="offset points",
        fontsize=9,
        fontweight="bold",
        color=colour,
        zorder=6,
        path_effects=[withStroke(linewidth=3, foreground="white")],
        **options,
    )


def save_figure(figure: "Figure", stem: Path, *, formats: Iterable[str] = ("png", "svg")) -> list[Path]:
    """Write `stem.png` and `stem.svg`. The same data gives the same bytes: no date, no random ids."""
    from matplotlib import rc_context

    written = []
    for suffix in formats:
        content = io.BytesIO()
        with rc_context({"svg.hashsalt": stem.name}):
            metadata = {"Date": None} if suffix == "svg" else {"Software": None}
            figure.savefig(content, format=suffix, dpi=150, metadata=metadata)
        written.append(write_atomic(stem.with_name(f"{stem.name}.{suffix}"), content.getvalue()))
    return written
