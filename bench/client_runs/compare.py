"""A client with and without a plan, each training in a fresh process: one row."""

import importlib.metadata
from functools import partial
from pathlib import Path
from typing import NamedTuple

from coverage_cases.outcome import GOOD, OVER
from own_process import ProcessEnded, in_own_process

from .client_row import ClientRow
from .trained import Trained, train_client

PRELOADED = ["torch", "lowtide.api", "client_runs.trained"]


class Client(NamedTuple):
    """A file of `bench/clients`."""

    name: str
    library: str
    loop: str


def run_client(client: Client, *, limit_seconds: float, logs: Path) -> ClientRow:
    row = ClientRow(client.name, client.library, _version(client.library), client.loop)
    if not row.version:
        row.outcome, row.words = "does not train eagerly", f"{client.library} is not installed"
        return row

    def train(kind: str, *peaks: int) -> Trained:
        log = logs.absolute() / f"{client.name}-{kind}.log"
        work = partial(train_client, client.name, *peaks, log=log)
        found: Trained = in_own_process(work, limit_seconds=limit_seconds, preload=PRELOADED)
        return found

    try:
        eager = train("eager")
        if eager.error:
            row.outcome, row.words = "does not train eagerly", eager.error
            return row
        row.eager_peak_bytes = eager.peak_bytes - eager.beside_bytes
        row.eager_seconds = eager.seconds
        planned = train("planned", row.eager_peak_bytes)
        if planned.error and planned.floor_bytes:  # a callback, whose refusal tells the floor
            planned = train("planned", row.eager_peak_bytes, planned.floor_bytes)
        judge(row, eager, planned)
        if row.outcome == "differs" and first_difference(eager, train("again")):
            row.outcome = "does not repeat in eager"
    except ProcessEnded as end:
        row.outcome, row.words = end.outcome, str(end)
    return row


def judge(row: ClientRow, eager: Trained, planned: Trained) -> None:
    """Fill in the row of two trainings."""
    row.warnings = "; ".join(planned.warnings)
    row.floor_bytes = planned.floor_bytes
    if planned.error:
        row.outcome, row.words = "refused" if planned.refused else "failed", planned.error
        return
    row.compared = len(eager.entries)
    row.budget_bytes, row.predicted_bytes = planned.budget_bytes, planned.predicted_bytes
    row.beside_bytes = eager.beside_bytes  # what lowtide keeps of its own is not taken off
    row.peak_bytes = max(0, planned.peak_bytes - row.beside_bytes)
    row.num_graphs = planned.num_graphs
    row.set_up_seconds = planned.seconds - eager.seconds
    row.words = first_difference(eager, planned)
    if row.words:
        row.outcome = "differs"
    elif not planned.predicted_bytes or not planned.peak_bytes:
        row.words = "no plan was made" if not planned.predicted_bytes else "no peak was measured"
    else:
        row.outcome = OVER if row.peak_bytes > row.budget_bytes else GOOD


def first_difference(one: Trained, other: Trained) -> str:
    """How many digests differ, and the first of them; empty where none does."""
    names = [name for name, _ in one.entries]
    if names != [name for name, _ in other.entries]:
        return f"{len(one.entries)} values without a plan, {len(other.entries)} with one"
    differing = [
        name for (name, mine), (_, its) in zip(one.entries, other.entries, strict=True) if mine != its
    ]
    return f"{len(differing)} of {len(names)} differ, first {differing[0]}" if differing else ""


def _version(library: str) -> str:
    try:
        return importlib.metadata.version(library)
    except importlib.metadata.PackageNotFoundError:
        return ""
