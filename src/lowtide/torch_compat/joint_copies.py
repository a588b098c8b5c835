"""The joint graph of a long chain of equal blocks, from that of five of them.

    traced:    forward   A B C D E        backward   E D C B A
    expanded:  forward   A B c c c C D E  backward   E D C c c c B A      c: a copy of C, with its own weights

A copy reads from its neighbours what C reads from B and D; B reads from the first copy what it reads from C,
and C from the last one what it reads from B. The copies get the names, notes and storages that a trace of all
blocks would give them.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple, Self

import torch
from torch import fx
from torch._functorch._aot_autograd.descriptors import GradAOTOutput
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx._lazy_graph_module import _LazyGraphModule
from torch.utils._python_dispatch import _disable_current_modes

from lowtide.torch_compat.equal_blocks import BLOCK, STACK, BlockChain, NotEqual, check, layout_of
from lowtide.torch_compat.joint_blocks import (
    BACKWARD,
    FORWARD,
    OWN,
    A,
    B,
    C,
    D,
    E,
    JointBlocks,
    Place,
    split_name,
    tensors_of,
)

STACKS = (STACK, "fwd_nn_module_stack")
CALLS = ("source_fn_stack", "fwd_source_fn_stack")


def expanded(
    joint: fx.GraphModule, chain: BlockChain, values: Sequence[Any], descriptions: Sequence[Any]
) -> fx.GraphModule:
    """The joint graph of all blocks of a chain, from that of its `shortened` graph. `values` and torch's
    `descriptions` are those of the long graph's inputs. `NotEqual` where blocks differ."""
    with _disable_current_modes():
        try:
            return _Copies(JointBlocks(joint, chain), values, descriptions).write()
        except KeyError as missing:  # a node that no rule expects: its place in a long chain is unknown
            raise NotEqual(f"the place of {missing} is unknown") from missing


