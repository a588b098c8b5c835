"""Where offloaded values go, as the user says it.

What a plan is: decisions, a schedule of runs, and what a step needs besides its own graphs.
"""

from dataclasses import dataclass
from pathlib import Path

from lowtide.errors import LowtideError
from lowtide.facts.step import Action, Graph, Run, TransferSpeed


@dataclass(frozen=True, slots=True)
class OffloadTarget:
    """`kind` is `disk`, with a `folder`, or `host`."""

    kind: str
    folder: str = ""

    def __str__(self) -> str:
        return f"{self.kind}:{self.folder}" if self.folder else self.kind


def parse_offload(text: str) -> OffloadTarget:
    """`disk:/scratch` or `host`; a folder is found from anywhere then, also where it was relative."""
    kind, _, folder = str(text).partition(":")
    if kind == "disk" and folder:
        return OffloadTarget(kind, str(Path(folder).expanduser().absolute()))
    if kind == "host" and not folder:
        return OffloadTarget(kind)
    raise LowtideError(
        f"cannot offload to {text!r}: write 'disk:FOLDER' with a folder on a local disk, or 'host' where the "
        "model is on an accelerator"
    )


def offload_text(offload: str, swap: str) -> str:
    """Where to offload to, as the user says it; `swap` is the option's name in earlier versions."""
    if offload and swap and offload != swap:
        raise LowtideError(
            f"offload={offload!r} and swap={swap!r} differ: swap is the earlier name of offload, leave it out"
        )
    return offload or swap


PLANNERS = ("auto", "mu-two", "none", "all", "every-block", "sqrt")
"""Names of the planners; `none` recomputes nothing, `all` whatever can be."""

EXECUTORS = ("eager", "inductor")
"""Who can run a plan's graphs: the ops one by one, or what Inductor compiles of them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """What a plan does with one activation, what that holds and costs, and why, in words.

    Of its `nbytes`, `held_bytes` stay in memory between its last use in the forward pass and its first in
    the backward pass. `seconds` is what bringing it back adds to the step (0 when it is simply held),
    `method` how that is done, `times` how often. `recompute_seconds`: what computing it again takes, in
    this plan where it does so, else alone. Of one that is offloaded, `released_after` and `fetched_before`
    are the names of the nodes between which it is only on the store.
    """

    name: str
    module: str
    action: Action
    method: str
    nbytes: int
    held_bytes: int
    seconds: float
    times: int
    creation_rank: int
    last_forward_use: int
    first_backward_use: int
    last_backward_use: int
    recompute_seconds: float
    reason: str
    released_after: str = ""
    fetched_before: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """All runs of a step in their order. Every run reads the latest earlier run of each node it needs."""

    runs: tuple[Run, ...]

    @property
    def order(self) -> tuple[int, ...]:
        """The ranks alone."""
        return tuple(run.rank for run in self.runs)


@dataclass(frozen=True, slots=True, kw_only=True)
class Reserve:
    """What a step needs besides the model's own graphs: known bytes for planning other batch shapes.

    `optimizer_peak_bytes` are held inside the optimizer's step, when the backward pass is over.
    `loss_bytes` is the most that a loss outside of the model holds at once of what it makes, the
    gradients that it hands over included; all that is between the forward and the backward pass.
    Of these, `loss_kept_bytes` stay to the end of the step, gradients of the model's outputs apart.
    `loss_input_bytes` are there all along: the loss's own targets, and inputs that nothing reads.
    `batch_bytes` is what the model reads of the batch that all this was found for.
    `earlier_gradient_bytes` are gradients of earlier micro-batches, there until the backward pass ends.
    `bucket_bytes` are those of the buckets in which gradients go to other processes; they are all that is
    held of the gradients, where `gradients_in_buckets`.
    """

    optimizer_state_bytes: int = 0
    optimizer_peak_bytes: int = 0
    loss_bytes: int = 0
    loss_kept_bytes: int = 0
    loss_input_bytes: int = 0
    batch_bytes: int = 0
    earlier_gradient_bytes: int = 0
    bucket_bytes: int = 0
    gradients_in_buckets: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Offload:
    """What a plan moves to a store and back: `store_bytes` at most, in `transfer_seconds`, for which the step
    waits `stall_seconds`; the rest is hidden behind its compute, which is `slowed_seconds` longer for it."""

    transfer_speed: TransferSpeed
    store_bytes: int
    transfer_seconds: float
    stall_seconds: float
    slowed_seconds: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Solution:
    """A planner's answer for one step and one budget; all bytes are simulated.

    `floor_bytes` is the lowest peak that any plan was found to reach, None where nobody searched for it.
    `lower_bound_seconds` is proven: no plan within the budget adds less, by whatever methods, with the step's
    nodes in their order. So is `floor_bound_bytes`: no plan has a lower peak. None where nobody knows, as in
    plans of earlier versions.
    `eager`: nothing needs as little as eager PyTorch itself, so that the plan is to leave the model to it.
    `step_in_backward`: the optimizer updates every parameter as soon as its gradient is final.
    `holds_outputs` is that of the step. `optimizer_chunk_bytes`: the optimizer's step takes so much of
    the parameters at a time, since all at once do not fit; 0 where they do. `executor` runs the graphs, one
    of `EXECUTORS`; `peak_bytes` is that of its code. `offload` is there where values may leave for a store;
    waiting for them is among `recompute_seconds`. `gradient_strides` are those of the step.
    """

    planner: str
    fingerprint: str
    budget_bytes: int
    peak_bytes: int
    peak_node: str
    baseline_peak_bytes: int
    floor_bytes: int | None
    step_seconds: float
    recompute_seconds: float
    decisions: tuple[Decision, ...]
    schedule: Schedule
    notes: tuple[str, ...] = ()
    graphs: tuple[Graph, ...] = ()
    identity: tuple[tuple[str, str], ...] = ()
    reserve: Reserve = Reserve()
    device: str = "cpu"
    static_bytes: int = 0
    eager: bool = False
    step_in_backward: bool = False
    holds_outputs: bool = True
    optimizer_chunk_bytes: int = 0
    executor: str = "eager"
    lower_bound_seconds: float | None = None
    floor_bound_bytes: int | None = None
    offload: Offload | None = None
    gradient_strides: tuple[tuple[str, str], ...] = ()

    @property
    def gap(self) -> float | None:
        """How far above the cheapest plan this one is at most: 0.1 for a tenth. None where nothing but 0 is
        proven, or nothing at all."""
        if self.recompute_seconds == 0:
            return 0.0
        if not self.lower_bound_seconds:
            return None
        return max(0.0, self.recompute_seconds / self.lower_bound_seconds - 1)

    @property
    def optimizer_in_chunks(self) -> bool:
        return self.optimizer_chunk_bytes > 0

    @property
    def is_floor_proven(self) -> bool:
        return self.floor_bytes is not None and self.floor_bytes == self.floor_bound_bytes

    @property
    def overhead(self) -> float:
        """Recompute time as a fraction of the plain step's time."""
        return self.recompute_seconds / self.step_seconds if self.step_seconds else 0.0
