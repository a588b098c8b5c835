"""Models in several graphs: how these follow each other, and when a real forward pass is needed."""

import pytest
import torch
from nets import ROWS, WIDTH, Net, breaks, rows, said
from torch import nn
from trouble import BATCH, EqualBlocks
from trouble import WIDTH as TROUBLE_WIDTH

import lowtide
from lowtide.analyze.analysis import module_path
from lowtide.analyze.captured_step import capture
from lowtide.facts import FRAMES, Region
from lowtide.torch_compat.dispatch import FakeTensor
from lowtide.trace.trace_model import trace
from lowtide.verification.measure_step import peak_above_start


def test_a_graph_break_needs_no_real_forward(caplog: pytest.LogCaptureFixture) -> None:
    step = capture(Net(middle=breaks), rows()).step
    assert [graph.in_model for graph in step.graphs] == [True, True, True, False]
    assert said(caplog) == []
    first = f"{breaks.__code__.co_filename}:{breaks.__code__.co_firstlineno + 1}"
    assert step.first_break == first
    words = f"the model breaks into 3 graphs, first at {first}; nothing is recomputed across them"
    assert step.notes == (words,)


def test_code_between_two_graphs_gets_fake_tensors() -> None:
    seen = []

    @torch._dynamo.disable
    def looks(x: torch.Tensor) -> torch.Tensor:
        seen.append(type(x))
        return x

    capture(Net(middle=looks), rows())
    assert set(seen) == {FakeTensor}


def test_segments_are_ranked_in_the_order_they_run() -> None:
    step = capture(Net(middle=breaks), rows()).step
    forward = [n.segment for n in step.nodes if n.region is Region.FORWARD and n.op != FRAMES]
    backward = [n.segment for n in step.nodes if n.region is Region.BACKWARD]
    assert forward == sorted(forward) and set(forward) == {0, 1, 2, 3}
    assert backward == sorted(backward, reverse=True) and set(backward) == {0, 1, 2, 3}


def test_graphs_that_differ_in_their_parameters_alone_are_told_apart() -> None:
    graphs = capture(EqualBlocks(), torch.randn(BATCH, TROUBLE_WIDTH)).step.graphs
    assert len({graph.fingerprint for graph in graphs if graph.in_model}) == 3


def test_links_between_segments() -> None:
    step = capture(Net(middle=breaks), rows()).step
    for region, step_to in ((Region.FORWARD, 1), (Region.BACKWARD, -1)):
        links = [
            (step.nodes[read].segment, node.segment)
            for node in step.nodes
            for read in node.reads
            if node.region is region and node.op == "placeholder"
        ]
        assert links and all(to - start == step_to for start, to in links)
    linked = [n for n in step.nodes if n.op == "placeholder" and n.reads and n.region is Region.FORWARD]
    for node in linked:
        assert node.makes == () and node.holds == step.nodes[node.reads[0]].holds
        assert node.fixed == "comes from before a graph break"


def test_a_real_forward_is_announced_before_it_runs(caplog: pytest.LogCaptureFixture) -> None:
    before: list[int] = []

    def reads_values(x: torch.Tensor) -> torch.Tensor:
        if x.sum().item() > -1000:
            before.append(len(said(caplog)))
            return torch.relu(x)
        return x

    captured = capture(Net(middle=reads_values), rows())
    words, outside = said(caplog)
    assert before and before[0] == 1
    assert (
        "code outside of its graphs that torch.compile does not follow" in outside
    )  # the relu, after said()
    parameters = 2 * (WIDTH * WIDTH + WIDTH) * 4
    graph = ROWS * WIDTH * 4
    assert f"at least {parameters + graph} B: {parameters} B of parameters" in words
    assert f"{graph} B for the largest graph so far" in words and __file__ in words
    assert len(captured.segments) == 4


@torch._dynamo.disable
def _through_numpy(x: torch.Tensor) -> float:
    return float(x.detach().numpy().mean())


def test_code_that_fails_on_fake_tensors_gets_real_ones(caplog: pytest.LogCaptureFixture) -> None:
    captured = capture(Net(middle=lambda x: x * _through_numpy(x)), rows())
    assert "one real forward pass" in said(caplog)[0]
    assert len(captured.segments) == 4


def test_code_between_graphs_reads_a_buffer_that_a_graph_has_changed() -> None:
    """A norm with a cumulative average divides by the number of batches, which the graph before counts."""
    norm = nn.BatchNorm1d(WIDTH, momentum=None)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), norm, nn.Linear(WIDTH, WIDTH))
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    capture(model, (rows(),))
    assert all(torch.equal(buffer, before[name]) for name, buffer in model.named_buffers())


