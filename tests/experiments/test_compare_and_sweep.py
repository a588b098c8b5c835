"""Sweep, curve and comparison with made-up measurements: which rows there are, and what they say."""

from dataclasses import replace

import pytest
from budgets import between
from report_cases import make_case

from lowtide.cli.compare_command import compare_exit
from lowtide.cli.exit_codes import Exit
from lowtide.errors import FreshProcessError, TargetError
from lowtide.experiments import compare_methods, measured, sweep_rows, trial
from lowtide.experiments.measured import distinct_plans, measure_points, spread_over
from lowtide.experiments.trial import ContenderTrial, Mistake
from lowtide.profiles import Profile
from lowtide.report.results import Results, SweepStatus
from lowtide.verification import measure_step, verify_plan
from lowtide.verification.measure_step import Measured, Timing
from lowtide.verification.verify_plan import Verification
from lowtide.zoo.targets import TargetSpec

SPEC = TargetSpec(text="tiny-bert-base", batch_size=4)


@pytest.fixture(scope="module")
def profile():
    return Profile(make_case().step)


def verified(spec, plan, *, timed_runs, resident=False, exact=True):
    return Verification(
        exact=exact,
        differences=() if exact else ("loss, step 1",),
        recompute_exact=True,
        budget_bytes=plan.budget_bytes,
        predicted_peak_bytes=plan.peak_bytes,
        measured_peak_bytes=plan.peak_bytes - 10,
        resident_peak_bytes=None,
        baseline_predicted_peak_bytes=plan.baseline_peak_bytes,
        baseline_measured_peak_bytes=plan.baseline_peak_bytes - 10,
        baseline_resident_peak_bytes=None,
        step_timing=Timing((1.2, 1.4, 1.3)),
        baseline_step_timing=Timing((1.0, 1.0, 1.0)),
        fresh_process=True,
    )


def needs(monkeypatch, reason):
    """Let the machine refuse peaks for which `reason` gives one."""
    for module in (sweep_rows, measured):
        monkeypatch.setattr(module, "why_not", lambda step, *, peak_bytes: reason(peak_bytes))


PLAIN = Measured(
    peak_bytes=77,
    resident_peak_bytes=None,
    static_bytes=7,
    with_optimizer=True,
    fresh_process=True,
    timing=Timing((1.0, 2.0, 1.5)),
)


@pytest.fixture(autouse=True)
def fast(monkeypatch):
    monkeypatch.setattr(verify_plan, "verify", verified)
    monkeypatch.setattr(measure_step, "measure_step", lambda spec, *, timed_runs, resident: PLAIN)
    needs(monkeypatch, lambda peak_bytes: "")


def run_sweep(profile, *, sizes=(4, 8), budget="75%", **options):
    return list(
        sweep_rows.sweep(SPEC, batch_sizes=sizes, budget=budget, profile=lambda spec: profile, **options)
    )


def test_a_measured_size(profile):
    row = run_sweep(profile, sizes=(4,))[0]
    assert (row.status, row.exact, row.batch_size) == (SweepStatus.MEASURED, True, 4)
    assert row.budget_bytes == int(0.75 * profile.peak_bytes) >= row.planned.predicted_peak_bytes
    assert row.baseline.measured_peak_bytes == row.baseline.predicted_peak_bytes - 10
    assert row.overhead == pytest.approx(0.3) and row.planned.seconds_spread == pytest.approx(0.1)


def test_what_the_machine_cannot_hold_is_not_run(profile, monkeypatch, caplog):
    needs(monkeypatch, lambda peak_bytes: "needs 9.0 GiB")
    monkeypatch.setattr(verify_plan, "verify", lambda *_, **__: pytest.fail("must not run"))
    row = run_sweep(profile, sizes=(4,))[0]
    assert row.status is SweepStatus.PREDICTED and row.exact is None and not row.planned.is_measured
    assert row.reduction > 0.2 and "batch 4 is predicted only" in caplog.text and "9.0 GiB" in caplog.text


@pytest.mark.long
def test_a_step_that_only_a_plan_makes_small_enough_is_measured_alone(monkeypatch, caplog):
    profile = sweep_rows.profile_spec(SPEC)
    plain = profile.peak_bytes
    needs(monkeypatch, lambda peak_bytes: "is large" if peak_bytes >= plain else "")
    monkeypatch.setattr(verify_plan, "verify", lambda *_, **__: pytest.fail("must not run"))
    (row,) = run_sweep(profile, sizes=(4,), budget=str(between(profile, 0.3)), timed_runs=2)
    assert row.status is SweepStatus.PLAN_MEASURED and row.exact is None and row.overhead is None
    assert not row.baseline.is_measured and row.planned.measured_peak_bytes <= row.budget_bytes
    assert row.budget_bytes < plain and row.reduction == 1 - row.planned.predicted_peak_bytes / plain > 0
    assert row.planned.seconds_median > 0 and sweep_rows.is_final(row)
    assert "batch 4 runs only with its plan: without one it is large" in caplog.text


