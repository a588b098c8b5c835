"""From an order of ranks to what each graph runs, and what a step needs besides its graphs."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from strategies import orders, runs, steps
from synthetic import chain

from lowtide.facts import Graph, GraphRun, Kind, Node, Region, Remat, Run, Step, Storage
from lowtide.planning.schedules import (
    ENDS,
    as_eager,
    graph_schedules,
    reserve,
    runs_of_schedules,
    without_needless_runs,
)
from lowtide.planning.simulate import baseline_runs, simulate


def graph(in_model: bool = True) -> Graph:
    return Graph(fingerprint="", in_model=in_model, returned=(), missing=())


def node(rank: int, op: str, region: Region, *, segment: int = 0, **fields: object) -> Node:
    return Node(rank=rank, name=f"n{rank}", op=op, region=region, kind=Kind.OTHER, segment=segment, **fields)


@pytest.fixture
def two_graphs() -> Step:
    """Ranks by graph: forward 1 2 4 | 7 8, backward 12 13 | 16."""
    forward, backward = Region.FORWARD, Region.BACKWARD
    ops = [
        ("placeholder", forward, 0),
        ("a", forward, 0),
        ("b", forward, 0),
        ("random_state", forward, 0),
        ("c", forward, 0),
        ("output", forward, 0),
        ("placeholder", forward, 1),
        ("d", forward, 1),
        ("e", forward, 1),
        ("output", forward, 1),
        ("placeholder", backward, 1),
        ("f", backward, 1),
        ("output", backward, 1),
        ("placeholder", backward, 0),
        ("g", backward, 0),
        ("h", backward, 0),
        ("output", backward, 0),
        ("step", Region.OPTIMIZER, 0),
    ]
    again = Remat(rule="again", reads=(), holds=(), makes=())
    nodes = tuple(
        node(rank, op, region, segment=s, on_demand=op == "random_state", remats=(again,) * (len(op) == 1))
        for rank, (op, region, s) in enumerate(ops)
    )
    return Step(nodes=nodes, storages=(), graphs=(graph(), graph()))


@pytest.fixture
def tuple_step() -> Step:
    """Rank 0 makes a pair of 100 and 10 bytes, ranks 1 and 2 take its parts, backward reads both."""

    def forward(rank: int, **fields: tuple[int, ...]) -> Node:
        ways = {"reads": (), "holds": (), "makes": ()} | fields
        return node(rank, "op", Region.FORWARD, remats=(Remat(rule="again", **ways),), **ways)

    nodes = (
        forward(0, makes=(0, 1), holds=(0, 1)),
        forward(1, reads=(0,), holds=(0,)),
        forward(2, reads=(0,), holds=(1,)),
        node(3, "uses the small part", Region.BACKWARD, reads=(2,)),
        node(4, "uses the large part", Region.BACKWARD, reads=(1,)),
        node(5, "makes room", Region.BACKWARD, makes=(2,), holds=(2,)),
    )
    storages = tuple(Storage(id=i, nbytes=n, kind=Kind.OTHER, name="") for i, n in enumerate((100, 10, 50)))
    return Step(nodes=nodes, storages=storages)


def test_a_part_of_a_kept_tuple_is_not_taken_again(tuple_step: Step) -> None:
    order = runs(0, 1, 2, 2, 3, 0, 1, 2, 4, 5)
    kept = runs(0, 1, 2, 3, 0, 1, 2, 4, 5)
    assert without_needless_runs(tuple_step, order) == kept
    assert simulate(tuple_step, order).live_bytes[3] == simulate(tuple_step, kept).live_bytes[3] == 10


@settings(max_examples=50)
@given(st.data())
def test_leaving_out_needless_runs_never_costs_memory(data: st.DataObject) -> None:
    step = data.draw(steps())
    order = data.draw(orders(step))
    planned, kept = simulate(step, order), simulate(step, without_needless_runs(step, order))
    assert kept.peak_bytes <= planned.peak_bytes
    assert kept.added_seconds == planned.added_seconds


def test_a_plain_step_runs_each_backward_op_once(two_graphs: Step) -> None:
    first, second = graph_schedules(two_graphs, baseline_runs(two_graphs))
    assert first.schedule == (GraphRun(3), GraphRun(4))
    assert second.schedule == (GraphRun(2),)


def test_runs_again_stand_where_the_order_has_them(two_graphs: Step) -> None:
    order = runs(*range(11), 8, 11, 12, 13, 4, 1, 14, 2, 4, 15, 16, 17)
    first, second = graph_schedules(two_graphs, order)
    assert second.schedule == (GraphRun(1, "again"), GraphRun(2))
    assert [run.position for run in first.schedule] == [2, 0, 3, 1, 2, 4]
    assert [run.rule for run in first.schedule] == ["again", "again", "", "again", "again", ""]


def test_an_abstract_step_has_no_graphs() -> None:
    assert graph_schedules(chain(length=3), runs(0, 1, 2)) == ()


@settings(max_examples=60, deadline=None)
@given(steps(), st.data())
def test_every_run_of_an_order_is_in_one_schedule(step: Step, data: st.DataObject) -> None:
    segments = 1 + max(n.segment for n in step.nodes)
    step = Step(nodes=step.nodes, storages=step.storages, graphs=tuple(graph() for _ in range(segments)))
    order = data.draw(orders(step))
    schedules = graph_schedules(step, order)
    for index, made in enumerate(schedules):
        mine = [n for n in step.nodes if n.segment == index and n.op not in ENDS and not n.on_demand]
        ops = [n.rank for n in mine if n.region is Region.FORWARD]
        ops += [n.rank for n in mine if n.region is Region.BACKWARD]
        backward = {rank for rank in ops if step.nodes[rank].region is Region.BACKWARD}
        expected = [run for run in order if run.rank in ops and (run.rank in backward or not run.is_first)]
        assert [Run(ops[run.position], run.rule) for run in made.schedule] == expected


def test_eager_sizes() -> None:
    storages = (
        Storage(id=0, nbytes=10, kind=Kind.ACTIVATION, name="mask", extra_eager_bytes=30),
        Storage(id=1, nbytes=10, kind=Kind.OTHER, name="copy", extra_eager_bytes=-10),
    )
    step = Step(nodes=(), storages=storages)
    assert [storage.nbytes for storage in as_eager(step).storages] == [40, 0]
    assert [storage.nbytes for storage in step.storages] == [10, 10]


@settings(max_examples=60, deadline=None)
@given(steps())
def test_the_reserve_of_an_optimizer_is_what_its_region_adds(step: Step) -> None:
    """Temporaries alone: state is there all along, and what backward made is not the optimizer's."""
    sizes = {storage.id: storage.nbytes for storage in step.storages}
    optimizer = [n for n in step.nodes if n.region is Region.OPTIMIZER]
    found = reserve(step)
    assert found.optimizer_state_bytes == sum(
        s.nbytes for s in step.storages if s.kind is Kind.OPTIMIZER_STATE
    )
    assert found.optimizer_peak_bytes == max(
        (sum(sizes[s] for s in n.makes) + n.workspace_bytes for n in optimizer), default=0
    )
    assert found.optimizer_peak_bytes <= simulate(step, baseline_runs(step)).peak_bytes


