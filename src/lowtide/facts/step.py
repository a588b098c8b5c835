"""One training step as frozen records: nodes in the order they run, and the storages that they make.

Bytes belong to storages. A view, a `getitem` or a `detach` makes no storage; it extends a live range.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

UPDATE = "update"
"""The op of a node that is the optimizer's step for one parameter, inside the backward pass."""

LAST_OUTPUTS = "outputs of the last step"
"""A node and its storage: what the loop keeps live until the forward pass ends."""

RESERVED = "reserved"
"""The storage of the bytes that the user says are live besides a step."""

PIPELINE = "micro-batches of the pipeline"
"""The storage of the bytes that a pipeline keeps live besides its micro-batches in flight."""

EARLIER = "gradients of earlier micro-batches"
"""A node and its storage: gradients that are live when the step begins, to which it adds its own."""

FRAMES = "frames"
"""The op of a node that stands for frames of Python, which keep its reads live; eager has no such frames."""


FETCH = "fetch"
"""The op of a node that reads a weight from the store where it rests, into a block of its own. It may run
earlier than its rank, anywhere in the forward part of its segment."""


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


TEMPORARIES = "temporaries and other"
"""`Kind.OTHER` in words: what ops take inside, and gradients of activations."""


class Action(StrEnum):
    """What a plan does with an activation between its last forward use and its first backward use.

    An offloaded activation is copied out of the device's memory and read back.
    """

    RETAINED = "RETAINED"
    RECOMPUTE = "RECOMPUTE"
    OFFLOAD = "OFFLOAD"


@dataclass(frozen=True, slots=True, kw_only=True)
class Storage:
    """A block of memory.

    `static`: live before the step and after it (parameters, buffers, the batch, optimizer state).
    `pinned`: made during the step and live to its end, read or not (gradients, outputs of the model).
    Any other storage is freed after the last read of the last value that refers to it.
    `pinned_in_eager`: live to the end in eager PyTorch only (gradients that a step in backward uses at once).
    `extra_eager_bytes`: how much larger eager PyTorch's own version is (a dropout mask of floats).
    `host_bytes`: in a step on an accelerator, the bytes of a storage of the host, whose `nbytes` are 0.
    `rests`: what it is for the store where it may rest there between its uses: `state`, `frozen` or
    `parameters`; empty where it may not. State has the name of its parameter, and `update_bytes` is how many
    more bytes the parameter's update in the backward pass allocates where the state, or the parameter, rests.
    """

    id: int
    nbytes: int
    kind: Kind
    name: str
    static: bool = False
    pinned: bool = False
    extra_eager_bytes: int = 0
    pinned_in_eager: bool = False
    host_bytes: int = 0
    rests: str = ""
    update_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Remat:
    """One way to rematerialize a forward node's value in the backward pass: what it reads, makes and costs.

    `rule` names the remat rule (`lowtide.remat`). `action`: what a plan that takes this remat does with the
    value. `makes` are storage ids of the first run: a second run makes a second block of the same size.
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
    """One op, or one input, of the step.

    `reads`: ranks of the nodes whose values it needs. `holds`: the storages that its value refers to, those
    it `makes` and those it shares with its reads. `workspace_bytes` are live inside the op only; negative
    where the op writes its result over its last read. `remats`: how to rematerialize its value, the
    preferred remat first; where there is none, `fixed` says why. `on_demand`: makes what a remat keeps from
    the forward pass, and runs only where such a remat reads it. `movable`, of nodes on demand: releases a
    value whose copy to the store began when the value was made, and waits for that copy. Such a node may
    run anywhere from its rank to the end of its segment's forward part. `estimated`: its time was scaled
    from a smaller or similar op instead of measured. `extra_eager_bytes`: how much more is live inside
    eager PyTorch's own version; negative for less. `eager_reads`: ranks whose values stay live until here
    in eager, as inside an autograd formula. `eager_place`: eager runs the backward ops of a segment that
    have one in this order; a plan, by rank. `stack`: the number of its call stack among the step's `stacks`.
    `own_checkpoint` numbers the user's own calls of torch.utils.checkpoint: forward nodes that such a call
    runs again in eager's backward pass, and backward nodes of ops inside of it.
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
    stack: int = 0
    own_checkpoint: int = 0

    def remat(self, rule: str) -> Remat | None:
        """Its remat by that rule."""
        return next((remat for remat in self.remats if remat.rule == rule), None)

    @property
    def recompute(self) -> Remat | None:
        """Its preferred remat that computes the value again, if there is one."""
        return next((remat for remat in self.remats if remat.action is Action.RECOMPUTE), None)


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferSpeed:
    """The speed of transfers to a store and back: one transfer at a time in each direction.

    A transfer takes `latency_seconds` and its bytes over the direction's bandwidth. `store` as the user wrote
    it: `disk:/scratch`. `slows_compute`: seconds that the step computes longer for each second of a transfer
    beside it, since copies need some of the processor.
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
    """One run of the node at `rank`: its first run, or a rematerialization by a `rule`."""

    rank: int
    rule: str = ""

    @property
    def is_first(self) -> bool:
        return not self.rule


class GraphRun(NamedTuple):
    """One run of an op of a single graph: a `Run` by the op's `position` in that graph."""

    position: int
    rule: str = ""

    @property
    def is_first(self) -> bool:
        return not self.rule


