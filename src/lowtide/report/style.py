"""One order, one wording and one set of colours for the kinds of memory, in page and plots.

The hues are spaced so that they stay apart for readers with any of the common kinds of colour
blindness; neighbours in the stack also differ in lightness.

How numbers are written in the page and on the plots.
"""

import re

from markupsafe import Markup

from lowtide.facts import Kind, Region

STACK = (
    Kind.PARAMETER,
    Kind.OPTIMIZER_STATE,
    Kind.BUFFER,
    Kind.INPUT,
    Kind.GRADIENT,
    Kind.ACTIVATION,
    Kind.OTHER,
)
"""From the bottom up: what is always there first, what a plan can change on top."""

LABELS = {
    Kind.PARAMETER: "parameters",
    Kind.OPTIMIZER_STATE: "optimizer state",
    Kind.BUFFER: "buffers",
    Kind.INPUT: "batch",
    Kind.GRADIENT: "gradients",
    Kind.ACTIVATION: "activations",
    Kind.OTHER: "temporaries and other",
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
HOW_TIMED = (
    "Times are medians of runs in turn, without and with; the time added is the second median over the first."
)
MOST_NOISE = 0.25
"""Of the step's time; a figure that may be off by more tells nothing of the step, however large it is."""

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


def short_source(source: str) -> str:
    """A source line without the folder that an installed package happens to stand in."""
    return re.sub(r"^.*/(?:site|dist)-packages/", "", source)


def percent(share: float | None) -> str:
    """A change with its sign: `+6.2 %`, `−38.0 %`."""
    if share is None:
        return UNKNOWN
    return f"{'−' if share < 0 else '+'}{abs(share) * 100:.1f} %"


def how_good(gap: float | None) -> str:
    """How far a plan may be from the best there is: `at most 3.1 % above optimal`."""
    if gap is None:
        return "how far above optimal is not known"
    return "optimal (proven)" if gap < 5e-4 else f"at most {100 * gap:.1f} % above optimal (proven)"


def is_noisy(share: float | None, noise: float | None) -> bool:
    """Whether the machine was too busy to tell: its noise is larger than the change, or large by itself."""
    return share is not None and noise is not None and noise > min(abs(share), MOST_NOISE)


def added(share: float | None, noise: float | None) -> str:
    """The time added: `+6.2 %`, or `+0.6 % (noise: ± 9.0 %)` where that is too noisy to tell."""
    if not is_noisy(share, noise):
        return percent(share)
    return f"{percent(share)} (noise: ± {(noise or 0.0) * 100:.1f} %)"


def duration(seconds: float | None) -> str:
    if seconds is None:
        return UNKNOWN
    if seconds >= 1:
        return f"{seconds:.2f} s"
    if seconds >= 1e-3:
        return f"{seconds * 1e3:.{0 if seconds >= 0.1 else 1}f} ms"
    return f"{seconds * 1e6:.{0 if seconds >= 1e-5 else 1}f} µs"
