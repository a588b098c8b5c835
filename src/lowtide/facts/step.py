"""One training step as frozen records.

A training step is a list of nodes in the order they run, and the storages they make. Bytes
belong to storages; a view, a `getitem` or a `detach` makes none and only holds one longer.
"""

from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

UPDATE = "update"
"""The op of a node that stands for the optimizer's step for one parameter, inside the backward pass."""


class Region(StrEnum):
    FORWARD = "forward"
    BACKWARD = "backward"
    OPTIMIZER = "optimizer"


class Kind(StrEnum):
    """What a storage is for the user."""

    PARAMETER = "parameter"
    BUFFER = "buffer"
    INPUT = "input"
    ACTIVATION = "activation"
    GRADIENT = "gradient"
    OPTIMIZER_STATE = "optimizer_state"
    OTHER = "other"


class Action(StrEnum):
    """What becomes of an activation between its last use in the forward pass and its first in backward.

    One that is offloaded leaves for a store outside of the device's memory and is read back.
    """

    RETAINED = "RETAINED"
    RECOMPUTE = "RECOMPUTE"
    OFFLOAD = "OFFLOAD"


@dataclass(frozen=True, slots=True, kw_only=True)
class Storage:
    """A block of memory.

    `static`: there before the step and after it (parameters, buffers, the batch, optimizer state).
    `pinned`: made during the step and held to its end, read or not (gradients, what the model returns).
    Any other is freed after the last read of the last value that holds it; in eager PyTorch, those that are
    `pinned_in_eager` are held to the end (gradients that a step in backward uses at once).
    `extra_eager_bytes`: how much larger eager PyTorch's own version is (a dropout mask of floats).
    """

    id: int
    nbytes: int
    kind: Kind
    name: str
    static: bool = False
    pinned: bool = False
    extra_eager_bytes: int = 0
    pinned_in_eager: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Remat:
    """One way to bring a forward node's value back in the backward pass: what it reads, makes and costs.

    `rule` is the name of the remat rule behind it (`lowtide.remat`), `action` what a plan that takes it
    does with the value. `makes` are storage ids of the original: a second run makes a second block of
    the same size.
    """

    rule: str
    action: Action = Action.RECOMPUTE
    reads: tuple[int, ...]
    holds: tuple[int, ...]
    makes: tuple[int, ...]
    seconds: float = 0.0
    workspace_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """One op (or one input) of the step.

    `reads` are ranks of nodes whose values it needs. `holds` are the storages its own value refers
    to: those it `makes`, and those it shares with what it reads. `workspace_bytes` are held inside
    the op only; less than none where it writes its result over what it reads last. `remats` are the
    ways to bring its value back, the one to prefer first; where there is
    none, `fixed` says why. `on_demand`: it makes what a remat keeps from the forward pass, and runs only
    in schedules where such a remat reads it. `movable`, of those: it lets go of a value whose copy to the
    store began when the value was made, waits for that copy, and may run at any place from its rank to the
    end of its segment's forward part.
    `estimated` marks times that were scaled from a smaller or similar op instead of measured.
    `extra_eager_bytes`: how much more eager PyTorch's own version holds inside; negative for less.
    `eager_reads` are ranks whose values eager holds until here as well, as a formula of autograd does with
    what it makes on its way. `eager_place`: eager runs the backward ops of a segment that have one in the
    order of these, where a plan runs them in that of their ranks.
    """

    rank: int
    name: str
    op: str
    region: Region
    kind: Kind
    module: str = ""
    source: str = ""
    segment: int = 0
    reads: tuple[int, ...] = ()
    holds: tuple[int, ...] = ()
    makes: tuple[int, ...] = ()
    seconds: float = 0.0
    workspace_bytes: int = 0
    remats: tuple[Remat, ...] = ()
    fixed: str = ""
    on_demand: bool = False
    movable: bool = False
    estimated: bool = False
    extra_eager_bytes: int = 0
    eager_reads: tuple[int, ...] = ()
    eager_place: int = 0

    def remat(self, rule: str) -> Remat | None:
        """Its remat by that rule."""
        return next((remat for remat in self.remats if remat.rule == rule), None)

    @property
    def recompute(self) -> Remat | None:
        """Its preferred remat that computes the value again, if any does."""
        return next((remat for remat in self.remats if remat.action is Action.RECOMPUTE), None)


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferSpeed:
    """The way to the store of offloaded values: one transfer at a time in each direction.

    A transfer takes `latency_seconds` and its bytes over the direction's bandwidth. `store` names it as
    the user did: `disk:/scratch`. `slows_compute` is how many seconds longer the step computes for each of
    transfers beside it, since copies need some of the processor, too.
    """

    store: str
    write_bytes_per_second: float
    read_bytes_per_second: float
    latency_seconds: float = 0.0
    slows_compute: float = 0.0

    def write_seconds(self, nbytes: int) -> float:
        return self.latency_seconds + nbytes / self.write_bytes_per_second

    def read_seconds(self, nbytes: int) -> float:
        return self.latency_seconds + nbytes / self.read_bytes_per_second


