"""The facts of a step (`Analysis`) and of one graph (`GraphAnalysis`) while they are collected; the module
and the source line of a graph node."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx

from lowtide.facts import FRAMES, Kind, Node, Region, Storage
from lowtide.ops.calls import Call
from lowtide.ops.device_memory import CPU, is_on
from lowtide.remat import Kept, RematRule
from lowtide.trace.segments import Segment

NO_GRAPH = -1
"""The segment of nodes that belong to no graph."""
OWN_FOLDER = str(Path(__file__).parents[1])
"""lowtide's own code; the built-in models in it are a user's."""


@dataclass(frozen=True, slots=True)
class GraphNode:
    """The graph node behind a rank: its execution, and the call that replaces its own op, if any."""

    execution: int
    node: fx.Node
    call: Call | None = None


@dataclass(slots=True)
class Analysis:
    """The nodes and storages of a step so far, and the graph node behind each rank.

    The user's tensors are keyed by their `id`: `inputs` and `gradients` map it to a storage, `updated` has
    the parameters that are updated in the backward pass. `kept` has the ranks that only a remat rule needs.
    `missing`, `apart` and `handed_over` have, for each graph, the outputs without gradient, the inputs whose
    gradient leaves the graph as terms, and those whose gradient leaves as soon as it is made.
    `uncaptured_calls` has the ops of uncaptured code by the rank of the code's
    node, each with the bytes that stay live when the op ends. `ends` has the last rank of each pass of a
    graph, `earlier` is the rank of the gradients of earlier micro-batches, `last_outputs` that of the outputs
    of the last step. `device` is the step's.
    `has_stand_in_loss`: see `Trace`. `rounding` has what rounds in each graph, `not_rounding` why other parts
    of the model cannot.
    """

    nodes: list[Node] = field(default_factory=list)
    storages: list[Storage] = field(default_factory=list)
    stacks: dict[tuple[str, ...], int] = field(default_factory=lambda: {(): 0})
    graph_nodes: dict[int, GraphNode] = field(default_factory=dict)
    inputs: dict[int, int] = field(default_factory=dict)
    gradients: dict[int, int] = field(default_factory=dict)
    kept: dict[int, Kept] = field(default_factory=dict)
    updated: set[int] = field(default_factory=set)
    missing: list[frozenset[int]] = field(default_factory=list)
    apart: list[frozenset[int]] = field(default_factory=list)
    handed_over: list[frozenset[int]] = field(default_factory=list)
    segments: list[Segment] = field(default_factory=list)
    uncaptured_calls: dict[int, list[tuple[Call, int]]] = field(default_factory=dict)
    ends: dict[tuple[Region, int], int] = field(default_factory=dict)
    earlier: int | None = None
    last_outputs: int | None = None
    has_stand_in_loss: bool = False
    device: torch.device = CPU
    rounding: list[tuple[str, ...]] = field(default_factory=list)
    not_rounding: list[str] = field(default_factory=list)

    def add_storage_of(self, tensor: Tensor, *, nbytes: int | None = None, **fields: Any) -> int:
        """Add the storage of a tensor, of `nbytes` where given; one on the host takes no bytes of the step's
        device."""
        nbytes = tensor.untyped_storage().nbytes() if nbytes is None else nbytes
        if self.counts(tensor):
            return self.add_storage(nbytes=nbytes, **fields)
        return self.add_storage(nbytes=0, host_bytes=nbytes, **{**fields, "extra_eager_bytes": 0})

    def counts(self, tensor: Tensor) -> bool:
        """Whether a tensor takes memory of the step's device."""
        return is_on(self.device, tensor)

    def add_storage(self, **fields: Any) -> int:
        self.storages.append(Storage(id=len(self.storages), **fields))
        return len(self.storages) - 1

    def add_node(self, *, kind: Kind = Kind.OTHER, **fields: Any) -> int:
        self.nodes.append(Node(rank=len(self.nodes), kind=kind, **fields))
        return len(self.nodes) - 1

    def place_in_code(self, node: fx.Node) -> dict[str, Any]:
        """The fields of a node that say which code made it."""
        lines = source_lines(node)
        return {
            "module": module_path(node),
            "source": lines[-1] if lines else "",
            "stack": self.stacks.setdefault(lines, len(self.stacks)),
        }

    def renumber(self, rank: Mapping[int, int]) -> None:
        """Give nodes their new ranks, after nodes of no graph were inserted among them."""

        def new(ranks: tuple[int, ...]) -> tuple[int, ...]:
            return tuple(rank[old] for old in ranks)

        for place, node in enumerate(self.nodes):
            if node.segment != NO_GRAPH or node.op == FRAMES:  # others are new, and have their ranks
                remats = tuple(replace(remat, reads=new(remat.reads)) for remat in node.remats)
                eager = new(node.eager_reads)
                self.nodes[place] = replace(
                    node, rank=place, reads=new(node.reads), eager_reads=eager, remats=remats
                )
        self.graph_nodes = {rank[old]: node for old, node in self.graph_nodes.items()}
        self.kept = {rank[old]: kept for old, kept in self.kept.items()}
        self.ends = {key: rank[old] for key, old in self.ends.items()}
        self.earlier = None if self.earlier is None else rank[self.earlier]
        self.last_outputs = None if self.last_outputs is None else rank[self.last_outputs]


