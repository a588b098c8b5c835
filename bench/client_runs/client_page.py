"""The page of clients: what was run, totals, the table, and whatever is not exact and within the budget."""

import platform
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


PAGE = """\
# Works with: training code that people install, {days}

{loops} training loops of {libraries} libraries from PyPI, as their tutorials write them, with random
weights and made-up data. Each trains {steps} steps without a plan and {steps} with one, in fresh processes
with the same seeds. The budget is halfway between the lowest reachable peak and the measured peak without a
plan.

Machine: {machine}, shared with other work; one thread. Versions: python {python}, torch {torch}, and
those of the table. Command: `python bench/client_suite.py`; `make clients` runs it in an environment of
its own (`bench/clients/requirements.txt`). All figures: [clients.csv](clients.csv).

{totals}

**Exact** is every loss and all gradients of each step, and at the end parameters, buffers, optimizer state
and random states of torch, numpy and Python, to the last bit. **Peaks** are the most bytes live in the last
two steps: model, gradients, optimizer state, batch, activations and temporaries. A dataset or a second
model that the process holds besides is not among them (`beside_bytes` of the CSV). **Set-up** is what
{steps} steps took longer by a plan, nearly all of it to capture, profile and plan, on a busy machine: no
claim.

## Clients

{clients}

## Not exact, or not kept

{bad}

## Warnings seen

{warnings}
"""
HEADER = [
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
]


def markdown(rows: Sequence[ClientRow]) -> str:
    ordered = sorted(rows, key=lambda row: row.client)
    counts = Counter(row.outcome for row in rows)
    totals = [[outcome, str(counts[outcome])] for outcome in OUTCOMES if counts[outcome]]
    bad = [[row.client, row.outcome, _cause(row)] for row in ordered if row.outcome != GOOD]
    warned = [[row.client, row.warnings] for row in ordered if row.warnings]
    return PAGE.format(
        days=" and ".join(sorted({row.day for row in rows})),
        loops=len(rows),
        libraries=len({row.library for row in rows}),
        steps=STEPS,
        machine=device_for(torch.device("cpu")).identity.rpartition(",")[0],
        python=platform.python_version(),
        torch=torch.__version__,
        totals=_table(["outcome", "loops"], totals),
        clients=_table(HEADER, [_cells(row) for row in ordered]),
        bad=_table(["client", "outcome", "cause"], bad),
        warnings=_table(["client", "words"], warned),
    )


def _table(header: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    return "\n".join(markdown_table(header, lines)) if lines else "None."


def _cells(row: ClientRow) -> list[str]:
    exact = "yes" if row.outcome in EXACT else row.outcome
    kept = {GOOD: "yes", OVER: "no"}.get(row.outcome, "")
    figures = (row.eager_peak_bytes, row.budget_bytes, row.predicted_bytes, row.peak_bytes)
    sizes = [format_size(nbytes) if nbytes else "" for nbytes in figures]
    set_up = f"{row.set_up_seconds:.0f} s" if row.budget_bytes else ""
    name = f"{row.library} {row.version}"
    return [name, row.loop, exact, kept, *sizes, str(row.num_graphs or ""), set_up]


def _cause(row: ClientRow) -> str:
    if row.outcome != OVER:
        return row.words
    over = (
        f"{format_size(row.peak_bytes - row.budget_bytes)} over ({row.peak_bytes / row.budget_bytes - 1:.1%})"
    )
    return f"{over}; {'warned: ' + row.warnings if row.warnings else 'without a warning'}"
