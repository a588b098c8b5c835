"""One order, one wording and one set of colours for the kinds of memory, in page and plots.

The hues are spaced so that they stay apart for readers with any of the common kinds of colour
blindness; neighbours in the stack also differ in lightness.
"""

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
