"""Equal blocks of a Dynamo graph, each of which reads what the block before it made.

    embedding ── b0 ── b1 ── b2 ── ... ── b23 ── head        24 blocks, of one module class

`find_chain` finds the blocks by the modules that torch notes at each op, and compares them op by op. Blocks
of a chain are equal in all that a tracer can see: ops, arguments, layouts of all values, and where each value
comes from. Weights differ. `shortened` leaves blocks out:

    embedding ── b0 ── b1 ── b21 ── b22 ── b23 ── head
"""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

STACK = "nn_module_stack"
BLOCK = "lowtide_block"
"""In the notes of an op, under "custom", which torch's tracers pass on: the number of the op's block."""
KEPT = 5
"""Blocks of a shortened graph: two at the start and three at the end. A gradient that all blocks add to has
one term at the last block, and its first sum at the block before."""
FEWEST = 7
"""A chain of fewer blocks is traced whole: five of them are traced anyway."""
PERIODS = tuple((period, first) for period in range(1, 7) for first in range(period))
"""Modules per block, and modules before the first block, in the order in which they are tried: a model may
repeat several layers in turn."""


class NotEqual(Exception):
    """Blocks are not equal, or a graph has another form than expected; the reason in words."""


def check(condition: bool, reason: str) -> None:
    if not condition:
        raise NotEqual(reason)


@dataclass(frozen=True, eq=False)
class BlockChain:
    """Equal blocks of a graph in their order: the ops of each block, and the inputs of the graph that only
    this block reads, each in the order of its first use."""

    graph: fx.GraphModule
    blocks: tuple[tuple[fx.Node, ...], ...]
    own_inputs: tuple[tuple[fx.Node, ...], ...]

    @property
    def inputs(self) -> list[fx.Node]:
        """The inputs of the graph."""
        return list(self.graph.graph.find_nodes(op="placeholder"))

    @property
    def num_dropped(self) -> int:
        return len(self.blocks) - KEPT

    @property
    def dropped(self) -> range:
        """The numbers of the blocks that `shortened` leaves out."""
        return range(2, len(self.blocks) - 3)

    @property
    def template(self) -> int:
        """The number of the block that is traced in place of the dropped ones."""
        return len(self.blocks) - 3


def find_chain(graph: fx.GraphModule) -> BlockChain | None:
    """The first chain of equal blocks; None where no chain has `FEWEST`. Graphs that read tensors of
    subclasses, such as those divided among processes, are traced whole."""
    values = (node.meta.get("example_value") for node in graph.graph.find_nodes(op="placeholder"))
    if any(is_traceable_wrapper_subclass(value) for value in values):
        return None
    ops = [node for node in graph.graph.nodes if node.op not in ("placeholder", "output")]
    stacks = [tuple((node.meta.get(STACK) or {}).items()) for node in ops]
    for depth in range(1, 1 + max(map(len, stacks), default=0)):
        for calls in _calls_of_one_module(ops, stacks, depth):
            for period, first in PERIODS:
                blocks = [
                    tuple(itertools.chain(*calls[start : start + period]))
                    for start in range(first, len(calls) - period + 1, period)
                ]
                chain = _chain_of(graph, blocks)
                if chain is not None:
                    return chain
    return None


def _calls_of_one_module(
    ops: Sequence[fx.Node], stacks: Sequence[tuple[Any, ...]], depth: int
) -> Iterator[list[tuple[fx.Node, ...]]]:
    """The ops of at least `FEWEST` modules that one module calls one after the other, at this depth of the
    stack of modules."""
    pairs = zip(stacks, ops, strict=True)
    calls = [
        (stack, tuple(node for _, node in group))
        for stack, group in itertools.groupby(pairs, key=lambda pair: pair[0][:depth])
    ]
    for caller, group in itertools.groupby(calls, key=lambda call: _caller(call[0], depth)):
        found = [nodes for _, nodes in group]
        if caller is not None and len(found) >= FEWEST:
            yield found


def _caller(stack: tuple[Any, ...], depth: int) -> Any:
    """The modules around a call; None outside of modules at this depth."""
    return stack[:-1] if len(stack) == depth else None


