"""Does a step that comes from a file make sense? Else it would be noticed deep inside a planner only."""

from collections.abc import Iterable
from itertools import pairwise

from lowtide.facts.step import Node, Recipe, Region, Step


def check_step(step: Step) -> None:
    """ValueError where nodes, storages and graphs of a step contradict each other."""
    if any(storage.id != position for position, storage in enumerate(step.storages)):
        raise ValueError("storages are out of order")
    if any(storage.nbytes < 0 for storage in step.storages):
        raise ValueError("a storage has less than no bytes")
    for position, node in enumerate(step.nodes):
        _check_node(step, position, node)
    order = list(Region)
    if any(order.index(one.region) > order.index(other.region) for one, other in pairwise(step.nodes)):
        raise ValueError("the regions are out of order")
    _check_makers(step)
    num_segments = max((node.segment for node in step.nodes), default=-1) + 1
    if step.graphs and num_segments != len(step.graphs):
        raise ValueError(f"there are {len(step.graphs)} graphs, and nodes of {num_segments}")


def _check_node(step: Step, position: int, node: Node) -> None:
    if node.rank != position or not all(0 <= read < position for read in node.reads):
        raise ValueError(f"node {position} is out of order")
    again = [read for recipe in node.recipes for read in recipe.reads]
    if not all(0 <= read < len(step.nodes) for read in (*again, *node.eager_reads)):
        raise ValueError(f"node {position} is made again from what is not there")
    if not node.on_demand and any(step.nodes[read].on_demand for read in node.reads):
        raise ValueError(f"node {position} reads what need not run")
    _check_holds(step, position, node)
    for recipe in node.recipes:
        _check_holds(step, position, recipe)


def _check_holds(step: Step, position: int, source: Node | Recipe) -> None:
    """A value refers to what it makes, and to what it shares with a value that it reads."""
    if not all(0 <= storage < len(step.storages) for storage in (*source.holds, *source.makes)):
        raise ValueError(f"node {position} holds a storage that is not there")
    found = {*source.makes, *(s for read in source.reads for s in step.nodes[read].holds)}
    if any(s not in found and not step.storages[s].static for s in source.holds):
        raise ValueError(f"node {position} holds a storage that it neither makes nor reads")


def _check_makers(step: Step) -> None:
    """A block is made once; but for parameters that processes gather (segment -1), which come and go."""
    if any(node.segment < 0 for node in step.nodes):
        return
    made = [s for node in step.nodes for s in _blocks(step, node.makes)]
    if len(made) != len(set(made)):
        raise ValueError("a storage is made twice")


def _blocks(step: Step, storages: Iterable[int]) -> list[int]:
    return [s for s in storages if not step.storages[s].static]