def test_prediction_alone_runs_nothing(profile, monkeypatch):
    monkeypatch.setattr(verify_plan, "verify", lambda *_, **__: pytest.fail("must not run"))
    assert [row.status for row in run_sweep(profile, measure=False)] == ["predicted only"] * 2


def test_a_budget_that_is_too_small_is_a_row_with_the_plain_step_measured(profile):
    row = run_sweep(profile, sizes=(4,), budget="1KiB")[0]
    assert row.status_text.startswith("does not fit: lowest reachable peak") and row.budget_bytes == 1024
    assert row.baseline.predicted_peak_bytes == profile.peak_bytes
    assert (row.baseline.measured_peak_bytes, row.baseline.seconds_median) == (77, 1.5)
    assert row.planned.predicted_peak_bytes is None and row.reduction is None and sweep_rows.is_final(row)


def test_other_results_than_eagers_are_no_exact_row(profile, monkeypatch):
    monkeypatch.setattr(verify_plan, "verify", lambda *a, **k: verified(*a, **k, exact=False))
    (row,) = run_sweep(profile, sizes=(4,))
    assert row.exact is False and row.recompute_exact is True


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (TargetError("no such\nfile"), "failed: no such file"),
        (ValueError("bad shape"), "failed: ValueError: bad shape"),
        (FreshProcessError("was killed"), "failed: was killed"),
    ],
)
def test_a_failed_size_does_not_end_the_sweep(profile, error, status):
    def profile_of(spec):
        if spec.batch_size == 4:
            raise error
        return profile

    rows = list(sweep_rows.sweep(SPEC, batch_sizes=(4, 8), budget="75%", profile=profile_of))
    assert [row.status_text for row in rows] == [status, "measured"]
    assert not sweep_rows.is_final(rows[0]) and sweep_rows.is_final(rows[1])


def test_interrupting_is_no_failure(profile):
    def profile_of(spec):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        list(sweep_rows.sweep(SPEC, batch_sizes=(4,), budget="75%", profile=profile_of))


def test_sizes_that_are_done_are_not_run_again(profile, monkeypatch):
    done = run_sweep(profile, sizes=(4,))
    monkeypatch.setattr(
        verify_plan, "verify", lambda spec, plan, **_: verified(spec, plan, timed_runs=0, exact=False)
    )
    rows = run_sweep(profile, sizes=(8, 4), done=done)
    assert [(row.batch_size, row.exact) for row in rows] == [(8, False), (4, True)]
    assert rows[1] is done[0]


def test_rows_survive_their_file(profile):
    for row in run_sweep(profile, budget="75%") + run_sweep(profile, budget="1KiB"):
        data = sweep_rows.row_to_dict(row)
        assert data["reduction"] == row.reduction and data["overhead"] == row.overhead
        assert sweep_rows.row_from_dict(data) == row


def tried(peak_bytes, *, ratio=1.5, mistakes=()):
    return ContenderTrial(
        peak_bytes=peak_bytes,
        baseline_peak_bytes=1000,
        timing=Timing((ratio,)),
        baseline_timing=Timing((1.0,)),
        mistakes=tuple(mistakes),
        unlike_eager=False,
        num_gradients=3,
    )


@pytest.mark.parametrize(
    ("count", "total", "chosen"), [(3, 50, [16, 33, 49]), (1, 50, [49]), (9, 2, [0, 1]), (2, 1, [0])]
)
def test_measured_points_are_spread_over_the_curve(count, total, chosen):
    assert spread_over(count, total) == chosen


def test_the_curve_with_measured_points(profile, monkeypatch):
    plans = distinct_plans(profile.tradeoff(points=8))
    assert [plan.peak_bytes for plan in plans] == sorted({p.peak_bytes for p in plans}, reverse=True)
    asked, steps = [], []

    def try_method(source, method, *, timed_runs):
        asked.append(method)
        if len(asked) == 1:
            raise FreshProcessError("was killed")
        return tried(77, mistakes=[Mistake("loss", 1, 0.5)] if len(asked) == 3 else ())

    monkeypatch.setattr(trial, "try_method", try_method)
    curve = measure_points(
        SPEC, plans, count=3, timed_runs=1, progress=lambda done, total: steps.append((done, total))
    )
    found = [point for point in curve.points if point.measured_peak_bytes == 77]
    assert len(asked) == 3 and len(found) == 2 and curve.points[-1] in found
    assert found[0].measured_overhead == pytest.approx(0.5)
    assert len(curve.wrong) == 1 and "wrong: loss" in curve.wrong[0]
    assert len(curve.failed) == 1 and "was killed" in curve.failed[0]
    assert steps == [(0, 3), (1, 3), (2, 3), (3, 3)]


def compared(profile, monkeypatch, answers):
    """Results by method, where `answers` say what a trial of each kind or name gives."""
    monkeypatch.setattr(compare_methods, "check_memory", lambda step, *, peak_bytes, what: None)

    def try_method(source, method, *, timed_runs):
        answer = answers.get(method.name, answers.get(method.kind))
        if isinstance(answer, Exception):
            raise answer
        return answer

    monkeypatch.setattr(compare_methods, "try_method", try_method)
    return {result.method: result for result in compare_methods.compare(SPEC, profile, timed_runs=1)}