class Run(NamedTuple):
    """One run of the node at `rank`: its first, or a rematerialization by a `rule`."""

    rank: int
    rule: str = ""

    @property
    def is_first(self) -> bool:
        return not self.rule


class GraphRun(NamedTuple):
    """One run of an op of a single graph: the same as `Run`, by the op's `position` in that graph."""

    position: int
    rule: str = ""

    @property
    def is_first(self) -> bool:
        return not self.rule


@dataclass(frozen=True, slots=True, kw_only=True)
class Graph:
    """One captured graph of a step, in the order they run; segment `i` of the nodes is graph `i`.

    `inputs` are what it reads of the batch, each with its layout: `input_ids int64[4x128]`.
    Of its `num_outputs` outputs, the first `num_mutated` are new values of its inputs; the caller holds
    `returned` to the end of the step, and `missing` get no gradient; the gradients of the others take
    `tangent_bytes`. Gradients of its inputs `apart` leave it as the terms of a sum.
    `in_model` is False for the loss, which runs eagerly. A plan fills `schedule`: what the graph's
    backward pass runs, in order; positions count its forward ops and then its backward ops.
    `structure` is the same for the same ops with other shapes; `later_bytes` is the most that the model's
    graphs after it hold at once of what they make. `releases` are (op, after) for the values that are
    offloaded: that of forward op `op` is let go right after forward op `after` has run.
    """

    fingerprint: str
    in_model: bool
    returned: tuple[int, ...]
    missing: tuple[int, ...]
    apart: tuple[int, ...] = ()
    schedule: tuple[GraphRun, ...] = ()
    tangent_bytes: int = 0
    inputs: tuple[str, ...] = ()
    structure: str = ""
    later_bytes: int = 0
    num_outputs: int = 0
    num_mutated: int = 0
    releases: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One training step: nodes in the order they run, `nodes[i].rank == i`, storages by id.

    Forward nodes come first, then backward, then optimizer; inputs of a region stand at its head.
    A model with graph breaks has several segments, run 0, 1, 2 forward and 2, 1, 0 backward; a
    forward node can only be run again inside the backward part of its own segment.
    `identity` says what the step was captured from, as (what, value) pairs: a plan is for that alone.
    `rules` are (name, description) of the remat rules of its remats. `holds_outputs`: the loop keeps the
    model's outputs live, besides the loss, to the end of the backward pass. `transfer_speed` is set where
    values may be offloaded. `optimizer_chunks` are (bytes of a chunk, bytes live inside the step) for each
    chunk size of a split optimizer step, smallest first; the optimizer's nodes describe the smallest.
    `gradient_strides` are pairs of dimension orders in memory, outermost first: that of an output, and that
    of its gradient where the two differ.
    """

    nodes: tuple[Node, ...]
    storages: tuple[Storage, ...]
    fingerprint: str = ""
    device: str = "cpu"
    copy_bytes_per_second: float = 0.0
    notes: tuple[str, ...] = ()
    graphs: tuple[Graph, ...] = ()
    identity: tuple[tuple[str, str], ...] = ()
    rules: tuple[tuple[str, str], ...] = ()
    holds_outputs: bool = True
    transfer_speed: TransferSpeed | None = None
    optimizer_chunks: tuple[tuple[int, int], ...] = ()
    gradient_strides: tuple[tuple[str, str], ...] = ()

    @property
    def seconds(self) -> float:
        return sum(node.seconds for node in self.nodes)

    @property
    def static_bytes(self) -> int:
        """What is there from the start of the step to its end."""
        return sum(storage.nbytes for storage in self.storages if storage.static)

    @property
    def first_backward_rank(self) -> int:
        """Rank where the forward region ends."""
        return sum(node.region is Region.FORWARD for node in self.nodes)


@dataclass(frozen=True, slots=True, kw_only=True)
class Activation:
    """A forward storage that backward reads again; ranks are those of the plain step.

    Between `last_forward_use` and `first_backward_use` it is held but idle: those idle bytes are
    all that a plan can win back. The recompute fields assume that all others are retained.
    """

    name: str
    storage: int
    module: str
    source: str
    nbytes: int
    creation_rank: int
    last_forward_use: int
    first_backward_use: int
    last_backward_use: int
    inactive_seconds: float
    offload_seconds: float
    recompute_sources: tuple[str, ...] = ()
    recompute_nodes: tuple[str, ...] = ()
    recompute_seconds: float = 0.0
    recompute_bytes: int = 0
    recompute_ratio: float = 0.0
    fixed: str = ""