def test_temporaries_of_an_optimizer_live_until_they_are_last_read() -> None:
    optimizer = Region.OPTIMIZER
    storages = tuple(
        Storage(id=i, nbytes=size, kind=Kind.OTHER, name=f"s{i}") for i, size in enumerate((100, 10, 1, 1000))
    )
    nodes = (
        node(0, "a", optimizer, makes=(0,), holds=(0,)),
        node(1, "b", optimizer, makes=(1,), holds=(1,), reads=(0,)),
        node(2, "c", optimizer, makes=(2,), holds=(2,), workspace_bytes=5),
        node(3, "d", optimizer, reads=(1, 2)),
        node(4, "e", optimizer, makes=(3,), holds=(3,), workspace_bytes=7),
    )
    assert reserve(Step(nodes=nodes[:4], storages=storages)).optimizer_peak_bytes == 110
    assert reserve(Step(nodes=nodes[2:4], storages=storages)).optimizer_peak_bytes == 6
    assert reserve(Step(nodes=nodes, storages=storages)).optimizer_peak_bytes == 1007


@pytest.fixture
def with_loss() -> Step:
    """A model's output of 64 bytes, a loss of it with targets of its own, and its gradient's way back."""
    forward, backward = Region.FORWARD, Region.BACKWARD
    sizes = [1000, 64, 500, 30, 4, 16, 80, 7]
    kinds = [Kind.INPUT, Kind.ACTIVATION, Kind.INPUT, *[Kind.OTHER] * 4, Kind.INPUT]
    storages = tuple(
        Storage(id=i, nbytes=size, kind=kind, name=f"s{i}", static=kind is Kind.INPUT, pinned=i in (1, 4))
        for i, (size, kind) in enumerate(zip(sizes, kinds, strict=True))
    )
    nodes = (
        node(0, "placeholder", forward, makes=(0,), holds=(0,)),
        node(1, "model", forward, reads=(0,), makes=(1,), holds=(1,), workspace_bytes=9999),
        node(2, "output", forward, reads=(1,)),
        node(3, "placeholder", forward, segment=1, makes=(2,), holds=(2,)),
        node(4, "log", forward, segment=1, reads=(1,), makes=(3,), holds=(3,), workspace_bytes=8),
        node(5, "view", forward, segment=1, reads=(4,), holds=(3,)),
        node(6, "mean", forward, segment=1, reads=(5, 3), makes=(4,), holds=(4,)),
        node(7, "exp", backward, segment=1, reads=(5,), makes=(5,), holds=(5,)),
        node(8, "cat", backward, segment=1, reads=(7,), makes=(6,), holds=(6,), workspace_bytes=2),
        node(9, "slice", backward, segment=1, reads=(8,), holds=(6,)),
        node(10, "placeholder", backward, reads=(9,), holds=(6,)),
        node(11, "grad", backward, reads=(10, 1), workspace_bytes=9999),
    )
    model = replace(graph(), tangent_bytes=64)
    return Step(nodes=nodes, storages=storages, graphs=(model, graph(in_model=False)))


