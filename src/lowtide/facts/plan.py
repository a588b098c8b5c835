"""What a planner answers: a schedule of runs, a decision for each activation, and the bytes besides the
graphs.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from lowtide.errors import LowtideError
from lowtide.facts.step import Action, Graph, Run, TransferSpeed


@dataclass(frozen=True, slots=True)
class OffloadTarget:
    """Where offloaded values go: `kind` is `disk`, with a `folder`, or `host`."""

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


OFFLOADABLE = ("activations", "state", "frozen", "parameters")
"""What may wait on a store: activations, the optimizer's state, weights that are not trained, and weights
that are."""


def parse_offload_what(words: str | Iterable[str], *, offload: str) -> tuple[str, ...]:
    """What may leave device memory, without repetition and in the order of `OFFLOADABLE`; nothing without a
    store. `words`: several, or one text with commas between them (`activations,state`)."""
    given = words.split(",") if isinstance(words, str) else list(words)
    wanted = [str(word).strip() for word in given]
    unknown = next((word for word in wanted if word not in OFFLOADABLE), None)
    if unknown is not None or not wanted:
        raise LowtideError(
            f"cannot offload {unknown or 'nothing'!r}: offload_what is one or several of "
            f"{', '.join(OFFLOADABLE)}"
        )
    if not offload and set(wanted) != {"activations"}:
        raise LowtideError(
            f"offload_what={','.join(wanted)} says what may wait on a store, and there is none: "
            "name one with offload='disk:FOLDER' or offload='host', or leave offload_what out"
        )
    return tuple(word for word in OFFLOADABLE if word in wanted) if offload else ()


ROUNDABLE = ("head",)
"""What may run with other bits than eager's, where the user allows it: a head with its loss."""


def parse_rounds(words: str | Iterable[str]) -> tuple[str, ...]:
    """What may round, without repetition and in the order of `ROUNDABLE`."""
    given = words.split(",") if isinstance(words, str) else list(words)
    wanted = [word for each in given if (word := str(each).strip())]
    unknown = next((word for word in wanted if word not in ROUNDABLE), None)
    if unknown is not None:
        raise LowtideError(
            f"nothing called {unknown!r} may round: rounds is one or several of {', '.join(ROUNDABLE)}, or "
            "empty for plans that are exact"
        )
    return tuple(word for word in ROUNDABLE if word in wanted)


EXECUTORS = ("eager", "inductor")
"""What runs a plan's graphs: the ops one by one, or the code that Inductor compiles of them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """What a plan does with one activation, its bytes and seconds, and the reason in words.

    Of its `nbytes`, `held_bytes` stay live between its last forward use and its first backward use.
    `seconds`: what its rematerialization adds to the step, 0 for a retained one; `method`: the remat rule;
    `times`: how often. `recompute_seconds`: the time to recompute it, in this plan where it is recomputed,
    else alone. `released_after` and `fetched_before` name the nodes between which an offloaded activation
    is on the store only.
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
    """All runs of a step in order. Every run reads the latest earlier run of each node that it needs."""

    runs: tuple[Run, ...]

    @property
    def order(self) -> tuple[int, ...]:
        """The ranks alone."""
        return tuple(run.rank for run in self.runs)