@dataclass(frozen=True, slots=True, kw_only=True)
class Graph:
    """One captured graph of a step, in the order they run; segment `i` of the nodes is graph `i`.

    `inputs`: its reads of the batch, each with dtype and shape: `input_ids int64[4x128]`.
    Of its `num_outputs` outputs, the first `num_mutated` are new values of its inputs. The caller keeps the
    outputs `returned` live to the end of the step. Outputs `missing` get no gradient; the tangents of the
    others take `tangent_bytes`. Gradients of the inputs `apart` leave the graph as the terms of a sum.
    Gradients of the inputs `handed_over`, which other graphs use as well, leave as soon as they are made.
    `in_model` is False for the loss, which runs eagerly.
    `schedule`, set in a plan: the runs of the backward pass in order; positions count the forward ops, then
    the backward ops. `releases`, set in a plan: (op, after) for each offloaded value; the value of forward op
    `op` is released right after forward op `after`. `fetches`, set in a plan: (input, first, before) for each
    read of a resting weight in the forward pass: `input` is read for the forward ops from `first` on, and the
    read begins right before forward op `before`. In `schedule`, position `-1 - i` reads the weight of
    `fetches[i]` once more.
    `structure` is equal for the same ops with other shapes. `later_bytes`: the most bytes that the model's
    later graphs make and keep live at once. `rounds`: its parts that run with other bits than eager's, one or
    several of `ROUNDABLE`.
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
    handed_over: tuple[int, ...] = ()
    fetches: tuple[tuple[int, int, int], ...] = ()
    rounds: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One training step: nodes in the order they run, `nodes[i].rank == i`; storages by id.

    Forward nodes come first, then backward, then optimizer; inputs of a region stand at its head.
    A model with graph breaks has several segments. They run 0, 1, 2 in forward and 2, 1, 0 in backward, and a
    forward node is rematerialized only inside the backward part of its own segment.
    `identity` says what the step was captured from, as (what, value) pairs: a plan is for that alone.
    `rules` are (name, description) of the remat rules of its remats. `holds_outputs`: the loop keeps the
    model's outputs live, besides the loss, until the next forward pass ends. `transfer_speed` is set where
    values may be offloaded. `optimizer_chunks` are (bytes of a chunk, bytes live inside the step) for each
    chunk size of a split optimizer step, smallest first; the optimizer's nodes describe the smallest.
    `gradient_strides` are pairs of dimension orders in memory, outermost first: that of an output, and that
    of its gradient where the two differ. `stacks` are the distinct call stacks of its nodes in the model's
    code, lines from the outermost to the innermost; the first is empty. Older files have none.
    `first_break`: `file:line` of the code that ends the first graph of several. `offload_what`: what may be
    offloaded (`OFFLOADABLE`); empty without a store, and in older files. `repeatable`: names of custom
    ops that the user said give the same result twice. `resting_chunks`: for each chunk
    size of a step whose state rests on the store, the bytes live inside, and those where all parameters
    rest too. `calls`: how often the loop calls the model before its first backward pass; the nodes are those
    of one call, or of all of them (`planning.repeated_calls`). `pipeline`: the model is a stage of a
    pipeline, whose own tensors are counted.
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
    stacks: tuple[tuple[str, ...], ...] = ()
    first_break: str = ""
    offload_what: tuple[str, ...] = ()
    repeatable: tuple[str, ...] = ()
    resting_chunks: tuple[tuple[int, int, int], ...] = ()
    calls: int = 1
    pipeline: bool = False

    @property
    def seconds(self) -> float:
        return sum(node.seconds for node in self.nodes)

    @property
    def static_bytes(self) -> int:
        """Bytes that are live from the start of the step to its end."""
        return sum(storage.nbytes for storage in self.storages if storage.static)

    def stack_of(self, node: Node) -> tuple[str, ...]:
        """The lines of the model's code that led to a node, its own last; empty where unknown."""
        return self.stacks[node.stack] if self.stacks else ()

    def bytes_of(self, storages: Iterable[int]) -> int:
        """The bytes of some storages."""
        return sum(self.storages[storage].nbytes for storage in storages)

    @property
    def first_backward_rank(self) -> int:
        """The rank where the forward region ends."""
        return sum(node.region is Region.FORWARD for node in self.nodes)


@dataclass(frozen=True, slots=True, kw_only=True)
class Activation:
    """A forward storage that backward reads again; ranks are those of the step without recompute.

    Between `last_forward_use` and `first_backward_use` it is live but idle: only these idle bytes can be
    saved by a plan. The recompute fields assume that all other activations are retained.
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
