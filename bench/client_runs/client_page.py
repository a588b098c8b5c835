"""The page of clients: what was run, totals, the table, and whatever is not exact and within the budget."""

import platform
import time
from collections import Counter
from collections.abc import Sequence

import torch

from coverage_cases.outcome import GOOD, OUTCOMES, OVER
from lowtide.profiling.devices import device_for
from lowtide.units import format_size
from rows import markdown_table

from .client_row import ClientRow
from .peak_watch import STEPS

EXACT = (GOOD, OVER)


def markdown(rows: Sequence[ClientRow]) -> str:
    ordered = sorted(rows, key=lambda row: row.client)
    days = sorted({row.day for row in rows}) or [time.strftime("%Y-%m-%d", time.gmtime())]
    counts = Counter(row.outcome for row in rows)
    libraries = len({row.library for row in rows})
    lines = [
        f"# Works with: training code that people install, {' and '.join(days)}",
        "",
        f"{len(rows)} training loops of {libraries} libraries from PyPI, as their tutorials write them, with random weights and",
        f"synthetic data. Each trains {STEPS} steps without a plan and {STEPS} with one, in fresh processes with the same seeds. The budget is",
        "halfway between the lowest reachable peak and the measured peak without a plan.",
        "",
        f"Machine: {device_for(torch.device('cpu')).identity.rpartition(',')[0]}, shared with other work, one thread. Versions: python {platform.python_version()},",
        f"torch {torch.__version__}, and those of the table. Command: `make clients`, which runs `python bench/client_suite.py` in an environment",
        "of its own with `bench/clients/requirements.txt`. All figures: [clients.csv](clients.csv).",
        "",
        *markdown_table(
            ["outcome", "loops"], [[each, str(counts[each])] for each in OUTCOMES if counts[each]]
        ),
        "",
        "**Exact** is every loss and all gradients of each step, and at the end parameters, buffers, optimizer state and random states (torch,",
        "numpy, Python), to the last bit. **Peaks** are the most bytes live in the last two steps, of model, gradients, optimizer state, batch",
        "and activations; a dataset or a second model that the process holds besides is not among them (`beside_bytes` of the CSV). **Set-up** is what",
        f"{STEPS} steps took longer by a plan, nearly all of it to capture, profile and plan, on a busy machine: no claim.",
        "",
        "## Clients",
        "",
        *markdown_table(
            [
                "library",
                "what trains",
                "exact",
                "kept",
                "no plan",
                "budget",
                "predicted",
                "measured",
                "graphs",
                "set-up",
            ],
            [_cells(row) for row in ordered],
        ),
        "",
        "## Not exact, or not kept",
        "",
        *_bad(ordered),
        "",
        "## Warnings seen",
        "",
        *_warnings(ordered),
    ]
    return "\n".join(lines) + "\n"


def _cells(row: ClientRow) -> list[str]:
    exact = "yes" if row.outcome in EXACT else row.outcome
    kept = {GOOD: "yes", OVER: "no"}.get(row.outcome, "")
    figures = (row.eager_peak_bytes, row.budget_bytes, row.predicted_bytes, row.peak_bytes)
    sizes = [format_size(nbytes) if nbytes else "" for nbytes in figures]
    set_up = f"{row.set_up_seconds:.0f} s" if row.budget_bytes else ""
    name = f"{row.library} {row.version}"
    return [name, row.loop, exact, kept, *sizes, str(row.num_graphs or ""), set_up]


def _bad(rows: Sequence[ClientRow]) -> list[str]:
    found = [[row.client, row.outcome, _cause(row)] for row in rows if row.outcome != GOOD]
    return markdown_table(["client", "outcome", "cause"], found) if found else ["None."]


def _cause(row: ClientRow) -> str:
    if row.outcome != OVER:
        return row.words
    over = (
        f"{format_size(row.peak_bytes - row.budget_bytes)} over ({row.peak_bytes / row.budget_bytes - 1:.1%})"
    )
    return f"{over}; {'warned: ' + row.warnings if row.warnings else 'without a warning'}"


def _warnings(rows: Sequence[ClientRow]) -> list[str]:
    found = [[row.client, row.warnings] for row in rows if row.warnings]
    return markdown_table(["client", "words"], found) if found else ["None."]
