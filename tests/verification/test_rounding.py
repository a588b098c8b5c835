"""The lever that rounds: used where it helps, said to round, and exact plans otherwise."""

import copy
import math

import pytest
import torch
from heads import LanguageModel, tokens
from training import measured_peak

import lowtide
from lowtide.errors import CannotMoveToFreshProcess, LowtideError
from lowtide.ops import head_chunks
from lowtide.ops.rounded_head import NO_HEAD, READ_BY_LOOP
from lowtide.runtime.runner import runner_of
from lowtide.verification import comparison, verify_plan
from lowtide.zoo.targets import Target

pytestmark = pytest.mark.slow

CLASSES = 4096
_right = head_chunks.Head.log_probabilities


def target(kind: str = "plain", **options: object) -> Target:
    torch.manual_seed(0)
    model = LanguageModel(kind, classes=CLASSES, **options)  # type: ignore[arg-type]
    ids = tokens(8, 32, CLASSES)
    return Target("model", model, ids, torch.optim.SGD(model.parameters(), lr=0.1))


def profiled(source: Target, **options: object) -> lowtide.Profile:
    return lowtide.profile(source.model, source.batch, optimizer=source.optimizer, **options)


@pytest.fixture
def verified_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """`verify` starts no processes: other tests look at those."""

    def run_fresh(*_: object, **__: object) -> None:
        raise CannotMoveToFreshProcess("not now", kind="")

    monkeypatch.setattr(verify_plan, "run_fresh", run_fresh)


@pytest.fixture(scope="module")
def planned() -> tuple[Target, lowtide.Profile, lowtide.Plan]:
    source = target(bias=True)
    found = profiled(source, rounds="head")
    return source, found, found.plan(found.floor_bytes)


def test_the_head_lowers_the_floor_and_is_said_to_round(planned, tmp_path) -> None:
    source, found, plan = planned
    exact = profiled(source)
    assert found.floor_bytes < 0.6 * exact.floor_bytes and found.peak_bytes == exact.peak_bytes
    assert plan.rounds == ("head",) and "rounds=head" in repr(plan) and "not equal to eager" in plan.summary()
    assert any(note.startswith("rounds (head)") for note in plan.solution.notes)
    plan.save(tmp_path / "plan.json")
    assert lowtide.load_plan(tmp_path / "plan.json").rounds == ("head",)
    assert "rounds" in plan.report(tmp_path / "plan.html").read_text()


def test_a_plan_that_does_not_need_it_is_exact(planned) -> None:
    _, found, _ = planned
    assert found.plan("100%").rounds == ()
    curve = found.tradeoff(4)
    assert [plan.rounds for plan in curve][::3] == [(), ("head",)]
    assert all(plan.peak_bytes <= plan.budget_bytes for plan in curve)


def test_training_is_within_the_budget_and_near_eager(planned) -> None:
    source, _, plan = planned
    eager = copy.deepcopy(source.model)
    plan.apply(source.model)
    assert measured_peak(source) <= plan.budget_bytes
    for ids in (source.batch, source.batch[:, :24]):  # the second shape is planned when it comes
        source.model.zero_grad()
        eager.load_state_dict(source.model.state_dict())
        eager.zero_grad()
        for model in (eager, source.model):
            torch.manual_seed(5)
            model(ids).backward()
        pairs = zip(eager.parameters(), source.model.parameters(), strict=True)
        assert max(((a.grad - b.grad).norm() / a.grad.norm()).item() for a, b in pairs) < 2e-6
    runner = runner_of(source.model)
    assert runner is not None and all(schedule.rounds for _, schedule, _ in runner.backend.graphs)
    lowtide.remove(source.model)


@pytest.mark.usefixtures("verified_here")
def test_verify_never_calls_it_exact(planned, monkeypatch: pytest.MonkeyPatch) -> None:
    source, _, plan = planned
    result = lowtide.verify(source.model, source.batch, plan, optimizer=source.optimizer, timed_runs=0)
    assert not result.exact and result.fits and not result.differences
    found = result.rounding
    assert found is not None and found.eager_from_float64 is not None
    assert 0 < found.from_eager.gradient < 2e-6 and 0 < found.eager_from_float64.gradient < 2e-6
    assert "NOT EXACT, the plan rounds" in result.summary() and "from float64" in result.summary()

    # a fault that is no rounding is a difference
    monkeypatch.setattr(head_chunks.Head, "log_probabilities", lambda head, rows: 1.01 * _right(head, rows))
    copied = copy.deepcopy(source)
    seen = comparison.compare(source=copied, solution=_solution(plan), timed_runs=0)
    assert any("more than rounding" in text for text in seen.differences)


def _solution(plan: lowtide.Plan) -> dict:
    from lowtide.facts.serial import solution_to_dict

    return solution_to_dict(plan.solution)


@pytest.mark.usefixtures("verified_here")
def test_an_exact_plan_beside_it_is_verified_as_ever(planned) -> None:
    source, found, _ = planned
    plan = found.plan("90%")
    assert plan.rounds == ()
    result = lowtide.verify(source.model, source.batch, plan, optimizer=source.optimizer, timed_runs=0)
    assert result.exact and result.rounding is None


def test_logits_that_the_loop_may_read_are_made() -> None:
    source = target("returned")
    found = profiled(source, rounds=("head",))
    assert f"rounds=head changes nothing here: {READ_BY_LOOP}" in found.step.notes
    assert found.plan(found.floor_bytes).rounds == ()

    let_go = profiled(source, rounds=("head",), holds_outputs=False)
    exact = profiled(source, holds_outputs=False)
    assert let_go.floor_bytes < exact.floor_bytes
    let_go.plan(let_go.floor_bytes).apply(source.model)
    output = source.model(source.batch)
    output["loss"].backward()
    assert math.isfinite(output["loss"].item())
    logits = output["logits"]
    assert logits.isnan().all() and logits.untyped_storage().nbytes() == logits.itemsize


def test_a_model_without_a_head_is_told_of() -> None:
    model = torch.nn.Linear(16, 16)
    found = lowtide.profile(model, torch.randn(8, 16), rounds=["head"])
    assert f"rounds=head changes nothing here: {NO_HEAD}" in found.step.notes


def test_what_may_round() -> None:
    source = target()
    with pytest.raises(LowtideError, match="nothing called 'tail' may round"):
        profiled(source, rounds="tail")
    with pytest.raises(LowtideError, match="rounds is planned for the device that is here"):
        profiled(source, rounds="head", device="a100-40g")
