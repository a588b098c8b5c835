"""The true optimum of small steps and graphs, by enumeration of all schedules; and small random steps.

Independent of the planners: a state is the next rank and the live values. Every run and every free of a block
leads to another state. Dijkstra's algorithm finds the cheapest path.
"""

from heapq import heappop, heappush
from itertools import count
from math import inf
from random import Random

from strategies import StepBuilder

from lowtide.facts import Kind, Region, Step
from lowtide.planning.abstract import AbstractGraph
from lowtide.planning.simulate import baseline_runs, recompute_slots, simulate, tuple_of


class Schedules:
    """All schedules of a step as a graph of states (next rank, live values).

    A value is (rank, whether from the first run, its blocks); a block is (storage, generation).
    """

    def __init__(self, step: Step) -> None:
        self.step = step
        self.slots = recompute_slots(step)
        self.static_bytes = step.static_bytes
        self.size = len(step.nodes)
        nodes = step.nodes
        self.last_read = [max([-1, *(n.rank for n in nodes if r in n.reads)]) for r in range(self.size)]
        self.remat_reads = {read for n in nodes for r in n.remats for read in r.reads}
        self.is_part = {(n.rank, r.rule): tuple_of(step, r) for n in nodes for r in n.remats}
        pinned = 0
        self.pinned_bytes = []
        for node in nodes:
            self.pinned_bytes.append(pinned)
            pinned += sum(step.storages[s].nbytes for s in node.makes if self._is_pinned(s))

    def _is_pinned(self, storage):
        found = self.step.storages[storage]
        return found.pinned and not found.static

    def _run(self, values, rank, source, *, first):
        """(values after the run, bytes of blocks during it) or None when something it reads is gone."""
        storages = self.step.storages
        there = {value[0]: value for value in values}
        if any(read not in there for read in source.reads):
            return None
        used = {block for value in values for block in value[2]}
        blocks = []
        for storage in sorted(set(source.holds)):
            if storages[storage].static:
                continue
            if storage in source.makes:
                generation = 0 if first else next(g for g in count(1) if (storage, g) not in used)
                blocks.append((storage, generation))
            else:
                block = next(b for r in source.reads for b in there[r][2] if b[0] == storage)
                blocks.append(block)
        value = (rank, first, tuple(blocks))
        after = frozenset(v for v in values if v[0] != rank) | {value}
        during = used | set(blocks)
        nbytes = sum(storages[s].nbytes for s, g in during if not (storages[s].pinned and g == 0))
        return after, nbytes

    def runs(self, state):
        """(next state, live bytes during the run, seconds added) for each possible run in `state`."""
        position, values = state
        step = self.step
        node = step.nodes[position]
        base = self.static_bytes + self.pinned_bytes[position]
        if node.on_demand:
            yield (position + 1, values), 0, 0.0
        done = self._run(values, position, node, first=True)
        if done is not None:
            after, nbytes = done
            pinned = sum(step.storages[s].nbytes for s in node.makes if self._is_pinned(s))
            seconds = node.seconds if node.on_demand else 0.0
            state_after = (position + 1, self._still_useful(position + 1, after))
            yield state_after, base + pinned + nbytes + node.workspace_bytes, seconds
        there = {v[0]: v for v in values}
        for other in step.nodes[:position]:
            if other.region is not Region.FORWARD or other.segment != self.slots[position]:
                continue
            if other.rank in there:
                continue
            for remat in other.remats:
                whole = self.is_part[other.rank, remat.rule]
                if whole is not None and (whole not in there or there[whole][1]):
                    continue  # a rematerialized part of a tuple's first value is that value
                done = self._run(values, other.rank, remat, first=False)
                if done is not None:
                    after, nbytes = done
                    yield (position, after), base + nbytes + remat.workspace_bytes, remat.seconds

    def _still_useful(self, position, values):
        """Without the values that no first run reads any more, nor any remat."""
        return frozenset(v for v in values if v[0] in self.remat_reads or self.last_read[v[0]] >= position)

    def following(self, state, budget_bytes):
        """What can run within the budget and, where something does not fit, every free of one block."""
        position, values = state
        does_not_fit = False
        for there, nbytes, seconds in self.runs(state):
            if nbytes <= budget_bytes:
                yield there, seconds
            else:
                does_not_fit = True
        if does_not_fit:
            for block in {b for v in values for b in v[2]}:
                yield (position, frozenset(v for v in values if block not in v[2])), 0.0


