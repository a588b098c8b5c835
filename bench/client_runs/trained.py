"""One training of a client, in the process that it has for itself."""

import importlib
import os
import sys
import tempfile
import time
import traceback
from dataclasses import dataclass, field
from pathlib import Path

import torch

import lowtide
from said import first_line, warnings_kept

from .journal import Journal, seed
from .peak_watch import PeakWatch
from .run import Run
from .torchvision_ops import define_missing

OFFLINE = {
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "WANDB_MODE": "disabled",
    "YOLO_OFFLINE": "true",
}


@dataclass(slots=True)
class Trained:
    """What is sent back. `error` is empty where it trained to the end; `refused`: the error is lowtide's."""

    entries: list[tuple[str, str]] = field(default_factory=list)
    error: str = ""
    refused: bool = False
    seconds: float = 0.0
    peak_bytes: int = 0
    beside_bytes: int = 0
    budget_bytes: int = 0
    predicted_bytes: int = 0
    floor_bytes: int = 0
    num_graphs: int = 0
    warnings: list[str] = field(default_factory=list)


def train_client(
    name: str, eager_peak_bytes: int = 0, floor_bytes: int = 0, *, log: Path | None = None
) -> Trained:
    """Train the client `name`, by a plan where eager's peak is given; what it prints goes to `log`."""
    run = Run(eager_peak_bytes=eager_peak_bytes, floor_bytes=floor_bytes)
    if log is not None:
        _own_surroundings(log)
    watch = PeakWatch()
    journal = Journal(lambda number: watch.after_step(number, run.models, journal.optimizers, run.batch))
    result = Trained()
    try:
        defined = define_missing()  # noqa: F841
        client = importlib.import_module(f"clients.{name}")
        with warnings_kept() as result.warnings, journal.kept():
            seed()
            start = time.perf_counter()
            client.train(run)
            result.seconds = time.perf_counter() - start
        journal.note_results(run.models)
    except Exception as error:
        traceback.print_exc()
        result.error, result.refused = first_line(error), isinstance(error, lowtide.LowtideError)
        if isinstance(error, lowtide.BudgetTooSmall):
            result.floor_bytes = error.floor_bytes
        return result
    result.entries = journal.entries
    result.peak_bytes = watch.peak_bytes
    result.beside_bytes = watch.beside_bytes
    result.floor_bytes, result.budget_bytes = run.floor_bytes, run.budget_bytes
    if (plan := run.made) is not None:
        result.predicted_bytes = plan.peak_bytes
        result.num_graphs = sum(graph.in_model for graph in plan.solution.graphs)
    return result


def _own_surroundings(log: Path) -> None:
    """One thread, no network, an empty folder, nothing remembered of earlier profiles."""
    from lowtide.profiling import op_costs

    sys.modules["coverage"] = None  # type: ignore[assignment]  # bench/coverage.py is not the library of this name

    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("w") as file:
        os.dup2(file.fileno(), sys.stdout.fileno())
        os.dup2(file.fileno(), sys.stderr.fileno())
    folder = tempfile.mkdtemp(prefix="client-")
    os.environ |= OFFLINE | {"LOWTIDE_CACHE_DIR": folder, "YOLO_CONFIG_DIR": folder, "MPLBACKEND": "agg"}
    os.chdir(folder)
    torch.set_num_threads(1)
    # on a busy machine, timing waits for idle phases
    op_costs._TIME_LIMIT_SECONDS = 1.0
