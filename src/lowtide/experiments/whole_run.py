"""Profile a step by running it whole, where the machine can hold it."""

from lowtide.capture.step import capture
from lowtide.capture.trace import real_tensors
from lowtide.experiments.machine import check_memory
from lowtide.planning.simulate import plain_order, simulate
from lowtide.profiles import Profile
from lowtide.profiling.whole_run import run_costs
from lowtide.torchside.batch import split_batch
from lowtide.zoo.targets import Target


def profile_by_running(target: Target) -> Profile:
    """Seconds and bytes of every node from real runs of the captured graphs.

    NotEnoughMemory, before anything is run, where this machine cannot hold the step.
    """
    captured = capture(target.model, target.batch, optimizer=target.optimizer, loss=target.loss)
    peak_bytes = simulate(captured.step, plain_order(captured.step)).peak_bytes
    check_memory(captured.step, peak_bytes=peak_bytes, what="running the step whole (--mode run)")
    return Profile(*run_costs(captured, real_tensors(target.model, split_batch(target.batch))))
