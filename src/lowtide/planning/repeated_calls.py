"""A step that calls its model several times before one backward pass: contrastive losses, siamese networks,
stages of a pipeline with several micro-batches in flight.

    forward   [call 1][call 2]                 all that call 1 saves is live during call 2
    backward                   [call 2][call 1]    the gradients of call 2 are live during call 1

`step_of_calls` makes such a step from the step of one call. All calls have the same schedule.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from lowtide.facts import EARLIER, PIPELINE, RESERVED, Kind, Node, Region, Remat, Step, Storage

LOSS_INPUTS = "inputs of the loss"
LOSS = "loss"
"""The names of the storages of a loss, which is one for all calls."""


def step_of_calls(step: Step, number: int, *, between_bytes: int = 0) -> Step:
    """The step of `number` equal calls, each with a batch of its own; `step` itself for one call.

    Between two calls, the loop makes `between_bytes` that stay live: a part of the loss. Parameters, state
    and the rest of the loss are there once. Gradients stay from the backward pass of the last call on,
    which runs first; each other call adds its gradients to them and frees its own. Where the step begins with
    gradients of earlier micro-batches, these stay, and all calls add theirs. The optimizer's nodes come last,
    as in `step`.
    """
    if number == 1:
        return step
    storages: list[Storage] = []
    has_earlier = any(map(_is_earlier, step.storages))
    # the last call to run its backward pass frees the earlier gradients, and its own stay in their place
    keeps_gradients = 0 if has_earlier else number - 1
    places = [
        _add_storages(
            step,
            storages,
            is_first=call == 0,
            keeps_gradients=call == keeps_gradients,
            between_bytes=between_bytes if call < number - 1 else None,
        )
        for call in range(number)
    ]
    for place in places:
        place.update({s.id: places[0][s.id] for s in step.storages if _is_shared(s)})
    border = step.first_backward_rank
    end = next((n.rank for n in step.nodes if n.region is Region.OPTIMIZER), len(step.nodes))
    order = [(call, node) for call in range(number) for node in step.nodes[:border]]
    order += [(call, node) for call in reversed(range(number)) for node in step.nodes[border:end]]
    order += [(keeps_gradients, node) for node in step.nodes[end:]]
    ranks: list[dict[int, int]] = [{} for _ in range(number)]
    for rank, (call, node) in enumerate(order):
        ranks[call][node.rank] = rank
    nodes = [
        _moved(node, ranks[call], places[call], first_graph=call * len(step.graphs)) for call, node in order
    ]
    for call in range(1, number if has_earlier else 1):
        for rank in (ranks[call][node.rank] for node in step.nodes if node.name == EARLIER):
            nodes[rank] = replace(nodes[rank], holds=(), makes=())
    return replace(
        step,
        nodes=tuple(nodes),
        storages=tuple(storages),
        graphs=step.graphs * number,
        fingerprint="+".join([step.fingerprint] * number),
        calls=number,
    )


def _is_shared(storage: Storage) -> bool:
    is_batch = storage.kind is Kind.INPUT and storage.name not in (LOSS_INPUTS, PIPELINE, RESERVED)
    return _is_earlier(storage) or (storage.static and not is_batch)


def _is_earlier(storage: Storage) -> bool:
    return storage.name == EARLIER and storage.kind is Kind.GRADIENT


def _add_storages(
    step: Step,
    storages: list[Storage],
    *,
    is_first: bool,
    keeps_gradients: bool,
    between_bytes: int | None,
) -> dict[int, int]:
    """Add the storages of one call; returns their new ids. `keeps_gradients`: the gradients of this call stay
    to the end of the step. `between_bytes` is None for the last call."""
    place: dict[int, int] = {}
    for storage in step.storages:
        if _is_shared(storage) and not is_first:
            continue
        place[storage.id] = len(storages)
        pinned, nbytes = storage.pinned, storage.nbytes
        if not keeps_gradients and not _is_earlier(storage):
            pinned = pinned and storage.kind is not Kind.GRADIENT
        if between_bytes is not None:
            is_loss = storage.name == LOSS and storage.kind is Kind.OTHER
            nbytes = between_bytes if is_loss else nbytes
        storages.append(replace(storage, id=len(storages), pinned=pinned, nbytes=nbytes))
    return place


def _moved(node: Node, ranks: Mapping[int, int], places: Mapping[int, int], *, first_graph: int) -> Node:
    def moved(remat: Remat) -> Remat:
        return replace(
            remat,
            reads=_mapped(remat.reads, ranks),
            holds=_mapped(remat.holds, places),
            makes=_mapped(remat.makes, places),
        )

    return replace(
        node,
        rank=ranks[node.rank],
        segment=node.segment + first_graph if node.segment >= 0 else node.segment,
        reads=_mapped(node.reads, ranks),
        eager_reads=_mapped(node.eager_reads, ranks),
        holds=_mapped(node.holds, places),
        makes=_mapped(node.makes, places),
        remats=tuple(map(moved, node.remats)),
    )


def _mapped(numbers: Sequence[int], to: Mapping[int, int]) -> tuple[int, ...]:
    return tuple(to[number] for number in numbers)