def test_a_loss_outside_of_the_model_is_reserved(with_loss: Step) -> None:
    found = reserve(with_loss)
    assert found.loss_bytes == 4 + 16 + 80 + 2, "at 'cat', when the view of 'log' is gone"
    assert found.loss_kept_bytes == 4 + (80 - 64), "the loss itself, and the rest of a gradient's storage"
    assert found.loss_input_bytes == 500 + 7, "its targets, and an input that nothing reads"
    assert found.batch_bytes == 1000


def test_a_view_in_a_loss_holds_what_it_is_a_view_of(with_loss: Step) -> None:
    nodes = list(with_loss.nodes)
    nodes[8] = replace(nodes[8], reads=(7, 5))
    assert reserve(replace(with_loss, nodes=tuple(nodes))).loss_bytes == 30 + 4 + 16 + 80 + 2


def test_a_model_with_its_own_loss_reserves_none() -> None:
    found = reserve(replace(chain(length=3), graphs=(graph(),)))
    assert (found.loss_bytes, found.loss_kept_bytes) == (0, 0)


@settings(max_examples=60, deadline=None)
@given(steps(), st.data())
def test_a_schedule_gives_its_order_back(step: Step, data: st.DataObject) -> None:
    step = replace(step, graphs=(graph(),) * (1 + max(n.segment for n in step.nodes)))
    order = data.draw(orders(step))
    made = graph_schedules(step, order)
    assert runs_of_schedules(step, [one.schedule for one in made]) == tuple(order)


def test_a_schedule_of_a_larger_graph_is_refused() -> None:
    with pytest.raises(ValueError, match="more ops"):
        runs_of_schedules(replace(chain(length=3), graphs=(graph(),)), [(GraphRun(1000),)])
