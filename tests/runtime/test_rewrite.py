"""The rewritten graphs run the plan's schedule node by node, and leave the captured graph alone."""

import operator

import pytest
import torch
from torch import fx, nn
from torch.nn import functional as F
from training import differences, train, twin
from trouble import TROUBLE

import lowtide
from lowtide.analyze.analysis import module_path, source_lines
from lowtide.analyze.captured_step import Captured, capture, with_costs
from lowtide.facts import Region, Run, Solution
from lowtide.ops.random_ops import apply_mask, dropout_output, eager_dropout, replay_dropout
from lowtide.planning.planner import Planner
from lowtide.planning.schedules import ENDS
from lowtide.runtime.rewrite import Rewritten, baseline_schedule, rewrite
from lowtide.zoo.targets import Target

pytestmark = pytest.mark.slow

CASES = ("shared-module", "long-skips", "batch-norms", "random-in-forward", "graph-break", "views")
PLANNERS = ("auto", "all", "sqrt")


class Case:
    """A captured step with made-up op times, and its plans at the floor of several planners."""

    def __init__(self, name: str) -> None:
        trouble = TROUBLE[name]
        torch.manual_seed(0)
        self.captured: Captured = capture(trouble.build(), trouble.batch(), loss=trouble.loss)
        step = self.captured.step
        sizes = {node.rank: sum(step.storages[s].nbytes for s in node.makes) for node in step.nodes}
        costs = {Run(rank): (1e-6 + 1e-9 * size, 0, False) for rank, size in sizes.items()}
        self.step = with_costs(step, costs)
        self.planner = Planner(self.step)

    def solution(self, planner: str) -> Solution:
        budget = self.planner.floor().floor_bytes if planner == "auto" else 1 << 40
        return self.planner.solve(budget_bytes=budget, planner=planner)


@pytest.fixture(scope="module")
def cases() -> dict[str, Case]:
    return {name: Case(name) for name in CASES}


def ops(module: fx.GraphModule) -> list[fx.Node]:
    return [node for node in module.graph.nodes if node.op not in ("placeholder", "output")]


def expected_runs(case: Case, solution: Solution, segment: int) -> list[tuple[fx.Node, str]]:
    """(captured node, method) in the order that the plan's schedule runs them backward."""
    made: set[fx.Node] = set()
    runs = []
    for run in solution.schedule.runs:
        record = case.step.nodes[run.rank]
        if record.segment != segment or record.op in ENDS or record.region is Region.OPTIMIZER:
            continue
        if record.region is Region.FORWARD and run.is_first:
            continue
        node = case.captured.graph_nodes[run.rank].node
        if run.rule == "again" and node.target is operator.getitem and node.args[0] not in made:
            continue  # unpacks a tuple of the forward pass: nothing to run
        made.add(node)
        runs.append((node, run.rule))
    return runs


def rewritten(case: Case, solution: Solution) -> list[tuple[int, Rewritten]]:
    return [
        (index, rewrite(segment, graph.schedule))
        for index, (segment, graph) in enumerate(zip(case.captured.segments, solution.graphs, strict=True))
        if segment.differentiable
    ]


@pytest.mark.sample(6)
@pytest.mark.parametrize("planner", PLANNERS)
@pytest.mark.parametrize("name", CASES)
def test_the_graph_is_the_schedule_node_by_node(cases: dict[str, Case], name: str, planner: str) -> None:
    case = cases[name]
    solution = case.solution(planner)
    copies = 0
    for index, graphs in rewritten(case, solution):
        expected = expected_runs(case, solution, index)
        found = ops(graphs.backward)
        assert len(found) == len(expected)
        for node, (origin, method) in zip(found, expected, strict=True):
            assert node.meta.get("lowtide_recompute") == (origin.name if method else None)
            assert node.meta.get("lowtide_rule", "") == method
            assert node.meta["val"] is origin.meta["val"]
            copies += bool(method)
    assert copies > 0
    assert solution.recompute_seconds > 0


@pytest.mark.parametrize("name", CASES)
def test_every_run_reads_the_latest_one_before_it(cases: dict[str, Case], name: str) -> None:
    case = cases[name]
    solution = case.solution("auto")
    for index, graphs in rewritten(case, solution):
        latest: dict[str, fx.Node] = {}
        for placeholder in graphs.backward.graph.find_nodes(op="placeholder"):
            latest.setdefault(placeholder.name, placeholder)
        for node, (origin, method) in zip(
            ops(graphs.backward), expected_runs(case, solution, index), strict=True
        ):
            wanted = [latest[source.name] for source in _sources(origin, method)]
            if method in ("bits", "sign", "narrow"):
                wanted = [latest[f"{origin.name}_{method}"]]
            if method == "replay":
                wanted = [latest[f"{origin.name}_random_state"], *wanted]
            assert node.all_input_nodes == wanted
            latest[origin.name] = node


def _sources(origin: fx.Node, method: str) -> list[fx.Node]:
    if method == "mask":
        return list(dropout_output(origin) or ())
    if method == "no_stats":
        return [source for source in origin.args[:3] if isinstance(source, fx.Node)]
    return [] if method in ("bits", "sign", "narrow") else origin.all_input_nodes


