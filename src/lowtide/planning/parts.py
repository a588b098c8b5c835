"""One graph of a step, as a step of its own: what stays between its forward and its backward pass, and what
it needs while they run, for any plan of it."""

from dataclasses import replace

from lowtide.facts import Kind, Node, Region, Step, Storage

REST = "the rest of the step"


def step_of_graph(step: Step, segment: int, *, rest_bytes: int) -> Step:
    """The forward and backward pass of one graph, with `rest_bytes` in between for all other graphs.

    What comes from other graphs is there when it is first read, and goes when nothing reads it any more.
    What is there all along counts nothing.
    """
    own = [node for node in step.nodes if node.segment == segment and node.region is not Region.OPTIMIZER]
    num_forward = sum(node.region is Region.FORWARD for node in own)
    rank = {node.rank: place + (place >= num_forward) for place, node in enumerate(own)}
    storages = tuple(replace(s, nbytes=0) if s.static else s for s in step.storages)
    made: set[int] = set()
    nodes: list[Node] = []
    for node in own:
        if len(nodes) == num_forward:
            nodes.append(_rest(num_forward, len(storages)))
        reads = tuple(rank[read] for read in node.reads if read in rank)
        found = {s for read in reads for s in nodes[read].holds}
        arrives = tuple(s for s in node.holds if s not in found and s not in node.makes and s not in made)
        makes = (*node.makes, *arrives)
        made.update(makes)
        nodes.append(
            replace(
                node,
                rank=rank[node.rank],
                segment=0,
                reads=reads,
                makes=makes,
                eager_reads=tuple(rank[read] for read in node.eager_reads if read in rank),
                recipes=tuple(
                    replace(recipe, reads=tuple(rank[read] for read in recipe.reads))
                    for recipe in node.recipes
                ),
            )
        )
    if len(nodes) == num_forward:
        nodes.append(_rest(num_forward, len(storages)))
    rest = Storage(id=len(storages), nbytes=rest_bytes, kind=Kind.OTHER, name=REST)
    return replace(
        step,
        nodes=tuple(nodes),
        storages=(*storages, rest),
        graphs=(step.graphs[segment],),
        fingerprint=step.graphs[segment].fingerprint,
        notes=(),
    )


def _rest(rank: int, storage: int) -> Node:
    return Node(
        rank=rank,
        name=REST,
        op="output",
        region=Region.FORWARD,
        kind=Kind.OTHER,
        segment=0,
        holds=(storage,),
        makes=(storage,),
        fixed="the end of a graph",
    )
