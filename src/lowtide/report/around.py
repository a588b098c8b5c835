"""The graph around an activation, without and with a plan: what it is made of, and who reads it."""

from collections.abc import Sequence
from dataclasses import dataclass

from lowtide.facts import Activation, Decision, Region, Run, Step
from lowtide.planning.activations import activations
from lowtide.planning.simulate import is_again, source_of
from lowtide.report.embed import pack_integers


@dataclass(frozen=True, slots=True, kw_only=True)
class Around:
    """Ranks of nodes. `again` are runs that a plan adds to bring it back, each with its position, and
    `again_from` what those read that stands since the forward pass."""

    maker: int
    made_from: tuple[int, ...]
    forward: tuple[int, ...]
    backward: tuple[int, ...]
    again: tuple[Run, ...] = ()
    again_from: tuple[int, ...] = ()


class Neighbourhoods:
    """Of all activations of a step, for one schedule."""

    def __init__(self, step: Step, runs: Sequence[Run] = ()) -> None:
        self.step = step
        self._holders: dict[int, list[int]] = {}
        self._readers: dict[int, list[int]] = {}
        for node in step.nodes:
            for storage in node.holds:
                self._holders.setdefault(storage, []).append(node.rank)
            for read in node.reads:
                self._readers.setdefault(read, []).append(node.rank)
        self._again = {run.node: run for run in runs if is_again(step, run)}

    def of(self, activation: Activation) -> Around:
        nodes = self.step.nodes
        holders = self._holders[activation.storage]
        readers = sorted({reader for rank in holders for reader in self._readers.get(rank, ())} - {*holders})
        again = self._chain([rank for rank in holders if rank in self._again])
        made = {run.node for run in again}
        sources = sorted({read for run in again for read in source_of(self.step, run).reads} - made)
        return Around(
            maker=activation.creation_rank,
            made_from=nodes[activation.creation_rank].reads,
            forward=tuple(r for r in readers if nodes[r].region is Region.FORWARD),
            backward=tuple(r for r in readers if nodes[r].region is not Region.FORWARD),
            again=again,
            again_from=tuple(sources),
        )

    def _chain(self, ranks: Sequence[int]) -> tuple[Run, ...]:
        """The runs that bring these values back, with those that they read of what is brought back, too."""
        found: dict[int, Run] = {}
        waiting = list(ranks)
        while waiting:
            rank = waiting.pop()
            if rank in self._again and rank not in found:
                found[rank] = self._again[rank]
                waiting += source_of(self.step, found[rank]).reads
        return tuple(found[rank] for rank in sorted(found))


def pack_around(step: Step, runs: Sequence[Run], decisions: Sequence[Decision]) -> str:
    """What `templates/around.js` draws: every decision's maker, then five lists, each after its length."""
    found = {activation.name: activation for activation in activations(step)}
    neighbourhoods = Neighbourhoods(step, runs)
    flat: list[int] = []
    for decision in decisions:
        if decision.name not in found:
            flat += [decision.creation_rank, 0, 0, 0, 0, 0]
            continue
        around = neighbourhoods.of(found[decision.name])
        again = tuple(run.node for run in around.again)
        flat.append(around.maker)
        for ranks in (around.made_from, around.forward, around.backward, again, around.again_from):
            flat += [len(ranks), *ranks]
    return pack_integers(flat)