def least_seconds(step: Step, budget_bytes: int) -> float:
    """The seconds that the cheapest schedule within a budget adds; infinite where there is none."""
    graph = Schedules(step)
    start = (0, frozenset())
    known = {start: 0.0}
    heap = [(0.0, 0, 0, start)]
    number = 0
    while heap:
        seconds, _, _, state = heappop(heap)
        if seconds > known[state]:
            continue
        if state[0] == graph.size:
            return seconds
        for there, more in graph.following(state, budget_bytes):
            if seconds + more < known.get(there, inf):
                known[there] = seconds + more
                number += 1
                heappush(heap, (seconds + more, -there[0], -number, there))
    return inf


def least_peak(step: Step) -> int:
    """The lowest peak of any schedule."""
    low, high = 0, simulate(step, baseline_runs(step)).peak_bytes
    while low < high:
        middle = (low + high) // 2
        if least_seconds(step, middle) < inf:
            high = middle
        else:
            low = middle + 1
    return high


def random_step(random: Random, *, most: int = 5, overwrites: bool = False, signs: bool = False) -> Step:
    """A step of up to twice `most` ops, with every kind of op that steps have.

    With `overwrites`, most backward ops write their result over the gradient that they read last. With
    `signs`, values that can be kept as less can be so for some of their readers only.
    """
    build = StepBuilder()
    values = [build.given(random.randint(1, 9), Kind.INPUT)]
    mine: list[int] = []
    for _ in range(random.randint(2, most)):
        source = values[-1] if random.random() < 0.7 else random.choice(values)
        reads = (source, random.choice(values)) if random.random() < 0.3 else (source,)
        kinds = ["op", "op", "op", "op", "view", "several", "dropout", "packed", "fixed", "out"]
        kind = random.choice(kinds + 5 * ["packed"] * signs)
        size, seconds = random.randint(1, 30), random.randint(1, 20)
        if kind == "view":
            new = [build.view(source, seconds % 4)]
        elif kind == "several":
            new = list(build.several("norm", reads, [size, random.randint(1, 9)], seconds))
        elif kind == "dropout":
            new = list(build.dropout(source, max(4, size), seconds))
        elif kind == "packed" and signs:
            new = list(build.signed(source, size, seconds))
        elif kind == "packed":
            new = [build.packed(source, size, seconds)]
        elif kind == "fixed":
            new = [build.fixed("write", reads, size, seconds)]
        else:
            room = random.choice([0, 0, random.randint(1, 9)])
            new = [build.op("op", reads, size, seconds, workspace=room, pinned=kind == "out")]
        mine += new
        values += new[:1]
    gradient, gradient_bytes = build.backward(), 0
    for rank in reversed(mine[-most:]):
        if random.random() < 0.85:
            others = [random.choice(mine)] if random.random() < 0.3 else []
            pinned = random.random() < 0.25
            nbytes = random.randint(1, 15)
            room = 0
            if overwrites and not pinned and gradient_bytes and random.random() < 0.8:
                room = -min(nbytes, gradient_bytes)
            made = build.grad((gradient, rank, *others), nbytes, 1, pinned=pinned, workspace=room)
            if not pinned:
                gradient, gradient_bytes = made, nbytes
    return build.step()


def random_graph(random: Random, *, most: int = 8) -> AbstractGraph:
    """A graph of up to `most` nodes."""
    size = random.randint(3, most)
    return AbstractGraph(
        name="random",
        nbytes=tuple(random.randint(1, 20) for _ in range(size)),
        costs=tuple(random.randint(1, 20) for _ in range(size)),
        parents=tuple(
            tuple(sorted(random.sample(range(node), min(node, random.choice([1, 1, 2, 3])))))
            for node in range(size)
        ),
    )
