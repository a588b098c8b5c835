"""Train one case with and without lowtide, compare to the last bit, and measure the peak."""

import copy
import gc
import random
import time
from collections import deque
from dataclasses import replace
from typing import Any

import numpy
import torch

import lowtide
from lowtide.torch_compat import dynamo
from lowtide.trace.model_call import tensors_in
from lowtide.verification.measure_step import peak_above_start, static_bytes
from said import first_line, warnings_kept

from .case import Case, Training
from .outcome import GOOD, OVER, Outcome

SHARE = 0.5
"""Of the way from the lowest reachable peak to that of eager: where the budget is."""
SEED = 7


def examine(case: Case) -> Outcome:
    row = Outcome(case.name, case.group, "failed")
    try:
        training = case.build()
        expected = results(twin(training))
    except Exception as error:
        row.outcome, row.words = "does not train eagerly", first_line(error)
        return row
    try:
        with warnings_kept() as warned:
            _train_planned(row, training, expected)
        row.words = "; ".join(filter(None, (row.words, *warned)))
    except lowtide.LowtideError as error:
        row.outcome, row.words = "refused", first_line(error)
    except Exception as error:
        row.outcome, row.words = "failed", first_line(error)
    row.breaks = "; ".join(f"{reason} ({times})" for reason, times in dynamo.graph_breaks().most_common(3))
    return row


def _train_planned(row: Outcome, training: Training, expected: list[Any]) -> None:
    planned = twin(training)
    start = time.perf_counter()
    found = lowtide.profile(
        planned.model,
        planned.batch,
        optimizer=planned.optimizer,
        loss=planned.loss,
        accumulate=planned.accumulate,
    )
    row.num_nodes = len(found.step.nodes)
    row.num_graphs = sum(graph.in_model for graph in found.step.graphs)
    row.eager_peak_bytes = found.peak_bytes
    low, high = found.floor_bytes, max(found.floor_bytes, found.peak_bytes)
    plan = found.plan(low + int((high - low) * SHARE))
    row.budget_bytes = plan.budget_bytes
    plan.apply(planned.model)
    seen = results(planned)
    row.first_steps_seconds = time.perf_counter() - start
    different = differences(expected, seen)
    if different:
        repeats = not differences(expected, results(twin(training)))
        row.outcome = "differs" if repeats else "does not repeat in eager"
        row.words = f"{len(different)} of {len(expected)}, first {different[0]}"
        return
    row.peak_bytes = measured_peak(planned)
    row.over_bytes = max(0, row.peak_bytes - row.budget_bytes)
    row.outcome = OVER if row.over_bytes else GOOD


def twin(training: Training) -> Training:
    """A copy that trains apart."""
    model, batch, optimizer = copy.deepcopy((training.model, training.batch, training.optimizer))
    return replace(training, model=model, batch=batch, optimizer=optimizer)


def seed() -> None:
    torch.manual_seed(SEED)
    random.seed(SEED)
    numpy.random.seed(SEED)


def results(training: Training) -> list[Any]:
    """What a loop yields, then parameters, buffers, and the state of the generator."""
    seed()
    values = [tensor.detach().clone() for each in training.loop(training) for tensor in tensors_in([each])]
    model = training.model
    values += [tensor.detach().clone() for tensor in (*model.parameters(), *model.buffers())]
    return [*values, torch.get_rng_state()]


def differences(expected: list[Any], seen: list[Any]) -> list[int]:
    """Places of what is not equal to the last bit."""
    if len(expected) != len(seen):
        return [min(len(expected), len(seen))]
    pairs = enumerate(zip(expected, seen, strict=True))
    return [place for place, (one, other) in pairs if not _same(one, other)]


def _same(one: torch.Tensor, other: torch.Tensor) -> bool:
    if one.is_floating_point() and one.shape == other.shape:
        return one.dtype == other.dtype and torch.equal(one.nan_to_num(), other.nan_to_num())
    return torch.equal(one, other)


def measured_peak(training: Training) -> int:
    """The true peak of a loop whose state is there, without what is the loop's own."""
    training.model.zero_grad(set_to_none=True)
    gc.collect()
    above = peak_above_start(lambda: _run(training))
    static = static_bytes(training.model, training.batch, training.optimizer)
    return static + above - training.loop_bytes


def _run(training: Training) -> None:
    seed()
    deque(training.loop(training), maxlen=0)  # which holds nothing of what comes
    training.model.zero_grad(set_to_none=True)
