"""Profile a step by running it whole, where the machine can hold it."""

from lowtide.capture.graphs import user_tensors
from lowtide.capture.step import capture
from lowtide.experiments.machine import check_memory
from lowtide.planning.simulate import plain_runs, simulate
from lowtide.profiles import Profile
from lowtide.profiling.whole_run import run_costs
from lowtide.zoo.targets import Target


def profile_by_running(target: Target) -> Profile:
    """Seconds and bytes of every node from real runs of the captured graphs.

    NotEnoughMemory, before anything is run, where this machine cannot hold the step.
    """
    captured = capture(target.model, target.batch, optimizer=target.optimizer, loss=target.loss)
    peak_bytes = simulate(captured.step, plain_runs(captured.step)).peak_bytes
    check_memory(captured.step, peak_bytes=peak_bytes, what="running the step whole (--mode run)")
    return Profile(*run_costs(captured, user_tensors(target.model, target.batch)))