def test_a_real_forward_saves_no_activations() -> None:
    def reads_values(x: torch.Tensor) -> torch.Tensor:
        return x if x.sum().item() > -1e9 else -x

    class Deep(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.Sequential(*(nn.Sequential(nn.Linear(128, 128), nn.GELU()) for _ in range(8)))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return reads_values(self.layers(x)) * 2

    batch = torch.randn(1000, 128)
    peak = peak_above_start(lambda: capture(Deep(), batch))
    assert batch.nbytes < peak < 5 * batch.nbytes


class DropsLayers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            if torch.rand([]) < 0.5:
                continue
            x = layer(x).tanh()
        return x


@pytest.mark.parametrize("seed", [0, 1])
def test_the_step_that_is_captured_drops_no_layer(seed: int) -> None:
    model, batch = DropsLayers(), rows()
    torch.manual_seed(seed)
    before = torch.get_rng_state()
    nodes = capture(model, batch).step.nodes
    assert sum(node.op == "aten.tanh.default" for node in nodes) == len(model.layers)
    assert torch.equal(torch.get_rng_state(), before)


class SameGraphTwice(nn.Module):
    """Whose second run gives an output that nobody reads."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    @torch._dynamo.disable
    def stop(self) -> None:
        """End a graph."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        others = []
        for _ in range(2):
            self.stop()
            hidden = self.layer(x)
            x, other = hidden.tanh(), hidden.sin()
            self.stop()
            others.append(other)
        return x + others[0]


def test_a_graph_that_runs_twice_is_planned_for_all_that_either_run_gives() -> None:
    batch = rows().requires_grad_()  # or the first run would have one gradient less to make
    first, second, *_ = capture(SameGraphTwice(), batch).step.graphs
    assert first.fingerprint == second.fingerprint
    assert first.missing == second.missing


def test_a_budget_that_is_too_small_names_the_first_break() -> None:
    with pytest.raises(lowtide.BudgetTooSmall, match="The model breaks into 3 graphs, first at ") as refused:
        lowtide.profile(Net(middle=breaks), rows()).plan("1%")
    first = f"{breaks.__code__.co_filename}:{breaks.__code__.co_firstlineno + 1}"
    assert f"{first}, and nothing is recomputed across them" in str(refused.value)
    assert "\n" not in str(refused.value)


class EndsOutside(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return _outside(self.layer(x))


@torch._dynamo.disable
def _outside(x: torch.Tensor) -> torch.Tensor:
    return x.sin().sum()


def test_one_graph_beside_uncaptured_code_is_not_several() -> None:
    model = EndsOutside()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(
        lowtide.CaptureError, match="runs differentiable code outside of its graph"
    ) as refused:
        lowtide.profile(model, rows(), optimizer=optimizer, step_in_backward=True)
    assert "breaks into" not in str(refused.value)


class Picks(nn.Module):
    """Writes between two graphs over the rows that a mask picks, as models with optional inputs do."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 8), nn.Linear(8, 4)

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        picked = x.detach()[mask]
        torch._dynamo.graph_break()
        picked.mul_(2)
        return self.last(x).sum() + picked.sum()


def test_a_value_without_elements_may_be_written_over() -> None:
    model, batch = Picks(), (torch.randn(3, 4), torch.zeros(3, dtype=torch.bool))
    model(*batch).backward()
    expected = [parameter.grad for parameter in model.parameters()]
    model.zero_grad()
    lowtide.profile(model, batch).plan("200%", planner="none").apply(model)
    model(*batch).backward()
    seen = [parameter.grad for parameter in model.parameters()]
    assert all(map(torch.equal, expected, seen))


class Block(nn.Module):
    """May break between its two layers."""

    def __init__(self, *, breaks: bool) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)
        self.breaks = breaks

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.a(x))
        if self.breaks:
            torch._dynamo.graph_break()
        return torch.tanh(self.b(x))


def test_modules_keep_their_paths_behind_a_break() -> None:
    model = nn.Sequential(*(Block(breaks=place == 1) for place in range(3)))
    traced = trace(model, (torch.randn(2, 8),), {}, loss=None)
    paths = [
        module_path(node)
        for execution in traced.executions
        for node in execution.segment.forward_ops
        if node.target in (torch.ops.aten.addmm.default, torch.ops.aten.tanh.default)
    ]
    assert len(traced.executions) > 1
    assert paths == [
        path for place in range(3) for path in (f"{place}.a", f"{place}", f"{place}.b", f"{place}")
    ]
