"""Random training steps for hypothesis, and the builder they are made with."""

from dataclasses import dataclass, field, replace

from hypothesis import strategies as st

from lowtide.facts import Action, Kind, Node, Region, Remat, Run, Step, Storage, TransferSpeed
from lowtide.planning.schedules import demanded
from lowtide.planning.simulate import recompute_slots
from lowtide.planning.transfer_model import with_releases


@dataclass
class StepBuilder:
    """Grows a step node by node; every method returns the rank of the node it added."""

    nodes: list[Node] = field(default_factory=list)
    storages: list[Storage] = field(default_factory=list)
    region: Region = Region.FORWARD
    segment: int = 0
    module: str = ""
    link: TransferSpeed | None = None

    def storage(self, nbytes, kind=Kind.ACTIVATION, *, static=False, pinned=False) -> int:
        number = len(self.storages)
        self.storages.append(
            Storage(id=number, nbytes=nbytes, kind=kind, name=f"s{number}", static=static, pinned=pinned)
        )
        return number

    def node(self, op, reads=(), *, holds=(), makes=(), kind=Kind.ACTIVATION, **rest) -> int:
        rank = len(self.nodes)
        self.nodes.append(
            Node(
                rank=rank,
                name=f"{op}_{rank}",
                op=op,
                region=self.region,
                kind=kind,
                module=self.module,
                segment=self.segment,
                reads=tuple(dict.fromkeys(reads)),
                holds=tuple(dict.fromkeys((*makes, *holds))),
                makes=tuple(makes),
                **rest,
            )
        )
        return rank

    def given(self, nbytes, kind=Kind.PARAMETER) -> int:
        made = self.storage(nbytes, kind, static=True)
        return self.node("placeholder", makes=(made,), kind=kind, fixed="an input of the step")

    def op(self, op, reads, nbytes, seconds, *, workspace=0, pinned=False, kind=Kind.ACTIVATION) -> int:
        made = self.storage(nbytes, kind, pinned=pinned)
        return self._with_remat(
            self.node(op, reads, makes=(made,), kind=kind, seconds=seconds, workspace_bytes=workspace)
        )

    def fixed(self, op, reads, nbytes, seconds) -> int:
        made = self.storage(nbytes)
        return self.node(op, reads, makes=(made,), seconds=seconds, fixed="it has side effects")

    def view(self, source, seconds=0) -> int:
        return self._with_remat(self.node("view", (source,), holds=self.nodes[source].holds, seconds=seconds))

    def several(self, op, reads, sizes, seconds, *, again=None, how="again") -> tuple[int, ...]:
        """An op with a tuple of results: ranks of its getitems. `again` of them are made by its remat."""
        made = [self.storage(nbytes) for nbytes in sizes]
        rank = self.node(op, reads, makes=made, seconds=seconds)
        kept = made if again is None else made[:again]
        self._with_remat(rank, how=how, makes=tuple(kept))
        items = []
        for storage in made:
            item = self.node("getitem", (rank,), holds=(storage,))
            if storage in kept:
                self._with_remat(item)
            items.append(item)
        return tuple(items)

    def dropout(self, source, nbytes, seconds) -> tuple[int, int]:
        out, mask = self.several("native_dropout", (source,), (nbytes, nbytes // 4), seconds, how="replay")
        node = self.nodes[out]
        self.nodes[out] = replace(
            node,
            remats=(
                Remat(
                    rule="mask",
                    reads=(source, mask),
                    holds=node.holds,
                    makes=node.holds,
                    seconds=seconds / 2,
                ),
            ),
        )
        return out, mask

    def packed(self, source, nbytes, seconds) -> int:
        """An op whose value can also be kept as a quarter of its bytes, and unpacked."""
        return self._from_less(self.op("op", (source,), nbytes, seconds), nbytes, seconds)

    def signed(self, source, nbytes, seconds) -> tuple[int, int]:
        """An op, and a view of its value that can also be kept as a quarter: its readers need no more."""
        rank = self.op("op", (source,), nbytes, seconds)
        return rank, self._from_less(self.view(rank), nbytes, seconds)

    def _from_less(self, rank, nbytes, seconds) -> int:
        small = self.storage(max(1, nbytes // 4))
        keeper = self.node("pack", (rank,), makes=(small,), seconds=seconds / 8, on_demand=True, fixed="kept")
        node = self.nodes[rank]
        unpack = Remat(
            rule="unpack",
            action=Action.RETAINED,
            reads=(keeper,),
            holds=node.holds,
            makes=node.holds,
            seconds=seconds / 4,
            workspace_bytes=1,
        )
        self.nodes[rank] = replace(node, remats=(*node.remats, unpack))
        return rank

    def offloadable(self, rank) -> int:
        """Let the value of `rank`, the newest node, be offloaded as well; its own rank again."""
        node = self.nodes[rank]
        handle = self.storage(1)
        leave = self.node("leave", (rank,), makes=(handle,), on_demand=True, movable=True, fixed="kept")
        offload = Remat(
            rule="swap", action=Action.OFFLOAD, reads=(leave,), holds=node.holds, makes=node.holds
        )
        self.nodes[rank] = replace(node, remats=(*node.remats, offload))
        return rank

    def backward(self, *, segment=0) -> int:
        """Begin the backward part of `segment` with its input."""
        self.region, self.segment = Region.BACKWARD, segment
        return self.node("placeholder", makes=(self.storage(4, Kind.GRADIENT),), kind=Kind.GRADIENT)

    def grad(self, reads, nbytes, seconds, *, pinned=False, workspace=0, op="grad") -> int:
        made = self.storage(nbytes, Kind.GRADIENT, pinned=pinned)
        return self.node(
            op, reads, makes=(made,), kind=Kind.GRADIENT, seconds=seconds, workspace_bytes=workspace
        )

    def step(self) -> Step:
        return Step(
            nodes=tuple(self.nodes),
            storages=tuple(self.storages),
            fingerprint="test",
            copy_bytes_per_second=1e9,
            transfer_speed=self.link,
        )

    def _with_remat(self, rank, *, how="again", makes=None) -> int:
        node = self.nodes[rank]
        if self.region is Region.FORWARD:
            made = node.makes if makes is None else makes
            holds = tuple(s for s in node.holds if s in made or s not in node.makes)
            self.nodes[rank] = replace(
                node,
                remats=(
                    Remat(
                        rule=how,
                        reads=node.reads,
                        holds=holds,
                        makes=made,
                        seconds=node.seconds,
                        workspace_bytes=node.workspace_bytes,
                    ),
                ),
            )
        return rank


@st.composite
def links(draw):
    write, read, latency = (draw(st.integers(1, 20)) for _ in range(3))
    return TransferSpeed(
        store="disk:/x", write_bytes_per_second=write, read_bytes_per_second=read, latency_seconds=latency
    )


KINDS_OF_OPS = ["op", "op", "op", "op", "view", "several", "dropout", "packed", "fixed", "out"]


def grow(draw, build, what, reads) -> list[int]:
    """One more forward op of a kind: the ranks of what it gives."""
    sizes = st.integers(1, 60)
    cost = st.integers(1, 20)
    if what == "view":
        return [build.view(reads[0])]
    if what == "several":
        return list(build.several("norm", reads, [draw(sizes), draw(sizes), 1], draw(cost), again=2))
    if what == "dropout":
        return list(build.dropout(reads[0], draw(sizes), draw(cost)))
    if what == "packed":
        return [build.packed(reads[0], draw(sizes), draw(cost))]
    if what == "fixed":
        return [build.fixed("write", reads, draw(sizes), draw(cost))]
    room = draw(st.integers(0, 20))
    return [build.op("op", reads, draw(sizes), draw(cost), workspace=room, pinned=what == "out")]


@st.composite
def steps(draw, max_forward=14, max_segments=2, offload=False):
    """A small training step with views, tuples, dropout, fixed ops, pinned outputs and segments. With
    `offload`, some of its values may be offloaded."""
    build = StepBuilder()
    sizes = st.integers(1, 60)
    cost = st.integers(1, 20)
    build.link = draw(links()) if offload else None
    values = [build.given(draw(sizes)), build.given(draw(sizes), Kind.INPUT)]
    forward_of: list[list[int]] = []
    for segment in range(draw(st.integers(1, max_segments))):
        build.segment = segment
        mine = []
        for _ in range(draw(st.integers(1, max_forward))):
            reads = [values[-1], values[draw(st.integers(0, len(values) - 1))]]
            what = draw(st.sampled_from(KINDS_OF_OPS))
            build.module = f"layers.{draw(st.integers(0, 3))}"
            new = grow(draw, build, what, reads)
            if offload and what in ("op", "fixed", "several", "dropout") and draw(st.booleans()):
                build.offloadable(new[0])
            mine += new
            values += new[:1]
        forward_of.append(mine)
    gradient = None
    for segment in reversed(range(len(forward_of))):
        start = build.backward(segment=segment)
        gradient = start if gradient is None else gradient
        for rank in reversed(forward_of[segment]):
            for _ in range(draw(st.integers(0, 2))):
                others = draw(st.lists(st.sampled_from(forward_of[segment] + values[:2]), max_size=2))
                pinned = draw(st.booleans())
                new = build.grad((gradient, rank, *others), draw(sizes), draw(cost), pinned=pinned)
                gradient = gradient if pinned else new
    build.region, build.segment = Region.OPTIMIZER, 0
    if draw(st.booleans()):
        build.node("adam", (gradient, values[0]), makes=(build.storage(draw(sizes), Kind.OPTIMIZER_STATE),))
    return build.step()


@st.composite
def orders(draw, step):
    """Any valid schedule of `step`: the baseline with random rematerializations and releases."""
    slots = recompute_slots(step)
    order: list[Run] = []
    for node in step.nodes:
        mine = [Run(n.rank, r.rule) for n in step.nodes for r in n.remats if n.segment == slots[node.rank]]
        if mine:
            order += draw(st.lists(st.sampled_from(mine), max_size=4))
        order.append(Run(node.rank))
    wanted = demanded(step, order)
    kept = tuple(run for run in order if not step.nodes[run.rank].on_demand or run.rank in wanted)
    return with_releases(step, kept, {rank: draw(release_places(step, rank)) for rank in movable_ranks(step)})


def movable_ranks(step) -> list[int]:
    return [node.rank for node in step.nodes if node.movable]


def release_places(step, leave):
    """Ranks after which a movable node may run."""
    always = [n for n in step.nodes[: step.first_backward_rank] if not n.on_demand]
    mine = [n.rank for n in always if n.segment == step.nodes[leave].segment]
    return st.sampled_from([max(r for r in mine if r < leave), *(r for r in mine if r > leave)])


def runs(*items) -> tuple[Run, ...]:
    """A schedule by hand: ranks for first runs, and for others of the same rank, which are run `again`."""
    seen: set[int] = set()
    made = []
    for item in items:
        made.append(Run(item, "again" if item in seen else "") if isinstance(item, int) else Run(*item))
        seen.add(made[-1].rank)
    return tuple(made)