class _Copies:
    def __init__(self, blocks: JointBlocks, values: Sequence[Any], descriptions: Sequence[Any]) -> None:
        self.blocks, self.chain = blocks, blocks.chain
        self.values, self.descriptions = values, descriptions
        self.graph = fx.Graph()
        self.own = self.chain.own_inputs[self.chain.template]
        self.new: dict[fx.Node, fx.Node] = {}
        """by node of the short graph"""
        self.at: dict[Place, fx.Node] = {}
        """by place in the long chain"""
        self.storages: dict[tuple[Place, int], torch.UntypedStorage] = {}
        self.of_c = {
            part: [node for node, place in blocks.places.items() if place.part == part and place.block == C]
            for part in (FORWARD, BACKWARD)
        }
        self.renames = {
            number: _Renames.of(self.chain.blocks[self.chain.template], self.chain.blocks[number])
            for number in self.chain.dropped
        }
        self.dropped = {
            node: (number, slot)
            for number in self.chain.dropped
            for slot, node in enumerate(self.chain.own_inputs[number])
        }

    def write(self) -> fx.GraphModule:
        for index, node in enumerate(self.chain.inputs):
            self._write_input(index, node)
        for tangent in self.blocks.tangents:
            new = self.graph.create_node("placeholder", tangent.target, (), {}, tangent.name)
            new.meta = dict(tangent.meta)
            self.new[tangent] = new
        for node in self.blocks.ops:
            if node is self.blocks.forward_of_c:
                for number in self.chain.dropped:
                    self._write_copy(FORWARD, number)
            elif node is self.blocks.backward_of_b:
                for number in reversed(self.chain.dropped):
                    self._write_copy(BACKWARD, number)
            self._write_op(node)
        self._write_output()
        for node in self.graph.nodes:
            if BLOCK in (custom := node.meta.get("custom", {})):
                node.meta["custom"] = {key: value for key, value in custom.items() if key != BLOCK}
                if not node.meta["custom"]:
                    del node.meta["custom"]
        return _LazyGraphModule(self.blocks.joint, self.graph)

    def _write_input(self, index: int, node: fx.Node) -> None:
        name = f"primals_{index + 1}"
        new = self.graph.create_node("placeholder", name, (), {}, name)
        if node in self.dropped:
            number, slot = self.dropped[node]
            place = Place(OWN, number, slot)
            like, value = self.blocks.primals[self.own[slot]], self.values[index]
            same = layout_of(value) == layout_of(like.meta["val"])
            check(same, f"{node.name} has another layout than the same input of another block")
            new.meta = {**self._renamed(like.meta, number), "val": value}
            self.at[place] = new
            self.storages[place, 0] = value.untyped_storage()
        else:
            old = self.blocks.primals[node]
            check(old.name.startswith("primals_"), "inputs have other names")
            new.meta = dict(old.meta)
            self._note(old, new)
        new.meta["desc"] = self.descriptions[index]

    def _note(self, old: fx.Node, new: fx.Node) -> None:
        """Note where a node of the short graph is in the long one."""
        self.new[old] = new
        if (place := self.blocks.places.get(old)) is not None:
            self.at[place._replace(block=self.blocks.number(place.block))] = new

    def _write_op(self, node: fx.Node) -> None:
        """Write an op of the short graph. An op of a block gets the block's neighbours in the long chain."""
        blocks, place = self.blocks, self.blocks.places.get(node)

        def source(read: fx.Node) -> fx.Node:
            if place is None:
                self._check_outside(node, read)
                return self.new[read]
            return self._source(read, place.block, blocks.number(place.block))

        base, count = split_name(node.name)
        is_late = node in blocks.late or (place is not None and place.part == BACKWARD and place.block <= B)
        if not blocks.is_forward(node) or node in blocks.from_c:
            count += self.chain.num_dropped * blocks.forward_steps.get(base, 0)
        if is_late:
            count += self.chain.num_dropped * blocks.backward_steps.get(base, 0)
        args, kwargs = fx.map_arg((node.args, node.kwargs), source)
        new = self.graph.create_node(node.op, node.target, args, kwargs, _joined(base, count), node.type)
        new.meta = dict(node.meta)
        if place is not None and "val" in new.meta:
            new.meta["val"] = self._value(node, place.block, blocks.number(place.block))
        if new.meta.get("seq_nr", -1) >= blocks.seq_start:
            new.meta["seq_nr"] += self.chain.num_dropped * blocks.seq_step
        self._note(node, new)

    def _check_outside(self, node: fx.Node, read: fx.Node) -> None:
        """Check that an op outside of the blocks reads nothing of which a long chain has many.

        The op before the backward pass of the blocks may read what D made in forward, since D is the block
        before the last; one after it what B made, the second block.
        """
        place = self.blocks.places.get(read)
        is_late = node in self.blocks.late
        if place is None or place.block == (A if is_late else E):
            return
        is_near = place.block == (B if is_late else D) and place.part != BACKWARD
        check(
            is_near and not self.blocks.is_forward(node),
            f"{node.name} reads {read.name} of a block in the middle",
        )

    def _source(self, read: fx.Node, block: int, number: int) -> fx.Node:
        """What a node of the block `number` reads where a node of `block` in the short graph reads `read`."""
        place = self.blocks.places.get(read)
        if place is None or read in self.blocks.fixed:
            return self.new[read]
        step = place.block - block
        check(abs(step) <= 1, f"{read.name} is read by a block that is not next to its own")
        return self.at[place._replace(block=number + step)]

    def _write_copy(self, part: str, number: int) -> None:
        """Write the ops of a copy of C."""
        blocks, num_dropped = self.blocks, self.chain.num_dropped
        num_before = (
            number - self.chain.dropped.start if part == FORWARD else self.chain.dropped.stop - number
        )
        for node in self.of_c[part]:
            args, kwargs = fx.map_arg((node.args, node.kwargs), lambda read: self._source(read, C, number))
            base, count = split_name(node.name)
            if part == FORWARD:
                count += num_before * blocks.forward_steps[base]
            else:
                count += num_dropped * blocks.forward_steps.get(base, 0)
                count += num_before * blocks.backward_steps[base]
            new = self.graph.create_node(node.op, node.target, args, kwargs, _joined(base, count), node.type)
            new.meta = self._renamed(node.meta, number)
            if "val" in new.meta:
                new.meta["val"] = self._value(node, C, number)
            if "seq_nr" in new.meta:
                num_later = num_dropped if node in blocks.unnumbered else number - self.chain.dropped.start
                new.meta["seq_nr"] += num_later * blocks.seq_step
            self.at[blocks.places[node]._replace(block=number)] = new

    def _value(self, node: fx.Node, block: int, number: int) -> Any:
        """The fake value of a node of `block` in the short graph, as one of the block `number` in the long
        chain. A tensor is new where its storage is another one there."""

        def made(value: Any) -> Any:
            if isinstance(value, (tuple, list)):
                return type(value)(map(made, value))
            if not isinstance(value, torch.Tensor):
                return value
            storage = self._storage(value, block, number)
            return value if storage is None else _fake(value, storage)

        return made(node.meta["val"])

    def _storage(self, value: torch.Tensor, block: int, number: int) -> torch.UntypedStorage | None:
        """The storage of a value in the long chain; None for the one that the value has."""
        home = self.blocks.home(value)
        place = self.blocks.places.get(home.node)
        if place is None or home.node in self.blocks.fixed:
            return None
        owner = place._replace(block=number + place.block - block)
        traced = self.blocks.traced(owner.block)
        if traced == place.block:
            return None
        if traced is not None:
            maker = self.blocks.nodes[place._replace(block=traced)]
            return tensors_of(maker)[home.tensor].untyped_storage()
        key = owner, home.tensor
        if key not in self.storages:
            nbytes = value.untyped_storage().nbytes()
            self.storages[key] = torch.UntypedStorage(nbytes, device="meta")  # type: ignore[no-untyped-call]
        return self.storages[key]

    def _renamed(self, meta: dict[str, Any], number: int) -> dict[str, Any]:
        """Notes of an op of C as those of the block `number`."""
        renames, new = self.renames[number], dict(meta)
        for key in STACKS:
            if stack := new.get(key):
                new[key] = dict(renames.modules.get(name, (name, entry)) for name, entry in stack.items())
        for key in CALLS:
            if calls := new.get(key):
                new[key] = [(renames.calls.get(name, name), *rest) for name, *rest in calls]
        if "stack_trace" in new:
            new["stack_trace"] = renames.traces.get(new["stack_trace"], new["stack_trace"])
        return new

    def _write_output(self) -> None:
        blocks = self.blocks
        results: list[Any] = []
        for value in blocks.results[: blocks.num_outputs]:
            is_node = isinstance(value, fx.Node)
            place = blocks.places.get(value) if is_node else None
            check(place is None or place.block == E, "a block in the middle makes an output")
            results.append(self.new[value] if is_node else value)
        gradients = blocks.gradients
        for node in self.chain.inputs:
            if node in self.dropped:
                number, slot = self.dropped[node]
                gradient = gradients[self.own[slot]]
                results.append(None if gradient is None else self._source(gradient, C, number))
            else:
                results.append(self._gradient_of(node, gradients[node]))
        old = blocks.joint.graph.output_node()
        new = self.graph.output(tuple(results) if isinstance(blocks.results, tuple) else results)
        new.meta = dict(old.meta)
        if described := old.meta.get("desc"):
            of_inputs = dict(zip(blocks.primals, described[blocks.num_outputs :], strict=True))
            inputs = self.chain.inputs
            like = [self.own[self.dropped[node][1]] if node in self.dropped else node for node in inputs]
            new.meta["desc"] = [
                *described[: blocks.num_outputs],
                *(
                    GradAOTOutput(name) if isinstance(of_inputs[node], GradAOTOutput) else of_inputs[node]
                    for node, name in zip(like, self.descriptions, strict=True)
                ),
            ]

    def _gradient_of(self, node: fx.Node, gradient: fx.Node | None) -> fx.Node | None:
        if gradient is None:
            return None
        place = self.blocks.places.get(self.blocks.primals[node])
        if place is not None:
            return self._source(gradient, place.block, self.blocks.number(place.block))
        found = self.blocks.places.get(gradient)
        check(
            found is None or found.block in (A, D, E),
            "a gradient of all blocks ends in a block in the middle",
        )
        return self.new[gradient]


