"""Custom ops that the user calls repeatable: tried, run again where nothing speaks against it, else kept."""

import random

import custom_ops
import numpy
import pytest
import torch
from custom_ops import OPS, ROWS, SPACE, WIDTH, Layers
from training import differences, measured_peak, train, twin

import lowtide
from lowtide.errors import LowtideError
from lowtide.loop_statements import LoopStatements
from lowtide.ops import repeatable_ops
from lowtide.ops.calls import Call
from lowtide.profiling import repeat_trials
from lowtide.profiling.repeat_trials import reason_not_repeatable
from lowtide.remat.recompute import UNKNOWN
from lowtide.zoo.targets import Target

LIMIT = 1 << 30


@pytest.fixture(autouse=True)
def nothing_stated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(repeatable_ops, "_stated", {})
    monkeypatch.setattr(repeat_trials, "_verdicts", {})


def target(name: str = "pure", rows: int = ROWS) -> Target:
    torch.manual_seed(0)
    model = Layers(name)
    return Target(name, model, torch.randn(rows, WIDTH), torch.optim.SGD(model.parameters(), lr=0.1))


def profiled(source: Target) -> lowtide.Profile:
    return lowtide.profile(source.model, source.batch, optimizer=source.optimizer)


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("pure", ""),
        ("counting", repeat_trials.OTHER_BITS),
        ("elsewhere", repeat_trials.OTHER_BITS),
        ("drawing", repeat_trials.DRAWS),
        ("drawing_in_python", repeat_trials.DRAWS),
        ("drawing_in_numpy", repeat_trials.DRAWS),
        ("writing", repeat_trials.WRITES),
        ("shelved", repeat_trials.SAME_MEMORY),
        ("raising", "cannot be tried alone: ValueError: only for sorted input"),
    ],
)
def test_a_trial_finds_what_speaks_against_a_second_run(name: str, reason: str) -> None:
    before = torch.get_rng_state(), random.getstate(), numpy.random.get_state()[1].tolist()
    like = torch.zeros(ROWS, WIDTH, dtype=torch.int32 if name == "raising" else torch.float32)
    call = Call(getattr(torch.ops.lt_trials, name).default, (like,))
    assert reason_not_repeatable(call, memory_limit_bytes=LIMIT) == reason
    assert torch.equal(before[0], torch.get_rng_state()) and before[1] == random.getstate()
    assert before[2] == numpy.random.get_state()[1].tolist()


def test_a_large_call_is_tried_on_a_part_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    monkeypatch.setattr(repeat_trials, "_tried", lambda call: seen.append(call.tensors[0].shape) or "")
    call = Call(torch.ops.lt_trials.pure.default, (torch.empty(1 << 14, WIDTH),))
    assert reason_not_repeatable(call, memory_limit_bytes=1 << 21) == ""
    assert seen[0][0] < 1 << 14
    assert "too large" in reason_not_repeatable(call, memory_limit_bytes=64)


@pytest.mark.parametrize("name", ["pure", "parts"])
def test_a_named_op_is_run_again_and_lowers_the_floor(name: str) -> None:
    source = target(name)
    kept = profiled(source)
    assert any("lowtide.repeatable('lt_trials::" in note for note in kept.step.notes)
    assert any(UNKNOWN in activation.fixed for activation in kept.activations)

    lowtide.repeatable(f"{SPACE}::{name}")
    named = profiled(source)
    assert named.floor_bytes < kept.floor_bytes and not named.step.notes
    expected = train(twin(source))
    plan = named.plan(named.floor_bytes)
    assert f"lt_trials.{name}.default" in {
        named.nodes[run.rank].op for run in plan.solution.schedule.runs if not run.is_first
    }
    plan.apply(source.model)
    assert differences(expected, train(source)) == []
    assert measured_peak(source) <= plan.budget_bytes


@pytest.mark.parametrize("name", ["counting", "tagged", "told"])
def test_a_refused_op_is_kept_with_the_reason(name: str) -> None:
    lowtide.repeatable(f"{SPACE}::{name}")
    found = profiled(target(name))
    reason = {
        "counting": repeat_trials.OTHER_BITS,
        "tagged": repeat_trials.DRAWS,
        "told": "writes to one of its inputs",
    }[name]
    note = repeat_trials.REFUSED.format(op=f"{SPACE}::{name}", reason=reason)
    assert note in found.step.notes and note in found.plan(found.floor_bytes).solution.notes
    if name != "told":
        reasons = {decision.reason for decision in found.plan(found.floor_bytes).decisions}
        assert f"cannot be recomputed: {reason}" in reasons


@pytest.mark.long
def test_a_plan_from_a_file_carries_the_names(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = target()
    lowtide.repeatable(OPS["pure"])
    found = profiled(source)
    found.save(tmp_path / "profile.json")
    plan = found.plan(found.floor_bytes)
    plan.save(tmp_path / "plan.json")
    result = lowtide.verify(source.model, source.batch, plan, optimizer=source.optimizer, timed_runs=0)
    assert result.exact and result.fresh_process
    assert lowtide.load_profile(tmp_path / "profile.json").floor_bytes == found.floor_bytes

    monkeypatch.setattr(repeatable_ops, "_stated", {})  # as in another process
    lowtide.load_plan(tmp_path / "plan.json").apply(source.model, optimizer=source.optimizer)
    assert repeatable_ops.stated() == ("lt_trials::pure",)
    larger = target(rows=ROWS - 32)  # another shape, planned anew for the same budget
    other = Target("larger", source.model, larger.batch, source.optimizer)
    expected = train(twin(Target("e", lowtide.remove(source.model), larger.batch, source.optimizer)))
    plan.apply(source.model)
    assert differences(expected, train(other)) == []


def test_what_can_be_named() -> None:
    for op in ("lt_trials::pure.default", torch.ops.lt_trials.pure, torch.ops.lt_trials.pure.default):
        lowtide.repeatable(op)
    assert repeatable_ops.stated() == ("lt_trials::pure", "lt_trials::pure.default")
    for wrong, text in {
        "pure": "cannot read the op 'pure'",
        "lt_trials::purr": "did you mean 'lt_trials::pure'?",
        "no_such_library::op": "import the library that registers it first",
        "lt_trials::pure.out": "has no overload 'out': it has default",
        torch.tanh: "needs an op of torch's registry, not a builtin_function_or_method",
    }.items():
        with pytest.raises(LowtideError, match=text.replace("?", r"\?")):
            lowtide.repeatable(wrong)


def test_an_overload_that_was_named_is_found() -> None:
    lowtide.repeatable("lt_trials::pure.default")
    assert repeatable_ops.is_named(torch.ops.lt_trials.pure.default)


def test_ranks_compare_what_was_named() -> None:
    said = LoopStatements(
        optimizer=None,
        loss=None,
        accumulate=False,
        reserve=0,
        step_in_backward=False,
        holds_outputs=True,
        offload="",
    )
    before = said.settings
    lowtide.repeatable(custom_ops.parts)
    assert said.settings != before and ("repeatable ops", "lt_trials::parts") in said.settings


def test_nothing_can_be_tried_on_an_absent_gpu() -> None:
    lowtide.repeatable("lt_trials::pure")
    source = target()
    found = lowtide.profile(source.model, source.batch, optimizer=source.optimizer, device="a100-40g")
    assert any(repeat_trials.ABSENT in note for note in found.step.notes)
    assert all(node.recompute is None for node in found.nodes if node.op.startswith("lt_trials"))
