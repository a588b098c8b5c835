"""What all static plots share: a figure of its own, axes in units people read, deterministic files.

Figures are made without pyplot, so that no window, backend or setting of the caller is touched.
"""

import io
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lowtide.errors import LowtideError
from lowtide.facts.files import write_atomic

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

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
    """Say above the title which model and batch a figure is of."""
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