@pytest.mark.parametrize("name", CASES)
def test_the_captured_graph_is_not_touched_and_all_graphs_are_sound(
    cases: dict[str, Case], name: str
) -> None:
    case = cases[name]
    before = [(str(segment.joint.graph), segment.joint.code) for segment in case.captured.segments]
    metas = [[dict(node.meta) for node in segment.joint.graph.nodes] for segment in case.captured.segments]
    for planner in PLANNERS:
        for _, graphs in rewritten(case, case.solution(planner)):
            graphs.forward.graph.lint()
            graphs.backward.graph.lint()
    assert before == [(str(segment.joint.graph), segment.joint.code) for segment in case.captured.segments]
    for old, segment in zip(metas, case.captured.segments, strict=True):
        for meta, node in zip(old, segment.joint.graph.nodes, strict=True):
            assert meta.keys() == node.meta.keys()
            assert "lowtide_recompute" not in node.meta


@pytest.mark.parametrize("name", CASES)
def test_copies_carry_where_they_come_from(cases: dict[str, Case], name: str) -> None:
    case = cases[name]
    for index, graphs in rewritten(case, case.solution("all")):
        origins = {node.name: node for node in case.captured.segments[index].joint.graph.nodes}
        for node in ops(graphs.backward):
            if "lowtide_recompute" in node.meta:
                origin = origins[node.meta["lowtide_recompute"]]
                assert source_lines(node) == source_lines(origin) != ()
                assert module_path(node) == module_path(origin)
                assert node.meta["partitioner_tag"] == "is_backward"


@pytest.mark.parametrize("name", CASES)
def test_one_copy_serves_all_uses(cases: dict[str, Case], name: str) -> None:
    """The plan that recomputes all it can runs no op more than twice, and reads of it no first run."""
    case = cases[name]
    for _, graphs in rewritten(case, case.solution("all")):
        names = [
            node.meta["lowtide_recompute"]
            for node in ops(graphs.backward)
            if "lowtide_recompute" in node.meta
        ]
        assert len(names) == len(set(names))
        assert all(node.users for node in ops(graphs.backward) if "lowtide_recompute" in node.meta)


@pytest.mark.parametrize("name", CASES)
def test_only_what_backward_reads_is_saved(cases: dict[str, Case], name: str) -> None:
    case = cases[name]
    for planner in PLANNERS:
        for index, graphs in rewritten(case, case.solution(planner)):
            inputs = graphs.backward.graph.find_nodes(op="placeholder")
            assert len(inputs) == graphs.num_saved + len(graphs.tangents)
            assert all(node.users for node in inputs[: graphs.num_saved])
            results = graphs.forward.graph.output_node().args[0]
            outputs = case.captured.segments[index].num_forward_outputs
            assert isinstance(results, (list, tuple)) and len(results) == outputs + graphs.num_saved


@pytest.mark.parametrize("name", CASES)
def test_without_recompute_every_op_runs_once(cases: dict[str, Case], name: str) -> None:
    for segment in cases[name].captured.segments:
        graphs = rewrite(segment, baseline_schedule(segment))
        total = [n for n in segment.joint.graph.nodes if n.op not in ("placeholder", "output")]
        assert len(ops(graphs.forward)) + len(ops(graphs.backward)) == len(total)


def test_batch_norm_and_dropout_are_run_again_by_their_remats(cases: dict[str, Case]) -> None:
    (_, graphs), *_ = rewritten(cases["batch-norms"], cases["batch-norms"].solution("all"))
    targets = [n.target for n in ops(graphs.backward) if "lowtide_recompute" in n.meta]
    assert torch.ops.aten._native_batch_norm_legit.no_stats in targets
    assert torch.ops.aten._native_batch_norm_legit_functional.default not in targets
    (_, graphs), *_ = rewritten(cases["shared-module"], cases["shared-module"].solution("all"))
    targets = [n.target for n in ops(graphs.backward) if "lowtide_recompute" in n.meta]
    assert eager_dropout not in targets
    assert apply_mask in targets or replay_dropout in targets


@torch.library.custom_op("lowtide_tests::columns", mutates_args=())
def columns(value: torch.Tensor) -> torch.Tensor:
    """A copy that lies column by column, which its fake does not tell."""
    return value.t().clone(memory_format=torch.contiguous_format).t()


columns.register_fake(lambda value: torch.empty(value.shape, dtype=value.dtype))
columns.register_autograd(lambda ctx, grad: grad.clone(), setup_context=lambda ctx, inputs, output: None)


class OtherStrides(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(12, 12), nn.Linear(24, 12)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(columns(F.gelu(self.first(x))).reshape(-1, 24))


def test_a_view_that_is_impossible_at_run_time_becomes_a_copy() -> None:
    torch.manual_seed(0)
    model = OtherStrides()
    plain = Target("strides", model, torch.randn(10, 12), torch.optim.SGD(model.parameters(), lr=0.1))
    (segment, *_) = capture(model, plain.batch).segments
    views = segment.joint.graph.find_nodes(op="call_function", target=torch.ops.aten.view.default)
    assert any(node.args[0].target is torch.ops.lowtide_tests.columns.default for node in views)
    with pytest.raises(RuntimeError, match="view size is not compatible"):
        columns(torch.randn(10, 12)).view(-1, 24)
    planned = twin(plain)
    lowtide.checkpoint(planned.model, planned.batch, budget="1MB")
    assert differences(train(plain), train(planned)) == []