class GraphAnalysis:
    """One execution of a graph: the rank and the storages of each of its nodes.

    `storage_of` maps the storage of a fake tensor to a storage of the step. `changed` are storages that the
    step writes in place. `rules` are the remat rules that fit a node, each with the ranks that make the
    rule's kept tensors; `fixed` is the reason where none fits. A graph that is not `in_model` belongs to the
    loss, which runs eagerly.
    """

    def __init__(self, index: int, segment: Segment, *, in_model: bool) -> None:
        self.index = index
        self.in_model = in_model
        self.segment = segment
        self.graph = segment.joint.graph
        self.rank: dict[fx.Node, int] = {}
        self.holds: dict[fx.Node, tuple[int, ...]] = {}
        self.storage_of: dict[int, int] = {}
        self.changed: set[int] = set()
        self.rules: dict[fx.Node, list[tuple[RematRule, dict[Kept, int]]]] = {}
        self.fixed: dict[fx.Node, str] = {}
        results = segment.results
        self.outputs = results[: segment.num_forward_outputs]
        self.grads = results[segment.num_forward_outputs :]
        placeholders = self.graph.find_nodes(op="placeholder")
        tangents = segment.tangents
        self.tangents = tangents
        self.primals = [node for node in placeholders if node not in tangents]

    def name(self, node: fx.Node) -> str:
        """A name for `node` that no other graph of the step has."""
        return f"g{self.index}.{node.name}" if self.index else node.name


def module_path(node: fx.Node) -> str:
    """The path of a node's module, as in `model.named_modules()`."""
    stack = node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack")
    if not stack:
        return ""
    path = str(list(stack.values())[-1][0])
    path = re.sub(r"\._modules\['([^']*)'\]|\['([^']*)'\]", lambda m: f".{m[1] or m[2]}", path)
    parts = path.split(".")
    return ".".join(part for part in parts[2:] if part)


def source_lines(node: fx.Node) -> tuple[str, ...]:
    """`file:line` of each call that led to a node, the outermost first: frames outside of torch and of us."""
    frames = re.findall(r'File "([^"]+)", line (\d+)', node.meta.get("stack_trace") or "")
    return tuple(f"{file}:{line}" for file, line in frames if "/torch/" not in file and not _is_own(file))


def _is_own(file: str) -> bool:
    return file.startswith(f"{OWN_FOLDER}/") and not file.startswith(f"{OWN_FOLDER}/zoo/")
