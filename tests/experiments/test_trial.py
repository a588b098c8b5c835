"""Methods switched on and off in one process, what is called a mistake, and what fits the machine."""

import pytest
import torch
from report_cases import make_case
from torch import nn

from lowtide import api
from lowtide.errors import LowtideError
from lowtide.experiments import machine
from lowtide.experiments import trial as trial_module
from lowtide.experiments.contenders import Contender, plan_method, repeated_blocks, switch_for
from lowtide.experiments.machine import NotEnoughMemory, check_memory, needed_bytes, why_not
from lowtide.experiments.trial import ROUNDING, Mistake, judge, run_trial
from lowtide.facts import host_memory
from lowtide.report.results import Results, with_why
from lowtide.torch_compat.inductor import has_compiler
from lowtide.torch_compat.modules import route_of
from lowtide.zoo.targets import Target

pytestmark = pytest.mark.slow


class Block(nn.Module):
    """Dropout, and batch norm where wanted: the two that recomputing gets wrong."""

    def __init__(self, width, *, norm, dropout):
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.norm = nn.BatchNorm1d(width) if norm else nn.Identity()
        self.dropout = nn.Dropout(dropout)

    def forward(self, x):
        return x + self.dropout(torch.tanh(self.norm(self.linear(x))))


class Stage(nn.Module):
    def __init__(self, *blocks):
        super().__init__()
        self.layers = nn.Sequential(*blocks)

    def forward(self, x):
        return self.layers(x)


def target(*, norm=False, dropout=0.0, batch_size=256, width=16):
    torch.manual_seed(0)
    stages = [Stage(*(Block(width, norm=norm, dropout=dropout) for _ in range(3))) for _ in range(2)]
    model = nn.Sequential(nn.Linear(width, width), *stages)
    batch = torch.randn(batch_size, width)
    return Target("blocks", model, batch, torch.optim.SGD(model.parameters(), lr=0.1))


def test_blocks_are_the_class_that_comes_most_often_in_one_list():
    model = target().model
    found = repeated_blocks(model)
    assert len(found) == 6 and {type(block) for block in found} == {Block}
    with pytest.raises(LowtideError, match="no repeated blocks"):
        repeated_blocks(nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2)))


def test_a_switch_leaves_no_trace():
    made = target()
    blocks = repeated_blocks(made.model)
    for kind in ("blocks", "partitioner"):
        switch = switch_for(Contender(name="m", kind=kind, memory_budget=0.5), made)
        switch.on()
        assert "forward" in blocks[0].__dict__ or route_of(made.model) is not None
        switch.off()
        assert "forward" not in blocks[0].__dict__ and route_of(made.model) is None


def test_checkpointing_blocks_holds_less_and_is_exact_with_dropout():
    trial = run_trial(source=target(dropout=0.2), method=Contender(name="m", kind="blocks"), timed_runs=1)
    assert trial.judgement == (Results.EXACT, "") and trial.time_ratio > 0
    assert trial.peak_bytes < trial.baseline_peak_bytes


def test_checkpointing_blocks_updates_batch_norm_twice():
    trial = run_trial(source=target(norm=True), method=Contender(name="m", kind="blocks"), timed_runs=0)
    assert trial.judgement == (Results.WRONG, "18 buffers")  # 6 blocks of mean, variance and count
    assert trial.time_ratio is None and trial.mistakes[0].name.startswith("buffer 1.layers.0.norm.running_")