def test_compare_gives_the_planners_the_peaks_of_the_others(profile, monkeypatch):
    middle = (profile.peak_bytes + profile.floor_bytes) // 2
    found = compared(
        profile,
        monkeypatch,
        {
            "eager": tried(profile.peak_bytes),
            "blocks": tried(middle, mistakes=[Mistake("buffer x", 1, 0.9)]),
            "partitioner": tried(profile.peak_bytes, mistakes=[Mistake("gradient of a", 1, 0.9)]),
            "partitioner 0.3": tried(20_000),
            "partitioner 0": FreshProcessError("out of\nluck", kind="RuntimeError"),
            "plan": tried(middle),
        },
    )
    assert len(found) == 8 + 4 and found["none (eager)"].time_ratio == 1.0
    assert found["checkpoint per block"].verdict_text == "wrong: 1 buffer"
    assert found["partitioner 0.9"].verdict_text == "wrong: 1 of 3 gradients"
    assert "gradient of a, step 1" in found["partitioner 0.9"].first_difference
    assert found["partitioner 0"].verdict_text == "crashed: RuntimeError: out of luck"
    assert found["partitioner 0"].peak_bytes is None
    ours = [result for result in found.values() if result.kind == "plan"]
    exact, unreachable = ours[:2], ours[2:]
    assert [result.verdict for result in exact] == [Results.EXACT] * 2
    assert all(result.predicted_peak_bytes <= middle for result in exact)
    assert all(result.verdict is Results.NOT_REACHED for result in unreachable)
    assert compare_exit(list(found.values())) == Exit.DONE
    for changes, code in (
        ({"verdict": Results.WRONG}, Exit.RESULTS_DIFFER),
        ({"verdict": Results.UNLIKE_EAGER}, Exit.RESULTS_DIFFER),
        ({"verdict": Results.CRASHED, "peak_bytes": None}, Exit.ERROR),
        ({"peak_bytes": middle + 1}, Exit.DOES_NOT_FIT),
    ):
        assert compare_exit([*found.values(), replace(exact[0], **changes)]) == code


def test_a_rival_a_hair_below_the_floor_is_met_at_the_floor(profile, monkeypatch):
    near, far = int(profile.floor_bytes * (1 - 0.5e-5)), int(profile.floor_bytes * 0.99)
    for peak_bytes, budget_bytes in ((near, profile.floor_bytes), (far, far)):
        answers = {"eager": tried(profile.peak_bytes), "blocks": tried(peak_bytes), "plan": tried(10)}
        answers["partitioner"] = tried(profile.peak_bytes)
        found = list(compared(profile, monkeypatch, answers).values())
        assert compare_methods.budgets_of(found, floor_bytes=profile.floor_bytes) == [budget_bytes]


def test_rivals_of_nearly_the_same_peak_are_met_once(profile, monkeypatch):
    peak_bytes = profile.peak_bytes
    for other, budgets in ((0.798, [0.798]), (0.78, [0.8, 0.78])):
        answers = {"eager": tried(peak_bytes), "blocks": tried(int(peak_bytes * 0.8)), "plan": tried(10)}
        answers["partitioner"] = tried(int(peak_bytes * other))
        found = list(compared(profile, monkeypatch, answers).values())
        met = compare_methods.budgets_of(found, floor_bytes=1)
        assert met == [int(peak_bytes * share) for share in budgets]


def test_planners_at_given_budgets_need_no_rivals(profile, monkeypatch):
    answers = {"eager": tried(profile.peak_bytes), "plan": tried(10)}
    monkeypatch.setattr(compare_methods, "try_method", lambda _, method, **__: answers[method.kind])
    budgets = [profile.peak_bytes, profile.floor_bytes]
    found = list(
        compare_methods.compare(
            SPEC, profile, timed_runs=2, planners=("none", "auto"), budgets=budgets, with_rivals=False
        )
    )
    assert [result.kind for result in found] == ["eager", *["plan"] * 4]
    assert found[3].verdict is Results.NOT_REACHED  # `none` at the floor
    assert 0 <= found[4].predicted_bound <= found[4].predicted_overhead
    assert all(result.noise is None for result in found)  # two runs have no noise


def test_where_rivals_save_nothing_the_planners_go_to_the_floor(profile, monkeypatch):
    found = compared(
        profile,
        monkeypatch,
        {
            "eager": tried(profile.peak_bytes),
            "blocks": FreshProcessError("no repeated blocks", kind="NotApplicable"),
            "partitioner": tried(profile.peak_bytes),
            "plan": tried(profile.floor_bytes),
        },
    )
    assert found["checkpoint per block"].verdict_text == "not applicable: no repeated blocks"
    ours = [result for result in found.values() if result.kind == "plan"]
    assert ours and all(result.budget_bytes in (None, profile.floor_bytes) for result in ours)
    assert ours[-1].verdict is Results.EXACT