@dataclass(frozen=True, slots=True, kw_only=True)
class Reserve:
    """Bytes that a step needs besides the model's graphs, to plan for other batch shapes.

    `optimizer_peak_bytes` are live inside the optimizer's step, after the backward pass.
    `loss_bytes`: the most that a loss outside of the model makes and keeps live at once, between forward and
    backward; gradients of the model's outputs included. Of these, `loss_kept_bytes` stay live to the end of
    the step, the gradients of the model's outputs not counted.
    `loss_input_bytes` are live all along: the targets of the loss, and inputs that nothing reads.
    `batch_bytes`: what the model reads of the batch that these figures were found for.
    `last_output_bytes`: outputs of the last step, live until the forward pass ends.
    `earlier_gradient_bytes`: gradients of earlier micro-batches, live until the backward pass ends.
    `bucket_bytes`: buckets in which gradients go to other processes. Where `gradients_in_buckets`, no other
    memory holds gradients.
    """

    optimizer_state_bytes: int = 0
    optimizer_peak_bytes: int = 0
    loss_bytes: int = 0
    loss_kept_bytes: int = 0
    loss_input_bytes: int = 0
    batch_bytes: int = 0
    earlier_gradient_bytes: int = 0
    last_output_bytes: int = 0
    bucket_bytes: int = 0
    gradients_in_buckets: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Offload:
    """The transfers of a plan: `store_bytes` at most on the store, `transfer_seconds` in all.

    The step waits `stall_seconds` for them; the rest hides behind compute, which takes `slowed_seconds`
    longer. `what` may be offloaded, one or several of `OFFLOADABLE`. `resting_bytes` of the `store_bytes`
    are on the store between the steps too; each step reads `read_bytes` of them and writes `written_bytes`.
    """

    transfer_speed: TransferSpeed
    store_bytes: int
    transfer_seconds: float
    stall_seconds: float
    slowed_seconds: float = 0.0
    what: tuple[str, ...] = ("activations",)
    resting_bytes: int = 0
    read_bytes: int = 0
    written_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ReservedBytes:
    """What a device's caching allocator is predicted to reserve for a process that trains by the plan: from
    `least_bytes` to `most_bytes`, with or without `expandable_segments`; and at most `baseline_bytes` without
    a plan. `budget_bytes`: the budget, where it is one of reserved bytes."""

    least_bytes: int
    most_bytes: int
    baseline_bytes: int
    budget_bytes: int | None = None
    expandable_segments: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Solution:
    """A planner's answer for one step and one budget; all bytes are simulated.

    `floor_bytes`: the lowest peak that any plan was found to reach, None where the planner did not search
    for it. `lower_bound_seconds` is proven: no plan within the budget adds less, by any remats, with the
    step's nodes in their order. `floor_bound_bytes` is proven: no plan has a lower peak. Both are None
    where nothing is proven, as in plans of earlier versions. `eager`: no plan needs as little as eager
    PyTorch itself, so the model is left to eager. `step_in_backward`: the optimizer updates every parameter
    as soon as its gradient is final. `optimizer_chunk_bytes`: the optimizer's step takes so many bytes of
    parameters at a time, 0 for all. `executor` runs the graphs, one of `EXECUTORS`; `peak_bytes` is the
    peak of its code. `offload` is set where values may be offloaded; stalls are part of
    `recompute_seconds`. `holds_outputs` and `gradient_strides` are those of the step. `reserved` is set for
    an accelerator. Where it has a budget, `budget_bytes` are those that the search went down to. `resting`:
    what rests on the store between its uses, as `frozen:layer.weight`; `state:layer.weight` is the
    optimizer's state of that parameter. `repeatable` and `pipeline` are those of the step. `calls`: how often
    the loop calls the model before its first backward pass; `graphs` and `reserve` are those of one call, all
    else is of the step.
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
    reserved: ReservedBytes | None = None
    resting: tuple[str, ...] = ()
    repeatable: tuple[str, ...] = ()
    calls: int = 1
    pipeline: bool = False

    @property
    def gap(self) -> float | None:
        """How far this plan is above the cheapest one at most: 0.1 for a tenth. None where no bound above 0
        is proven."""
        if self.recompute_seconds == 0:
            return 0.0
        if not self.lower_bound_seconds:
            return None
        return max(0.0, self.recompute_seconds / self.lower_bound_seconds - 1)

    @property
    def rounds(self) -> tuple[str, ...]:
        """The parts of the step that run with other bits than eager's; empty for an exact plan."""
        return tuple(word for word in ROUNDABLE if any(word in graph.rounds for graph in self.graphs))

    @property
    def optimizer_in_chunks(self) -> bool:
        return self.optimizer_chunk_bytes > 0

    @property
    def is_floor_proven(self) -> bool:
        return self.floor_bytes is not None and self.floor_bytes == self.floor_bound_bytes

    @property
    def overhead(self) -> float:
        """Recompute time as a fraction of the time of the step without recompute."""
        return self.recompute_seconds / self.step_seconds if self.step_seconds else 0.0
