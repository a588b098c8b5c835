"""The parts of a traced joint graph of five equal blocks, and whether two of them are equal.

    forward   A B C D E        backward   E D C B A

C is B, one block later, where each op of C has the target, the arguments and the layout of the same op of
B, and reads what the same op of B reads, one block later. Storages are compared as well. `NotEqual` says what
differs. The backward pass of a block begins with the first op that is noted to belong to the block; it is as
long as the distance to that of the next block, so that ops between two blocks, such as sums of gradients,
belong to one of them.
"""

import itertools
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensor

from lowtide.torch_compat.dispatch import storage_key
from lowtide.torch_compat.equal_blocks import BLOCK, KEPT, BlockChain, NotEqual, check, layout_of

A, B, C, D, E = range(KEPT)
"""The blocks of a shortened graph."""
OWN, FORWARD, BACKWARD = "own input", "forward", "backward"
NAME = re.compile(r"([a-zA-Z_0-9]*?)(?:_(\d+))?")
"""A name that fx gives: a base and a number."""
SAME_NOTES = (
    "partitioner_tag",
    "is_gradient_acc",
    "autograd_backward",
    "lowtide_own_sum",
    "has_backward_hook",
)


class Place(NamedTuple):
    """Where a node is: in which part of which block, and the number of the node there."""

    part: str
    block: int
    position: int


class Home(NamedTuple):
    """The node that made a storage, and the number of the storage's tensor in the node's value."""

    node: fx.Node
    tensor: int


