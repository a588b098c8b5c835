"""Ranks, regions, kinds, storages and remats of captured steps."""

import json
from itertools import pairwise

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from lowtide.analyze.captured_step import Captured, capture
from lowtide.facts import Kind, Node, Region, Step, Storage
from lowtide.facts.serial import step_from_dict, step_to_dict
from lowtide.ops.calls import target_name

WIDTH = 8
ROWS = 16


class Mixed(nn.Module):
    """Something of everything that the analysis treats in a way of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.BatchNorm1d(WIDTH)
        self.drop = nn.Dropout(0.3)
        self.last = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU())
        self.unused = nn.Parameter(torch.ones(5))
        self.frozen = nn.Parameter(torch.ones(WIDTH), requires_grad=False)
        self.register_buffer("count", torch.zeros(WIDTH))

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        self.count += 1
        hidden = self.drop(self.norm(self.first(x))) * self.frozen
        noisy = hidden + torch.randn_like(hidden) * hidden.sigmoid()
        counted = torch.tanh(noisy * self.count)
        logits = self.last(counted.view(ROWS // 2, 2, WIDTH).transpose(0, 1).reshape(ROWS, WIDTH))
        return {"loss": logits.square().mean(), "logits": logits, "other": torch.exp(logits)}


@pytest.fixture(scope="module")
def model() -> Mixed:
    return Mixed()


@pytest.fixture(scope="module")
def captured(model: Mixed) -> Captured:
    return capture(model, torch.randn(ROWS, WIDTH), optimizer=torch.optim.Adam(model.parameters()))


@pytest.fixture(scope="module")
def step(captured: Captured) -> Step:
    return captured.step


def nodes(step: Step, op: str, region: Region = Region.FORWARD) -> list[Node]:
    return [node for node in step.nodes if op in node.op and node.region is region]


def named(step: Step, name: str) -> Storage:
    (found,) = [storage for storage in step.storages if storage.name == name]
    return found


def test_ranks_regions_and_reads(step: Step) -> None:
    assert [node.rank for node in step.nodes] == list(range(len(step.nodes)))
    assert [storage.id for storage in step.storages] == list(range(len(step.storages)))
    order = [Region.FORWARD, Region.BACKWARD, Region.OPTIMIZER]
    positions = [order.index(node.region) for node in step.nodes]
    assert positions == sorted(positions) and set(positions) == {0, 1, 2}
    for node in step.nodes:
        assert all(read < node.rank for read in node.reads), node


def test_every_storage_is_made_once_or_there_before(step: Step) -> None:
    made = [storage for node in step.nodes for storage in node.makes]
    assert len(made) == len(set(made))
    before = {storage.id for storage in step.storages if storage.static}
    assert set(range(len(step.storages))) - set(made) <= before


def test_what_a_node_holds_it_made_or_read(step: Step) -> None:
    for node in step.nodes:
        read = {storage for source in node.reads for storage in step.nodes[source].holds}
        statics = {storage.id for storage in step.storages if storage.static}
        assert set(node.makes) <= set(node.holds)
        assert set(node.holds) - set(node.makes) <= read | statics, node


@pytest.mark.parametrize("op", ["aten.view", "aten.t.default", "aten.transpose", "getitem", "aten.detach"])
def test_aliases_own_nothing(step: Step, op: str) -> None:
    found = nodes(step, op) + nodes(step, op, Region.BACKWARD)
    assert found
    for node in found:
        assert node.makes == () and node.holds


def test_views_of_the_gradient_of_logits_beside_a_loss_own_nothing() -> None:
    class Beside(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
            logits = self.head(x)
            return {"loss": logits.square().mean(), "logits": logits}

    step = capture(Beside(), torch.randn(ROWS, WIDTH)).step
    found = nodes(step, "aten.t.default", Region.BACKWARD)
    assert found and all(node.makes == () for node in found)


def test_kinds_of_what_is_there_before(step: Step, model: Mixed) -> None:
    def bytes_of(kind: Kind) -> dict[str, int]:
        return {s.name: s.nbytes for s in step.storages if s.kind is kind and s.static}

    assert bytes_of(Kind.PARAMETER) == {name: p.nbytes for name, p in model.named_parameters()}
    assert bytes_of(Kind.BUFFER) == {name: b.nbytes for name, b in model.named_buffers()}
    assert bytes_of(Kind.INPUT) == {"input_0": ROWS * WIDTH * 4}
    trained = [p for name, p in model.named_parameters() if name not in ("unused", "frozen")]
    moments = [size for size in bytes_of(Kind.OPTIMIZER_STATE).values() if size > 4]
    assert sorted(moments) == sorted(2 * [parameter.nbytes for parameter in trained])


def test_gradients_are_pinned(step: Step, model: Mixed) -> None:
    found = [storage for storage in step.storages if storage.kind is Kind.GRADIENT]
    trained = [p for name, p in model.named_parameters() if name not in ("unused", "frozen")]
    assert sorted(s.nbytes for s in found) == sorted(p.nbytes for p in trained)
    assert all(storage.pinned and not storage.static for storage in found)


def test_activations_are_what_backward_reads(step: Step) -> None:
    read = {
        storage
        for node in step.nodes
        if node.region is Region.BACKWARD
        for source in node.reads
        if step.nodes[source].region is Region.FORWARD
        for storage in step.nodes[source].holds
        if not step.storages[storage].static
    }
    made = {s for node in step.nodes if node.region is Region.FORWARD for s in node.makes}
    activations = {s.id for s in step.storages if s.kind is Kind.ACTIVATION}
    assert activations == read & made and len(activations) > 5


def test_outputs_are_pinned(step: Step) -> None:
    returned = {node.op: step.storages[node.holds[0]] for node in nodes(step, "aten.") if node.holds}
    assert returned["aten.mean.default"].pinned  # the loss
    assert returned["aten.exp.default"].pinned
    assert not returned["aten.tanh.default"].pinned
    (gelu,) = nodes(step, "aten.gelu.default")
    assert step.storages[gelu.holds[0]].pinned


def test_outputs_without_a_gradient(step: Step) -> None:
    assert step.graphs[0].missing, "the logits and exp get no gradient"
    exp = nodes(step, "aten.exp.default")[0]
    assert not any(exp.rank in node.reads for node in step.nodes if node.region is Region.BACKWARD)
    tangents = nodes(step, "placeholder", Region.BACKWARD)
    assert [step.storages[node.holds[0]].nbytes for node in tangents] == [4]


def test_modules_and_source_lines(step: Step) -> None:
    by_op = {node.op: node for node in step.nodes if node.region is Region.FORWARD}
    assert by_op["aten.gelu.default"].module == "last.1"
    assert by_op["aten._native_batch_norm_legit_functional.default"].module == "norm"
    assert "torch/nn/modules" not in by_op["aten.gelu.default"].source
    forward = Mixed.forward.__code__
    first, last = forward.co_firstlineno, max(line for *_, line in forward.co_lines() if line)
    for node in step.nodes:
        if node.region is Region.OPTIMIZER or node.op in ("placeholder", "output"):
            continue
        path, _, line = node.source.rpartition(":")
        assert path == __file__ and first <= int(line) <= last, node
        assert step.stack_of(node)[-1] == node.source


class Outer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Inner()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x).sum()


class Inner(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.exp().sin()


def test_call_stacks_go_from_the_models_forward_to_the_op() -> None:
    step = capture(Outer(), torch.randn(3, requires_grad=True)).step
    exp = next(node for node in step.nodes if node.op == "aten.exp.default")
    outer, inner = (module.forward.__code__.co_firstlineno + 1 for module in (Outer, Inner))
    assert step.stack_of(exp) == (f"{__file__}:{outer}", f"{__file__}:{inner}")
    sin = next(node for node in step.nodes if node.op == "aten.sin.default")
    assert sin.stack == exp.stack, "the same lines are one stack"
    again = step_from_dict(json.loads(json.dumps(step_to_dict(step))))
    assert again == step and again.stacks[0] == ()


def test_batch_norm_is_run_again_without_its_statistics(step: Step) -> None:
    (norm,) = nodes(step, "_native_batch_norm_legit_functional")
    (remat,) = norm.remats
    assert remat.rule == "no_stats"
    assert remat.makes == norm.makes[:3] and len(norm.makes) == 5
    buffers = {s.id for s in step.storages if s.kind is Kind.BUFFER}
    assert not any(buffers & set(step.nodes[read].holds) for read in remat.reads)
    statistics = [n for n in nodes(step, "getitem") if n.reads == (norm.rank,) and n.fixed]
    assert [node.fixed for node in statistics] == ["running statistics are counted once"] * 2


def test_dropout_can_be_made_from_its_mask(step: Step) -> None:
    (dropout,) = [node for node in step.nodes if "dropout" in node.op and node.region is Region.FORWARD]
    mask, result = [node for node in nodes(step, "getitem") if node.reads == (dropout.rank,)]
    assert mask.rank < result.rank, "the mask first: the result is made from it"
    assert step.storages[mask.holds[0]].nbytes == ROWS * WIDTH
    assert step.storages[mask.holds[0]].extra_eager_bytes == ROWS * WIDTH * 3
    (remat,) = result.remats
    assert remat.rule == "mask"
    assert remat.reads == (dropout.reads[0], mask.rank)
    assert remat.makes == result.holds
    assert [r.rule for r in mask.remats] == ["again"]
    assert [r.rule for r in dropout.remats] == ["replay"]


def test_random_ops_read_a_kept_generator_state_when_replayed(step: Step) -> None:
    states = [node for node in step.nodes if node.on_demand]
    replayed = [node for node in step.nodes if node.remat("replay")]
    assert len(states) == len(replayed) == 2
    for state, node in zip(states, replayed, strict=True):
        assert state.rank == node.rank - 1 and state.rank not in node.reads
        (remat,) = node.remats
        assert remat.reads[-1] == state.rank
        size = step.storages[state.makes[0]].nbytes
        assert size == torch.get_rng_state().numel() == remat.workspace_bytes
        assert state.fixed


def test_readers_of_what_the_step_changes_are_fixed(step: Step) -> None:
    count = named(step, "count").id
    readers = [n for n in step.nodes if any(count in step.nodes[read].holds for read in n.reads)]
    ops = [node for node in readers if node.op.startswith("aten")]
    assert ops and all(node.fixed == "reads what the step changes in place" for node in ops)
    tanh = nodes(step, "aten.tanh.default")[0]
    assert tanh.remats


def test_every_forward_op_has_a_remat_or_a_reason(step: Step) -> None:
    for node in step.nodes:
        if node.region is Region.FORWARD:
            assert bool(node.remats) is not bool(node.fixed), node
        else:
            assert not node.remats


def test_remats_read_only_what_comes_before(step: Step) -> None:
    for node in step.nodes:
        for remat in node.remats:
            assert all(read < node.rank for read in remat.reads)
            assert set(remat.makes) <= set(remat.holds) <= set(node.holds) | set(node.makes)


def test_every_rank_has_its_graph_node(captured: Captured) -> None:
    for node in captured.step.nodes:
        if (
            node.region is not Region.OPTIMIZER
            and node.op not in ("placeholder", "output")
            and not node.on_demand
        ):
            assert target_name(captured.graph_nodes[node.rank].node.target) == node.op
            assert captured.graph_nodes[node.rank].node.graph is captured.segments[node.segment].joint.graph


def test_no_name_has_an_address_in_it(step: Step) -> None:
    """They would not be the same in another process, and a plan would not find its graph."""
    assert not any("0x" in words or "<" in words for node in step.nodes for words in (node.op, node.name))


def test_the_same_model_gives_the_same_step() -> None:
    model, batch = Mixed(), torch.randn(ROWS, WIDTH)
    one, other = capture(model, batch).step, capture(model, batch).step
    assert one == other
    assert capture(model, torch.randn(ROWS, WIDTH).double().float()).step.fingerprint == one.fingerprint


def test_tied_weights_have_one_storage_and_one_gradient() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.head = nn.Embedding(11, WIDTH), nn.Linear(WIDTH, 11, bias=False)
            self.head.weight = self.embed.weight

        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            return F.cross_entropy(self.head(self.embed(tokens)), tokens)

    step = capture(Tied(), torch.arange(11)).step
    for kind in (Kind.PARAMETER, Kind.GRADIENT):
        assert [s.nbytes for s in step.storages if s.kind is kind] == [11 * WIDTH * 4]


def test_a_module_called_several_times_keeps_its_path() -> None:
    class Often(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for _ in range(3):
                x = torch.relu(self.block(x))
            return x

    step = capture(Often(), torch.randn(ROWS, WIDTH)).step
    linears = nodes(step, "addmm")
    assert [node.module for node in linears] == ["block"] * 3
    assert all(one.rank < two.rank for one, two in pairwise(linears))