def test_a_plan_is_exact_where_its_rivals_are_not():
    made = target(norm=True, dropout=0.2)
    profile = api.profile(made.model, made.batch, optimizer=made.optimizer)
    plan = profile.plan((profile.peak_bytes + profile.floor_bytes) // 2)
    trial = run_trial(source=made, method=plan_method("auto", plan), timed_runs=0)
    assert trial.judgement[0] is Results.EXACT and trial.mistakes == () and trial.num_gradients == 26
    assert trial.peak_bytes <= plan.budget_bytes < trial.baseline_peak_bytes
    assert abs(trial.peak_bytes / plan.peak_bytes - 1) < 0.01
    assert route_of(made.model) is not None  # measured last, and still on


def test_a_plan_whose_optimizer_steps_in_pieces_runs_so():
    model = nn.Sequential(nn.Linear(1024, 2048), nn.ReLU(), nn.Linear(2048, 1024))
    optimizer = torch.optim.Adam(model.parameters(), foreach=True)
    made = Target("wide", model, torch.randn(8, 1024), optimizer)
    profile = api.profile(made.model, made.batch, optimizer=made.optimizer)
    plan = profile.plan(profile.floor_bytes)
    assert plan.solution.optimizer_in_chunks
    trial = run_trial(source=made, method=plan_method("auto", plan), timed_runs=1)
    assert trial.judgement[0] is Results.EXACT
    assert trial.peak_bytes <= plan.budget_bytes < trial.baseline_peak_bytes


def test_the_partitioner_redraws_dropout():
    method = Contender(name="m", kind="partitioner", memory_budget=0.0)
    trial = run_trial(source=target(dropout=0.2), method=method, timed_runs=0)
    assert trial.judgement[0] is Results.WRONG and trial.unlike_eager


class Chaos(nn.Module):
    """Blows up the last bit of what it gets, a hundred million times."""

    def forward(self, x):
        return torch.sin(1e8 * x)


def chaotic():
    made = target(norm=True)
    made.model.append(Chaos())
    return made


def test_what_the_model_itself_makes_of_a_last_bit_is_no_mistake(monkeypatch):
    monkeypatch.setattr(trial_module, "reference_for", lambda method, target: None)
    method = Contender(name="m", kind="partitioner", memory_budget=1.0)
    trial = run_trial(source=chaotic(), method=method, timed_runs=0)
    assert max(mistake.error for mistake in trial.mistakes if mistake.step == 1) > ROUNDING
    assert trial.judgement[0] is Results.ROUNDED


def test_what_the_last_bit_does_not_move_is_a_mistake():
    trial = run_trial(source=chaotic(), method=Contender(name="m", kind="blocks"), timed_runs=0)
    assert trial.judgement == (Results.WRONG, "18 buffers")


@pytest.mark.long
@pytest.mark.skipif(not has_compiler(), reason="Inductor needs a C++ compiler")
@pytest.mark.parametrize("memory_budget", [0.3, 0.0])
def test_torch_compile_at_a_memory_budget_draws_as_it_does_by_default(memory_budget):
    """Where it recomputes the drawing of seeds as well, masks are others in the backward pass: here at 0."""
    method = Contender(name="m", kind="inductor", memory_budget=memory_budget)
    trial = run_trial(source=target(dropout=0.2), method=method, timed_runs=0)
    results = (Results.UNLIKE_EAGER, Results.ROUNDED) if memory_budget else (Results.WRONG,)
    assert trial.unlike_eager and trial.judgement[0] in results and trial.peak_bytes > 0


@pytest.mark.parametrize(
    ("found", "unlike_eager", "words"),
    [
        ([], False, "exact"),
        ([], True, "recompute exact, unlike eager"),
        ([Mistake("parameter a", 1, 0.5)], False, "not exact: rounding (0 of 3 gradients)"),
        (
            [Mistake("gradient of a", 1, 0.5), Mistake("gradient of a", 2, 0.5)],
            False,
            "wrong: 1 of 3 gradients",
        ),
        ([Mistake("buffer x", 1, float("inf")), Mistake("buffer y", 1, 0.9)], False, "wrong: 2 buffers"),
        (
            [Mistake("gradient of a", 1, 1e-7), Mistake("gradient of b", 2, 0.5)],
            False,
            "not exact: rounding (2 of 3 gradients)",
        ),
        (
            [Mistake("gradient of a", 1, 0.5, shaken=0.1), Mistake("gradient of b", 1, 0.5, shaken=0.01)],
            False,
            "wrong: 1 of 3 gradients",
        ),
        ([Mistake("loss", 1, 0.5)], False, "wrong: loss"),
        ([Mistake("gradient of a", 1, float("nan"))], False, "wrong: 1 of 3 gradients"),
    ],
)
def test_mistakes_in_words(found, unlike_eager, words):
    assert with_why(*judge(found, num_gradients=3, unlike_eager=unlike_eager)) == words


def test_memory_is_asked_for_before_anything_runs(monkeypatch):
    step = make_case().step
    need = needed_bytes(step, peak_bytes=1000)
    assert need > machine.MARGIN_BYTES + 1000
    for available, fits in ((need, True), (need - 1, False), (None, True)):
        monkeypatch.setattr(machine, "available_bytes", lambda device, free=available: free)
        assert (why_not(step, peak_bytes=1000) == "") is fits
    monkeypatch.setattr(machine, "available_bytes", lambda device: 1 << 20)
    with pytest.raises(NotEnoughMemory, match=r"the step does not fit .* 1.0 MiB are free"):
        check_memory(step, peak_bytes=1000, what="the step")


def test_the_kernel_tells_what_is_free():
    assert machine.available_bytes() > 1 << 20


@pytest.mark.parametrize(
    ("line", "folder", "files"),
    [
        ("0::/job", "job", {"memory.max": "1000", "memory.current": "400"}),
        ("0::/job/inner", "job", {"memory.max": "1000", "memory.current": "400"}),
        ("0::/gone", "", {"memory.max": "1000", "memory.current": "400"}),
        ("5:memory:/a", "memory/a", {"memory.limit_in_bytes": "1000", "memory.usage_in_bytes": "400"}),
    ],
)
def test_a_container_may_leave_less(tmp_path, line, folder, files):
    group = tmp_path / "groups" / folder
    group.mkdir(parents=True)
    for name, text in {**files, "memory.stat": "anon 7\ninactive_file 50\n"}.items():
        (group / name).write_text(f"{text}\n".replace("\n\n", "\n"))
    (tmp_path / "cgroup").write_text(f"3:cpu,cpuacct:/other\n{line}\n")
    assert host_memory.left_to_containers(tmp_path / "groups", tmp_path / "cgroup") == [650]
    for name in files:
        (group / name).write_text("max\n")
    assert host_memory.left_to_containers(tmp_path / "groups", tmp_path / "cgroup") == []
