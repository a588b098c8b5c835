"""The form of a step whose optimizer's state rests on a store between its uses.

    state in memory   [ ............ state ............... ][ step ]
    state that rests                                        [chunk][chunk][chunk]   blocks for its rows

What eager has stays in the facts: `as_eager` gives the same step for every form.
"""

from collections.abc import Collection
from dataclasses import replace
from math import ceil

from lowtide.facts import UPDATE, Kind, Node, Region, Step, Storage

PREFIX = "state:"
WEIGHTS = "parameters:"


def resting_name(parameter: str) -> str:
    """The name in a plan of a parameter's resting state."""
    return PREFIX + parameter


def state_storages(step: Step) -> list[Storage]:
    """The state that may rest."""
    return [s for s in step.storages if s.rests == "state" and s.kind is Kind.OPTIMIZER_STATE]


def state_rests(step: Step) -> bool:
    """Whether a step is the form of one in which state rests."""
    return any(storage.extra_eager_bytes > 0 for storage in state_storages(step))


def with_resting_state(step: Step, names: Collection[str]) -> Step:
    """The form of a step whose state of these names rests; the step itself where there is none."""
    resting = {s.id: s for s in state_storages(step) if resting_name(s.name) in names and s.nbytes}
    if not resting:
        return step
    storages = tuple(
        replace(s, nbytes=0, extra_eager_bytes=s.nbytes + s.extra_eager_bytes) if s.id in resting else s
        for s in step.storages
    )
    more: dict[str, int] = {}
    for storage in resting.values():
        more[storage.name] = more.get(storage.name, 0) + storage.update_bytes
    weights = {name.partition(":")[2] for name in names if name.startswith(WEIGHTS)}
    for storage in step.storages:
        if storage.rests == "parameters" and storage.name in weights and storage.name in more:
            more[storage.name] += storage.update_bytes
    chunks = tuple((size, both if weights else state) for size, state, both in step.resting_chunks)
    nodes = tuple(_resting(node, more, chunks[0][1] if chunks else 0) for node in step.nodes)
    return replace(step, storages=storages, nodes=nodes, optimizer_chunks=chunks)


def _resting(node: Node, more: dict[str, int], inside_bytes: int) -> Node:
    if node.op == UPDATE and node.module in more:
        workspace_bytes = node.workspace_bytes + more[node.module]
    elif node.region is Region.OPTIMIZER:
        workspace_bytes = inside_bytes
    else:
        return node
    eager_bytes = node.workspace_bytes + node.extra_eager_bytes
    return replace(node, workspace_bytes=workspace_bytes, extra_eager_bytes=eager_bytes - workspace_bytes)


def nested_state(step: Step, *, parts: int) -> list[tuple[str, ...]]:
    """Sets of names, each with the ones before: the largest state first, in so many parts of all its bytes.

    All state is idle for most of a step and read and written once in each, so only its bytes count. Few large
    transfers are faster than many small ones.
    """
    nbytes: dict[str, int] = {}
    for storage in state_storages(step):
        name = resting_name(storage.name)
        nbytes[name] = nbytes.get(name, 0) + storage.nbytes
    order = sorted(nbytes, key=lambda name: (-nbytes[name], name))
    whole, taken, found = sum(nbytes.values()), 0, []
    for count, name in enumerate(order, start=1):
        before, taken = taken, taken + nbytes[name]
        if count == len(order) or before * parts // whole < taken * parts // whole:
            found.append(tuple(order[:count]))
    return found


def transfer_seconds(form: Step, *, weight_bytes: int = 0) -> tuple[float, float]:
    """The seconds of all transfers of resting state in one step, with those of resting parameters that the
    optimizer updates, and the seconds of them that no compute hides.

    In a step in chunks, reads, compute and writes run beside each other, but for the first read and the last
    write. An update in the backward pass waits for its own reads and writes alike.
    """
    speed = form.transfer_speed
    resting = [s for s in state_storages(form) if s.extra_eager_bytes and not s.nbytes]
    if speed is None or not resting:
        return 0.0, 0.0
    nbytes = sum(storage.extra_eager_bytes for storage in resting) + weight_bytes
    size = form.resting_chunks[0][0] if form.resting_chunks else 0
    number = max(len(resting), ceil(nbytes / size) if size else 0)
    reads = nbytes / speed.read_bytes_per_second + number * speed.latency_seconds
    writes = nbytes / speed.write_bytes_per_second + number * speed.latency_seconds
    regions = (
        [node for node in form.nodes if node.op == UPDATE]
        if any(node.op == UPDATE for node in form.nodes)
        else [node for node in form.nodes if node.region is Region.OPTIMIZER]
    )
    compute = sum(node.seconds for node in regions)
    stall = max(0.0, max(reads, writes) - compute) + (reads + writes) / max(1, number)
    return reads + writes, min(stall, reads + writes)