class JointBlocks:
    """A joint graph of five blocks, of which B and C are equal.

    - `primals`: the inputs, by those of the Dynamo graph
    - `places`: of all nodes in blocks
    - `fixed`: nodes that all blocks read: outside of the blocks, or early in the backward pass
    - `late`: backward ops after those of B
    - `forward_steps`, `backward_steps`: by how much the numbers in the names of ops grow from one block to
      the next in the order in which torch traces them, by the base of the name
    - `seq_step`: the same for torch's numbers of autograd's nodes; `seq_start` is the first number of C.
      `unnumbered` ops of C belong to no node: torch gives them the number of the last one
    """

    def __init__(self, joint: fx.GraphModule, chain: BlockChain) -> None:
        self.joint, self.chain = joint, chain
        gone = {node for number in chain.dropped for node in chain.own_inputs[number]}
        kept = [node for node in chain.inputs if node not in gone]
        placeholders = joint.graph.find_nodes(op="placeholder")
        check(len(placeholders) >= len(kept), "the graph has fewer inputs than its code")
        self.primals = dict(zip(kept, placeholders, strict=False))
        self.tangents = placeholders[len(kept) :]
        self.ops = [node for node in joint.graph.nodes if node.op not in ("placeholder", "output")]
        self.places: dict[fx.Node, Place] = {}
        self.fixed: set[fx.Node] = set()
        for block in range(KEPT):
            for slot, node in enumerate(chain.own_inputs[self.number(block)]):
                self.places[self.primals[node]] = Place(OWN, block, slot)
        self.num_forward = self._find_forward()
        self.late = self._find_backward()
        self.nodes = {place: node for node, place in self.places.items()}
        self._homes: dict[int, Home] = {}
        for node in (*placeholders, *self.ops):
            for index, tensor in enumerate(tensors_of(node)):
                self._homes.setdefault(storage_key(tensor), Home(node, index))
        self.forward_steps: dict[str, int] = {}
        self.backward_steps: dict[str, int] = {}
        self.seq_step = self.seq_start = 0
        self.unnumbered: set[fx.Node] = set()
        self._shifted: set[fx.Node] = set()
        self._compare()

    def number(self, block: int) -> int:
        """The number in the long chain of a block of the short one."""
        return block if block < KEPT // 2 else len(self.chain.blocks) - KEPT + block

    def traced(self, number: int) -> int | None:
        """The block of the short chain that has this number in the long one; None where no block has it."""
        return next((block for block in range(KEPT) if self.number(block) == number), None)

    def home(self, tensor: torch.Tensor) -> Home:
        return self._homes[storage_key(tensor)]

    @property
    def results(self) -> Sequence[Any]:
        """What the graph returns: outputs, then a gradient for each input."""
        results = self.joint.graph.output_node().args[0]
        assert isinstance(results, (tuple, list))
        return results

    @property
    def num_outputs(self) -> int:
        return len(self.results) - len(self.primals)

    @property
    def gradients(self) -> dict[fx.Node, fx.Node | None]:
        """The gradient of each input of the Dynamo graph."""
        found = self.results[self.num_outputs :]
        return {
            node: value if isinstance(value, fx.Node) else None
            for node, value in zip(self.primals, found, strict=True)
        }

    def is_forward(self, node: fx.Node) -> bool:
        return node in self._forward

    def _find_forward(self) -> int:
        later: set[fx.Node] = set(self.tangents)
        for node in self.ops:
            tag = str(node.meta.get("partitioner_tag", "is_forward"))
            if tag != "is_forward" or any(source in later for source in node.all_input_nodes):
                later.add(node)
        num_forward = next((i for i, node in enumerate(self.ops) if node in later), len(self.ops))
        check(all(node in later for node in self.ops[num_forward:]), "forward ops follow backward ops")
        self._forward = set(self.ops[:num_forward])
        groups = [
            (block, list(nodes)) for block, nodes in itertools.groupby(self.ops[:num_forward], key=_block_of)
        ]
        first = next((i for i, (block, _) in enumerate(groups) if block is not None), 0)
        blocks, rest = groups[first : first + KEPT], groups[first + KEPT :]
        check([block for block, _ in blocks] == list(range(KEPT)), "blocks are not in order")
        check(all(block is None for block, _ in rest), "a block has ops in two places")
        for block, nodes in blocks:
            assert block is not None
            for position, node in enumerate(nodes):
                self.places[node] = Place(FORWARD, block, position)
        self.forward_of_c = blocks[C][1][0]
        self.from_c = set(itertools.chain(*(nodes for _, nodes in (*blocks[C:], *rest))))
        """forward ops from the first of C on"""
        return num_forward

    def _find_backward(self) -> set[fx.Node]:
        ops = self.ops[self.num_forward :]
        starts: dict[int | None, int] = {}
        for index, node in enumerate(ops):
            starts.setdefault(_block_of(node), index)
        check({B, C} <= starts.keys(), "a block has no backward pass")
        length = starts[B] - starts[C]
        check(length > 0, "backward passes of blocks are not in order")
        for block in range(KEPT):
            start = starts[B] + (B - block) * length
            for position in range(length):
                if 0 <= start + position < len(ops):
                    self.places[ops[start + position]] = Place(BACKWARD, block, position)
        self.backward_of_b = ops[starts[B]]
        return set(ops[starts[B] + length :])

    def _compare(self) -> None:
        pairs = [(one, self._later(place)) for one, place in list(self.places.items()) if place.block == B]
        num_of_c = sum(place.block == C for place in self.places.values())
        check(num_of_c == len(pairs), "blocks have different numbers of ops")
        steps = set()
        for one, other in pairs:
            self._compare_nodes(one, other)
            numbers = one.meta.get("seq_nr"), other.meta.get("seq_nr")
            if numbers[0] is None or numbers[1] is None:
                check(numbers == (None, None), "blocks have different numbers of autograd's nodes")
            elif numbers[0] == numbers[1]:
                self.unnumbered.add(other)
            else:
                steps.add(numbers[1] - numbers[0])
        check(len(steps) <= 1, "blocks have different numbers of autograd's nodes")
        self.seq_step = next(iter(steps), 0)
        numbered = (node.meta.get("seq_nr") for node in self.places if self._is_forward_of_c(node))
        self.seq_start = min((number for number in numbered if number is not None), default=0)
        gradients, own = self.gradients, self.chain.own_inputs
        for mine, its in zip(own[self.number(B)], own[self.number(C)], strict=True):
            first, second = gradients[mine], gradients[its]
            check((first is None) == (second is None), "only some blocks have a gradient")
            if first is not None and second is not None:
                self._compare_sources(first, second)
        check(not self._shifted & self.fixed, "a value is read as a block's and as one of all blocks")

    def _is_forward_of_c(self, node: fx.Node) -> bool:
        place = self.places[node]
        return place.part == FORWARD and place.block == C

    def _later(self, place: Place) -> fx.Node:
        node = self.nodes.get(place._replace(block=place.block + 1))
        if node is None:
            raise NotEqual("blocks have different numbers of ops")
        return node

    def _compare_nodes(self, one: fx.Node, other: fx.Node) -> None:
        check(one.op == other.op, "blocks have different ops")
        same_layout = layout_of(one.meta.get("val")) == layout_of(other.meta.get("val"))
        check(same_layout, f"{other.name} has another layout than {one.name}")
        for mine, its in zip(tensors_of(one), tensors_of(other), strict=True):
            is_plain = its.layout is torch.strided and not its.is_conj() and not its.is_neg()
            check(is_plain and isinstance(its, FakeTensor), f"{other.name} is no plain tensor")
            homes = self.home(mine), self.home(its)
            check(homes[0].tensor == homes[1].tensor, f"{other.name} has another storage than {one.name}")
            self._compare_sources(homes[0].node, homes[1].node)
        if one.op == "placeholder":
            return
        check(one.op == "call_function" and one.target == other.target, f"{other.name} is not {one.name}")
        check("recompute" not in one.meta and "recompute" not in other.meta, "a block calls checkpoint")
        check(not any(arg.op == "get_attr" for arg in other.all_input_nodes), "a block reads a constant")
        for note in SAME_NOTES:
            check(one.meta.get(note) == other.meta.get(note), f"{note} differs at {other.name}")
        arguments = (one.args, one.kwargs), (other.args, other.kwargs)
        check(_same(*arguments, self._compare_sources), f"{other.name} has other arguments than {one.name}")
        (base, number), (other_base, other_number) = split_name(one.name), split_name(other.name)
        check(base == other_base, f"{other.name} is not named as {one.name}")
        is_forward = self.places[one].part == FORWARD
        steps = self.forward_steps if is_forward else self.backward_steps
        step = other_number - number if is_forward else number - other_number
        check(steps.setdefault(base, step) == step, f"ops named {base} are not counted alike")

    def _compare_sources(self, one: fx.Node, other: fx.Node) -> None:
        """Check that `other`, which C reads, is what B reads as `one`, a block later; or one for both."""
        mine, its = self.places.get(one), self.places.get(other)
        if one is other and (mine is None or (mine.part == BACKWARD and mine.block >= D)):
            self.fixed.add(one)
            return
        is_shifted = mine is not None and mine.block < E and its == mine._replace(block=mine.block + 1)
        check(is_shifted, f"{other.name} is not read as {one.name} is")
        self._shifted |= {one, other}