def _chain_of(graph: fx.GraphModule, blocks: list[tuple[fx.Node, ...]]) -> BlockChain | None:
    """The longest stretch of these blocks that is a chain."""
    # most models end here: what blocks read is compared only where many have the same ops
    ops = [[node.target for node in nodes] for nodes in blocks]
    if max((len(list(group)) for _, group in itertools.groupby(ops)), default=0) < FEWEST:
        return None
    place = {
        node: (number, position) for number, nodes in enumerate(blocks) for position, node in enumerate(nodes)
    }
    own = [_own_inputs(nodes, place, number) for number, nodes in enumerate(blocks)]
    kinds = [_signature(nodes, place, number, own[number]) for number, nodes in enumerate(blocks)]
    best = range(0)
    start = 0
    for _, group in itertools.groupby(kinds):
        stretch = range(start, start + len(list(group)))
        start = stretch.stop
        first = stretch.start
        if first and [node.target for node in blocks[first - 1]] == [node.target for node in blocks[first]]:
            stretch = range(first - 1, stretch.stop)  # reads what no block made, as the first of all does
        if len(stretch) > len(best):
            best = stretch
    if len(best) < FEWEST:
        return None
    chain = BlockChain(graph, tuple(blocks[best.start : best.stop]), tuple(own[best.start : best.stop]))
    return chain if _only_next_reads(chain) else None


def _own_inputs(
    nodes: Sequence[fx.Node], place: dict[fx.Node, tuple[int, int]], number: int
) -> tuple[fx.Node, ...]:
    read = dict.fromkeys(source for node in nodes for source in node.all_input_nodes)
    return tuple(
        source
        for source in read
        if source.op == "placeholder"
        and all(user in place and place[user][0] == number for user in source.users)
    )


def _signature(
    nodes: Sequence[fx.Node],
    place: dict[fx.Node, tuple[int, int]],
    number: int,
    own: Sequence[fx.Node],
) -> tuple[Any, ...]:
    slots = {node: slot for slot, node in enumerate(own)}

    def source(node: fx.Node) -> Any:
        if node in slots:
            return "own", slots[node]
        if node in place:
            block, position = place[node]
            return "block", block - number, position
        return "outside", node

    return (
        tuple(_layout(node) for node in own),
        tuple(
            (node.op, node.target, _frozen(node.args, source), _frozen(node.kwargs, source), _layout(node))
            for node in nodes
        ),
    )


def _frozen(value: Any, source: Any) -> Any:
    """Arguments in a form that can be compared; the type tells 1 from 1.0 and from True."""
    if isinstance(value, fx.Node):
        return source(value)
    if isinstance(value, (tuple, list)):
        return type(value), *(_frozen(item, source) for item in value)
    if isinstance(value, dict):
        return dict, *((key, _frozen(item, source)) for key, item in value.items())
    if isinstance(value, slice):
        return slice, *(_frozen(item, source) for item in (value.start, value.stop, value.step))
    if isinstance(value, float):
        return float, value.hex()
    return type(value), value


def _layout(node: fx.Node) -> Any:
    return layout_of(node.meta.get("example_value"))


def layout_of(value: Any) -> Any:
    """What two equal blocks have to share of a fake value."""
    if isinstance(value, torch.Tensor) and value.is_nested:
        return type(value), id(value)  # has no shape that could be compared
    if isinstance(value, torch.Tensor):
        return (
            type(value),
            value.layout,
            value.dtype,
            value.device,
            tuple(value.shape),
            tuple(value.stride()) if value.layout is torch.strided else (),
            value.storage_offset() if value.layout is torch.strided else 0,
            value.requires_grad,
            value.is_leaf,
        )
    if isinstance(value, (tuple, list)):
        return tuple(layout_of(item) for item in value)
    return type(value), repr(value)


def _only_next_reads(chain: BlockChain) -> bool:
    """Whether no block but the last gives values to others than the next block."""
    number = {node: index for index, nodes in enumerate(chain.blocks) for node in nodes}
    last = len(chain.blocks) - 1
    return all(
        node.op in ("call_function", "call_method") for nodes in chain.blocks for node in nodes
    ) and all(
        number.get(user) in (index, index + 1)
        for index, nodes in enumerate(chain.blocks[:last])
        for node in nodes
        for user in node.users
    )


def shortened(chain: BlockChain) -> fx.GraphModule:
    """The graph without the blocks `dropped`; its ops note their block in the chain of those that stay."""
    graph = fx.Graph()
    new: dict[fx.Node, fx.Node] = {}
    blocks = chain.blocks
    dropped = {node for number in chain.dropped for node in (*blocks[number], *chain.own_inputs[number])}
    numbers = {node: number for number, nodes in enumerate((*blocks[:2], *blocks[-3:])) for node in nodes}
    before = dict(zip(blocks[-4], blocks[1], strict=True))
    for node in chain.graph.graph.nodes:
        if node in dropped:
            continue
        copy = graph.node_copy(node, lambda source: new[before.get(source, source)])
        new[node] = copy
        if node in numbers:
            copy.meta["custom"] = {**copy.meta.get("custom", {}), BLOCK: numbers[node]}
    return fx.GraphModule(chain.graph, graph)