class _Renames(NamedTuple):
    """How the notes of ops of one block are those of another: modules, calls, lines of the user's code."""

    modules: dict[str, tuple[str, Any]]
    calls: dict[str, str]
    traces: dict[str, str]

    @classmethod
    def of(cls, block: Sequence[fx.Node], other: Sequence[fx.Node]) -> Self:
        found = cls({}, {}, {})
        for mine, its in zip(block, other, strict=True):
            stacks = (mine.meta.get(STACK) or {}).items(), (its.meta.get(STACK) or {}).items()
            for (key, _), entry in zip(*stacks, strict=False):
                found.modules[key] = entry
            calls = mine.meta.get(CALLS[0]) or (), its.meta.get(CALLS[0]) or ()
            for (name, *_), (new_name, *_) in zip(*calls, strict=False):
                found.calls[name] = new_name
            if "stack_trace" in mine.meta and "stack_trace" in its.meta:
                found.traces[mine.meta["stack_trace"]] = its.meta["stack_trace"]
        return found


def _fake(like: torch.Tensor, storage: torch.UntypedStorage) -> torch.Tensor:
    """A fake tensor with the layout of another, on a storage. No mode of torch may be active."""
    assert isinstance(like, FakeTensor)
    tensor = torch.empty(0, dtype=like.dtype, device="meta")
    tensor.set_(storage, like.storage_offset(), like.shape, like.stride())
    return FakeTensor(like.fake_mode, tensor, like.device)


def _joined(base: str, number: int) -> str:
    return f"{base}_{number}" if number else base