def _same(one: Any, other: Any, sources: Callable[[fx.Node, fx.Node], None]) -> bool:
    """Whether two ops have equal arguments, where `sources` checks what they read."""
    if isinstance(one, fx.Node) and isinstance(other, fx.Node):
        sources(one, other)
        return True
    if type(one) is not type(other):
        return False
    if isinstance(one, (tuple, list)):
        return len(one) == len(other) and all(
            _same(mine, its, sources) for mine, its in zip(one, other, strict=True)
        )
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(_same(one[key], other[key], sources) for key in one)
    if isinstance(one, slice):
        pairs = (one.start, other.start), (one.stop, other.stop), (one.step, other.step)
        return all(_same(mine, its, sources) for mine, its in pairs)
    return one.hex() == other.hex() if isinstance(one, float) else bool(one == other)


def _block_of(node: fx.Node) -> int | None:
    block: int | None = (node.meta.get("custom") or {}).get(BLOCK)
    return block


def tensors_of(node: fx.Node) -> list[torch.Tensor]:
    """The fake tensors that a node makes."""
    return list(_leaves(node.meta.get("val")))


def _leaves(value: Any) -> Iterable[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from _leaves(item)


def split_name(name: str) -> tuple[str, int]:
    """A node's name as fx counts: `add_3` is the third of `add`, after `add` itself."""
    match = NAME.fullmatch(name)
    assert match is not None
    return match[1], int(match[2] or 0)
