"""Compile functions with lowtide's own settings of torch, which are on only while torch traces.

One thread at a time traces and plans: torch's tracers, and the patches around them, are global to the
process. Calls that run a compiled graph do not wait.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any, ParamSpec, TypeVar

from lowtide.garbage import rarely_collected
from lowtide.ops import recurrent, traced_ops
from lowtide.ops.recurrent import eager_runs_whole, traced_layers
from lowtide.torch_compat import dispatch, dynamo, dynamo_counts, dynamo_paths, dynamo_random, dynamo_values
from lowtide.torch_compat.dispatch import grouped_products_of_any_type
from lowtide.trace.uncaptured import unwatched

P = ParamSpec("P")
R = TypeVar("R")


PATCHES_OF_DYNAMO: tuple[Callable[[], contextlib.AbstractContextManager[None]], ...] = (
    dynamo_paths.eager_answers,
    dynamo_values.batch_values,
    dynamo_values.changing_numbers,
    dynamo_counts.counts_in_range,
    dynamo_random.draws_between_graphs,
    dynamo_paths.log_lines_after_graphs,
    dynamo_paths.torchs_own_code,
    dynamo_paths.resumed_loops,
    dynamo_paths.masked_writes_between_graphs,
    dynamo_paths.known_answers,
)
"""In the order in which they are applied."""


def one_at_a_time(function: Callable[P, R]) -> Callable[P, R]:
    """`function` under torch's own lock for compiling, which is reentrant."""

    @functools.wraps(function)
    def alone(*args: P.args, **kwargs: P.kwargs) -> R:
        with dynamo.compile_lock:
            return function(*args, **kwargs)

    return alone


@contextlib.contextmanager
def tracing() -> Iterator[None]:
    """Everything that lowtide changes in torch while it traces; restores the user's settings afterwards."""
    layers = dispatch.recurrent_layers_traced_by(traced_layers, runs_whole=eager_runs_whole)
    with (
        dynamo.compile_lock,
        unwatched(),
        dynamo.settings(),
        dynamo.unlogged(),
        rarely_collected(),
        layers,
        dispatch.traced_by(recurrent.recurrent_rules()),
        dispatch.traced_by(traced_ops.composite_rules(), keys=dispatch.COMPOSITE_KEYS),
        dispatch.traced_by(
            {**traced_ops.value_rules(), **traced_ops.number_rules()}, keys=dispatch.DIFFERENTIATED_KEYS
        ),
        traced_ops.dropouts_by_number(),
        grouped_products_of_any_type(),
        contextlib.ExitStack() as patches,
    ):
        for patch in PATCHES_OF_DYNAMO:
            patches.enter_context(patch())
        yield


def compiled(function: Callable[..., Any], backend: Callable[..., Any]) -> dynamo.Compiled:
    """`function`, compiled for one shape at a time by `backend`, which must outlive the result.

    A call that finds its compiled graph changes no setting of torch.
    """
    return dynamo.Compiled(function, backend, tracing=tracing)
