"""Compile functions with lowtide's own settings of torch, which hold while torch traces and not otherwise."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from lowtide.torchside import dynamo, hooks
from lowtide.torchside.batch_values import batch_values
from lowtide.torchside.eager_paths import eager_answers
from lowtide.torchside.garbage import rarely_collected
from lowtide.torchside.log_lines import log_lines_after_graphs
from lowtide.torchside.loops import resumed_loops
from lowtide.torchside.masked_writes import masked_writes_between_graphs
from lowtide.torchside.numbers import changing_numbers
from lowtide.torchside.one_at_a_time import compile_lock
from lowtide.torchside.ops import by_number, by_value, recurrent_tracing
from lowtide.torchside.ops.grouped import grouped_products_of_any_type
from lowtide.torchside.ops.recurrent import eager_runs_whole, traced_layers
from lowtide.torchside.outside_watch import unwatched


@contextlib.contextmanager
def tracing() -> Iterator[None]:
    """Everything that lowtide changes in torch while it traces; the user's own comes back afterwards."""
    layers = dynamo.recurrent_layers_traced_by(traced_layers, runs_whole=eager_runs_whole)
    with (
        compile_lock,
        unwatched(),
        dynamo.settings(),
        hooks.unlogged(),
        rarely_collected(),
        layers,
        hooks.traced_by(recurrent_tracing.ways_to_trace()),
        hooks.traced_by(
            {**by_value.ways_to_trace(), **by_number.ways_to_trace()}, keys=hooks.DIFFERENTIATED_KEYS
        ),
        by_number.dropouts_by_number(),
        grouped_products_of_any_type(),
        eager_answers(),
        batch_values(),
        changing_numbers(),
        log_lines_after_graphs(),
        resumed_loops(),
        masked_writes_between_graphs(),
    ):
        yield


def compiled(function: Callable[..., Any], backend: Callable[..., Any]) -> dynamo.Compiled:
    """`function`, compiled for one shape at a time by `backend`, which has to outlive the result.

    A call that runs what was compiled before changes nothing in torch.
    """
    return dynamo.Compiled(function, backend, tracing=tracing)
