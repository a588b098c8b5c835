"""Profile a step by running it whole, where the machine can hold it."""

from collections.abc import Callable

from lowtide.capture.graphs import user_tensors
from lowtide.capture.step import capture
from lowtide.experiments.machine import check_memory
from lowtide.facts.sizes import parse_size
from lowtide.planning.simulate import eager_runs, walked
from lowtide.profiles import Profile
from lowtide.profiling.costing import MEMORY_LIMIT_BYTES
from lowtide.profiling.whole_run import run_costs
from lowtide.zoo.targets import Target


def profile_by_running(
    target: Target,
    *,
    memory_limit: str | int = MEMORY_LIMIT_BYTES,
    cache: bool = True,
    progress: Callable[[int, int], None] | None = None,
) -> Profile:
    """Seconds and bytes of every node from real runs of the captured graphs; arguments as in
    `lowtide.profile`.

    NotEnoughMemory, before anything is run, where this machine cannot hold the step.
    """
    captured = capture(target.model, target.batch, optimizer=target.optimizer, loss=target.loss)
    peak_bytes = walked(captured.step, eager_runs(captured.step)).peak_bytes
    check_memory(captured.step, peak_bytes=peak_bytes, what="running the step whole (--mode run)")
    tensors = user_tensors(target.model, target.batch)
    limit_bytes = parse_size(memory_limit)
    return Profile(
        *run_costs(captured, tensors, memory_limit_bytes=limit_bytes, use_cache=cache, progress=progress)
    )
