"""A step whose values can be offloaded, made from one whose values cannot."""

from dataclasses import replace

from lowtide.facts import Action, Kind, Node, Region, Remat, Step, Storage, TransferSpeed
from lowtide.planning.activations import storage_uses


def with_offload(step: Step, link: TransferSpeed, *, least_bytes: int = 1) -> Step:
    """The same step, where every activation of at least `least_bytes` can be offloaded."""
    holders = {
        use.holder: use.storage
        for use in storage_uses(step).values()
        if not step.storages[use.storage].pinned and step.storages[use.storage].nbytes >= least_bytes
    }
    rank_of: dict[int, int] = {}
    leave_of: dict[int, int] = {}
    rank = 0
    for node in step.nodes:
        rank_of[node.rank] = rank
        rank += 1
        if node.rank in holders:
            leave_of[node.rank] = rank
            rank += 1
    storages = list(step.storages)
    nodes: list[Node] = []
    for node in step.nodes:
        remats = tuple(replace(r, reads=tuple(rank_of[u] for u in r.reads)) for r in node.remats)
        if node.rank in holders:
            stored = (holders[node.rank],)
            offload = Remat(
                rule="swap",
                action=Action.OFFLOAD,
                reads=(leave_of[node.rank],),
                holds=stored,
                makes=stored,
            )
            remats = (*remats, offload) if node.holds == stored else remats
        nodes.append(
            replace(
                node,
                rank=rank_of[node.rank],
                reads=tuple(rank_of[u] for u in node.reads),
                eager_reads=tuple(rank_of[u] for u in node.eager_reads),
                remats=remats,
            )
        )
        if node.rank in holders:
            storages.append(Storage(id=len(storages), nbytes=8, kind=Kind.OTHER, name=f"{node.name}_leave"))
            nodes.append(
                Node(
                    rank=leave_of[node.rank],
                    name=f"{node.name}_leave",
                    op="leave",
                    region=Region.FORWARD,
                    kind=Kind.OTHER,
                    segment=node.segment,
                    reads=(rank_of[node.rank],),
                    holds=(len(storages) - 1,),
                    makes=(len(storages) - 1,),
                    fixed="kept",
                    on_demand=True,
                    movable=True,
                )
            )
    return replace(step, nodes=tuple(nodes), storages=tuple(storages), transfer_speed=link)
