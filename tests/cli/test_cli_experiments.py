"""`lowtide tradeoff`, `sweep` and `compare`: files, tables, exit codes; the measuring is made up."""

import csv
import json
import subprocess
import sys
from dataclasses import replace

import pytest
from report_cases import make_case

from lowtide.cli import options as completion
from lowtide.cli import sources
from lowtide.cli.exit_codes import Exit
from lowtide.cli.output_files import after_run, save_profile
from lowtide.cli.sweep_command import sweep_exit
from lowtide.experiments import compare_methods, machine, measured, sweep_rows
from lowtide.experiments.compare_methods import MethodResult
from lowtide.profiles import Profile
from lowtide.report.results import Results, StepMeasurement, SweepRow, SweepStatus
from lowtide.zoo.targets import TargetSpec

SPEC = TargetSpec(text="tiny-bert-base", batch_size=4)


@pytest.fixture(scope="module")
def profile():
    return Profile(make_case().step)


@pytest.fixture
def profile_file(profile, tmp_path):
    save_profile(tmp_path / "profile.json", profile, SPEC)
    return str(tmp_path / "profile.json")


@pytest.fixture(autouse=True)
def no_model(monkeypatch, profile):
    """Every TARGET has the same made-up profile."""
    monkeypatch.setattr(sources, "profile_target", lambda spec, terminal, **_: profile)
    monkeypatch.setattr(machine, "available_bytes", lambda device: None)


def rows_of(path):
    with path.open() as file:
        return list(csv.DictReader(file))


# tradeoff


def test_tradeoff_from_a_file_writes_everything(run_lowtide, profile_file, profile, tmp_path):
    out = tmp_path / "out"
    code, stdout, stderr = run_lowtide(
        "tradeoff", profile_file, "--points", "9", "--measure", "0", "-o", str(out)
    )
    assert code == 0 and "peak against time added" in stdout and f"report: {out / 'report.html'}" in stderr
    rows = rows_of(out / "tradeoff.csv")
    peaks = [int(row["peak_bytes"]) for row in rows]
    assert peaks == sorted(peaks, reverse=True) and peaks[-1] == profile.floor_bytes and len(rows) > 3
    data = json.loads((out / "tradeoff.json").read_text())
    assert [point["peak_bytes"] for point in data["points"]] == peaks
    assert {path.name for path in out.iterdir()} == {"tradeoff.csv", "tradeoff.json", "report.html", "plots"}
    assert (out / "plots" / "tradeoff.svg").exists()


def test_tradeoff_without_measuring_needs_no_torch(profile_file):
    code = (
        f"import sys; sys.argv = ['lowtide', 'tradeoff', {profile_file!r}, '--measure=0', '--points=3']\n"
        "from lowtide.cli import main\n"
        "try: main()\n"
        "finally: assert 'torch' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=False, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("wrong", "failed", "code"),
    [
        ([], [], Exit.DONE),
        (["plan: loss wrong"], [], Exit.RESULTS_DIFFER),
        ([], ["plan: was killed"], Exit.ERROR),
    ],
)
def test_tradeoff_shows_measured_points(run_lowtide, profile_file, monkeypatch, wrong, failed, code):
    def measure_points(spec, plans, *, count, timed_runs, progress):
        assert spec == SPEC and count == 2
        points = [measured.point_of(plan) for plan in plans]
        points[-1] = replace(points[-1], measured_peak_bytes=123 << 20, measured_overhead=0.25)
        return measured.Curve(points, wrong, failed)

    monkeypatch.setattr(measured, "measure_points", measure_points)
    found, stdout, _ = run_lowtide("tradeoff", profile_file, "--points", "5", "--measure", "2")
    assert found == code and "123.0 MiB" in stdout and "+25.0 %" in stdout
    assert all(text in stdout for text in (*wrong, *failed))


def test_tradeoff_needs_to_know_what_to_measure(run_lowtide, profile, tmp_path):
    profile.save(tmp_path / "profile.json")
    code, stdout, stderr = run_lowtide("tradeoff", str(tmp_path / "profile.json"))
    assert code == Exit.ERROR and stdout == "" and "--measure 0" in stderr and stderr.count("\n") == 1


def test_a_step_that_does_not_fit_is_not_measured(run_lowtide, profile_file, monkeypatch):
    monkeypatch.setattr(machine, "available_bytes", lambda device: 1 << 20)
    monkeypatch.setattr(measured, "measure_points", lambda *_, **__: pytest.fail("must not run"))
    code, stdout, stderr = run_lowtide("tradeoff", profile_file, "--points", "3")
    assert code == Exit.DONE and "peak against time added" in stdout
    assert "no plan is measured: the step without one needs" in stderr


# sweep


def row(batch_size, **changes):
    step = StepMeasurement(
        predicted_peak_bytes=90, measured_peak_bytes=90, seconds_median=1.0, seconds_spread=0.1
    )
    fields = {"budget_bytes": 100, "baseline": replace(step, measured_peak_bytes=200), "planned": step}
    return SweepRow(**({"batch_size": batch_size, "exact": True} | fields | changes))


TOO_SMALL = {
    "exact": None,
    "status": SweepStatus.TOO_SMALL,
    "why": "lowest 120",
    "planned": StepMeasurement(),
}
FAILED = {
    "exact": None,
    "status": SweepStatus.FAILED,
    "why": "oh",
    "baseline": StepMeasurement(),
    "planned": StepMeasurement(),
    "budget_bytes": None,
}


@pytest.fixture
def made_up_rows(monkeypatch):
    """Sizes 4 and 8 are measured, 16 fails; `asked` has the sizes that were run."""
    asked = []

    def row_of(spec, profile, **options):
        asked.append(spec.batch_size)
        if spec.batch_size == 16:
            raise RuntimeError("too tired")
        return row(spec.batch_size)

    monkeypatch.setattr(sweep_rows, "row_of", row_of)
    return asked


@pytest.mark.long
def test_sweep_writes_after_every_size(run_lowtide, made_up_rows, monkeypatch, tmp_path):
    def interrupted(spec, profile, **options):
        if spec.batch_size == 8:
            raise KeyboardInterrupt
        return row(spec.batch_size)

    monkeypatch.setattr(sweep_rows, "row_of", interrupted)
    arguments = ("sweep", "tiny-bert-base", "--batch-sizes", "4,8", "--budget", "60%", "-o", str(tmp_path))
    code, stdout, _ = run_lowtide(*arguments)
    assert code == Exit.INTERRUPTED and stdout == ""
    found = [(row["batch_size"], row["status"]) for row in rows_of(tmp_path / "sweep.csv")]
    assert found == [("4", "measured"), ("8", "not run yet")]
    data = json.loads((tmp_path / "sweep.json").read_text())
    assert data["finished"] is False and len(data["rows"]) == 1
    assert "Unfinished: batch sizes 8 are missing" in (tmp_path / "report.html").read_text()
    names = {"sweep.csv", "sweep.json", "report.html", "plots"}
    assert {path.name for path in tmp_path.iterdir()} == names


@pytest.mark.long
def test_sweep_goes_on_where_it_was_stopped(run_lowtide, made_up_rows, tmp_path):
    arguments = ["sweep", "tiny-bert-base", "-b", "4,16", "--budget", "60%", "-o", str(tmp_path)]
    assert run_lowtide(*arguments)[0] == 0
    code, _, stderr = run_lowtide(*arguments)
    assert code == Exit.ERROR and "--force" in stderr
    arguments[3] = "4,8,16"
    code, stdout, stderr = run_lowtide(*arguments, "--resume", "--json")
    assert code == 0 and made_up_rows == [4, 16, 8, 16]
    assert "batch 4: taken from before (1 of 3)" in stderr
    statuses = [(found["status"], found["why"]) for found in json.loads(stdout)["rows"]]
    assert statuses == [("measured", ""), ("measured", ""), ("failed", "RuntimeError: too tired")]
    assert rows_of(tmp_path / "sweep.csv")[2]["status"] == "failed: RuntimeError: too tired"
    arguments[5] = "50%"
    code, _, stderr = run_lowtide(*arguments, "--resume")
    assert code == Exit.ERROR and "another target, budget" in stderr


@pytest.mark.long
def test_a_resumed_sweep_stopped_again_loses_nothing(run_lowtide, made_up_rows, monkeypatch, tmp_path):
    arguments = ["sweep", "tiny-bert-base", "-b", "4,32", "--budget", "60%", "-o", str(tmp_path)]
    assert run_lowtide(*arguments)[0] == 0

    def interrupted(spec, profile, **options):
        raise KeyboardInterrupt

    monkeypatch.setattr(sweep_rows, "row_of", interrupted)
    arguments[3] = "4,8,32"
    assert run_lowtide(*arguments, "--resume")[0] == Exit.INTERRUPTED
    assert [found["batch_size"] for found in rows_of(tmp_path / "sweep.csv")] == ["4", "32", "8"]
    arguments[3] = "4"
    assert run_lowtide(*arguments, "--resume")[0] == 0
    assert [found["batch_size"] for found in rows_of(tmp_path / "sweep.csv")] == ["4", "32"]
    assert json.loads((tmp_path / "sweep.json").read_text())["finished"] is True
    assert "Unfinished" not in (tmp_path / "report.html").read_text()


@pytest.mark.long
def test_rows_of_another_version_are_run_again(run_lowtide, made_up_rows, tmp_path):
    arguments = ["sweep", "tiny-bert-base", "-b", "4,8", "--budget", "60%", "-o", str(tmp_path)]
    assert run_lowtide(*arguments)[0] == 0
    data = json.loads((tmp_path / "sweep.json").read_text())
    data["rows"][1]["status"] = "does not fit: lowest reachable peak 1.0 GiB"
    (tmp_path / "sweep.json").write_text(json.dumps(data))
    assert run_lowtide(*arguments, "--resume")[0] == 0 and made_up_rows == [4, 8, 8]


def test_a_target_that_is_not_there_ends_the_sweep_at_once(run_lowtide, made_up_rows):
    code, stdout, stderr = run_lowtide("sweep", "missing.py:make", "-b", "4,8", "--budget", "60%")
    assert code == Exit.ERROR and stdout == "" and stderr == "error: no such file: missing.py\n"
    assert made_up_rows == []


@pytest.mark.long
def test_sweep_tells_people(run_lowtide, made_up_rows, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    code, stdout, _ = run_lowtide("sweep", "tiny-bert-base", "-b", "4,16", "--budget", "60%", "-q")
    assert code == 0 and "−55.0 %" in stdout and "exact" in stdout and "1.00 s" in stdout
    assert "too tired" in " ".join(stdout.split()) and max(map(len, stdout.splitlines())) <= 80


@pytest.mark.parametrize("sizes", ["", "4,x", "0", "4;8"])
def test_batch_sizes_that_cannot_be_read(run_lowtide, sizes):
    code, stdout, stderr = run_lowtide("sweep", "tiny-bert-base", "-b", sizes, "--budget", "60%")
    assert code == Exit.USAGE and stdout == "" and "4,8,16" in stderr and stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("rows", "code"),
    [
        ([row(4), row(8, **TOO_SMALL), row(16, **FAILED)], Exit.DONE),
        ([row(4), row(8, exact=False)], Exit.RESULTS_DIFFER),
        ([row(4, budget_bytes=80)], Exit.DOES_NOT_FIT),
        ([row(4, **TOO_SMALL)], Exit.DOES_NOT_FIT),
        ([row(4, **FAILED)], Exit.ERROR),
    ],
)
def test_how_a_sweep_ends(rows, code):
    assert sweep_exit(rows) == code


# compare


def methods(*last):
    """A comparison of eager, a rival that crashes, and `last`, which is a result or an interruption."""

    def run(spec, profile, **options):
        yield MethodResult(method="none", kind="eager", verdict=Results.EXACT, peak_bytes=200, time_ratio=1.0)
        yield MethodResult(method="rival", kind="partitioner", verdict=Results.CRASHED, why="oh")
        for result in last:
            if isinstance(result, BaseException):
                raise result
            yield result

    return run


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("verdict", "why", "difference", "code"),
    [
        (Results.EXACT, "", "", Exit.DONE),
        (Results.WRONG, "1 of 3 gradients", "gradient of a, step 1", Exit.RESULTS_DIFFER),
    ],
)
def test_compare(run_lowtide, monkeypatch, tmp_path, verdict, why, difference, code):
    ours = MethodResult(
        method="auto", kind="plan", verdict=verdict, why=why, peak_bytes=90, first_difference=difference
    )
    monkeypatch.setattr(compare_methods, "compare", methods(ours))
    found, stdout, stderr = run_lowtide("compare", "tiny-bert-base", "-b", "4", "-o", str(tmp_path))
    words = ours.verdict_text
    assert found == code and "crashed: oh" in stdout and "−55.0 %" in stdout and words in stdout
    assert "rival: crashed: oh" in stderr
    assert [r["verdict"] for r in rows_of(tmp_path / "compare.csv")] == ["exact", "crashed: oh", words]
    data = json.loads((tmp_path / "compare.json").read_text())
    assert [method["kind"] for method in data["methods"]] == ["eager", "partitioner", "plan"]
    assert [(m["verdict"], m["why"]) for m in data["methods"]][1:] == [("crashed", "oh"), (verdict, why)]
    page = (tmp_path / "report.html").read_text()
    assert data["finished"] is True and "crashed: oh" in page and "Unfinished" not in page


@pytest.mark.long
def test_memory_budgets_of_a_comparison(run_lowtide, monkeypatch):
    seen = []

    def run(spec, profile, *, memory_budgets, **others):
        seen.append(memory_budgets)
        yield MethodResult(method="none", kind="eager", verdict=Results.EXACT, peak_bytes=200)

    monkeypatch.setattr(compare_methods, "compare", run)
    arguments = ("compare", "tiny-bert-base", "-b", "4", "--quiet")
    assert run_lowtide(*arguments, "--memory-budgets", "0,0.5")[0] == Exit.DONE
    for wrong in ("half", "2", ""):
        code, _, stderr = run_lowtide(*arguments, "--memory-budgets", wrong)
        assert code == Exit.USAGE and f"cannot read the memory budgets '{wrong}'" in stderr
    assert run_lowtide(*arguments)[0] == Exit.DONE
    assert seen == [(0.5, 0.0), compare_methods.MEMORY_BUDGETS]


def test_planners_side_by_side(run_lowtide, monkeypatch, tmp_path):
    seen = {}

    def run(spec, profile, *, planners, budgets, with_rivals, **others):
        seen.update(planners=planners, budgets=budgets, with_rivals=with_rivals, whole=profile.peak_bytes)
        yield MethodResult(method="none", kind="eager", verdict=Results.EXACT, peak_bytes=200, time_ratio=1.0)
        yield MethodResult(
            method="sqrt ≤ 90 B",
            kind="plan",
            verdict=Results.EXACT,
            peak_bytes=80,
            time_ratio=1.5,
            noise=0.01,
            predicted_bound=0.25,
        )

    monkeypatch.setattr(compare_methods, "compare", run)
    monkeypatch.setattr(machine, "why_busy", lambda: "")
    arguments = ("compare", "tiny-bert-base", "-b", "4", "--planners", "auto, sqrt", "--budget", "80%,70%")
    code, stdout, _ = run_lowtide(*arguments, "-o", str(tmp_path))
    assert code == Exit.DONE and "no plan below" in stdout and "+25.0 %" in stdout
    assert (seen["planners"], seen["with_rivals"]) == (("auto", "sqrt"), False)
    assert seen["budgets"] == [int(seen["whole"] * 0.8), int(seen["whole"] * 0.7)]
    data = json.loads((tmp_path / "compare.json").read_text())
    assert [curve["planner"] for curve in data["planners"]] == ["auto", "sqrt"]
    assert (tmp_path / "plots" / "pareto.svg").exists()
    assert "times the time" not in (tmp_path / "report.html").read_text().partition("80 B with sqrt")[0]


def test_no_time_is_claimed_on_a_busy_machine(run_lowtide, monkeypatch, tmp_path):
    ours = MethodResult(
        method="auto", kind="plan", verdict=Results.EXACT, peak_bytes=90, time_ratio=0.58, noise=0.001
    )
    monkeypatch.setattr(compare_methods, "compare", methods(ours))
    monkeypatch.setattr(machine, "why_busy", lambda: "the machine is busy (load 9.0 on 2 processors)")
    code, stdout, stderr = run_lowtide("compare", "tiny-bert-base", "-b", "4", "-o", str(tmp_path))
    assert code == Exit.DONE and "× 0.58 ± ?" in stdout and "load 9.0" in stderr
    assert "times the time" not in (tmp_path / "report.html").read_text()
    assert json.loads((tmp_path / "compare.json").read_text())["busy"].startswith("the machine is busy")


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("--planners", "auto,mine"), "there is no planner 'mine'"),
        (("--budget", "60%,much"), "cannot read the size"),
    ],
)
def test_planners_and_budgets_are_checked_before_any_work(run_lowtide, monkeypatch, arguments, told):
    monkeypatch.setattr(TargetSpec, "load", lambda _: pytest.fail("must not be loaded"))
    code, _, stderr = run_lowtide("compare", "tiny-bert-base", "-b", "4", *arguments)
    assert code == Exit.USAGE and told in stderr


def test_curves_of_planners(run_lowtide, profile_file, profile, tmp_path):
    arguments = ("tradeoff", profile_file, "--points", "5", "--measure", "0", "--planners", "auto,none")
    code, stdout, stderr = run_lowtide(*arguments, "-o", str(tmp_path))
    assert code == Exit.DONE and "no plan below" in stdout and "planners.csv" in stderr
    data = json.loads((tmp_path / "tradeoff.json").read_text())
    assert [row["budget_bytes"] for row in data["budgets"]][-1] == profile.floor_bytes
    last = data["budgets"][-1]
    assert last["overheads"]["none"] is None and last["bound"] <= last["overheads"]["auto"]
    rows = rows_of(tmp_path / "planners.csv")
    assert {row["planner"] for row in rows} == {"auto", "none"}
    assert (tmp_path / "plots" / "pareto.png").exists()


def test_an_interrupted_comparison_says_so(run_lowtide, monkeypatch, tmp_path):
    monkeypatch.setattr(compare_methods, "compare", methods(KeyboardInterrupt()))
    code, stdout, stderr = run_lowtide("compare", "tiny-bert-base", "-b", "4", "-o", str(tmp_path))
    assert code == Exit.INTERRUPTED and stdout == "" and stderr.endswith("interrupted\n")
    assert {path.name for path in tmp_path.iterdir()} == {"compare.csv", "compare.json", "report.html"}
    assert json.loads((tmp_path / "compare.json").read_text())["finished"] is False
    assert rows_of(tmp_path / "compare.csv")[-1]["verdict"] == "not run yet"
    assert "Unfinished: more methods were to follow" in (tmp_path / "report.html").read_text()


# the shell, and what to type next


def test_completion(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("")
    (tmp_path / "transformers").mkdir()
    (tmp_path / "profile.json").write_text("")
    assert completion.targets("tiny-b") == ["tiny-bert-base", "tiny-bert-base-mlm"]
    assert completion.targets("tra") == ["transformer", "train.py:", "transformers/"]
    assert completion.sources("prof") == ["profile.json"] and completion.targets("prof") == []
    assert completion.planners("m") == ["mu-two"] and completion.optimizers("adamw") == ["adamw"]
    assert completion.targets("nowhere/x") == []


def test_the_shell_is_answered():
    environment = {"_LOWTIDE_COMPLETE": "complete_bash", "COMP_WORDS": "lowtide sw", "COMP_CWORD": "1"}
    command = [
        sys.executable,
        "-c",
        "from lowtide.cli import main; import sys; sys.argv = ['lowtide']; main()",
    ]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.stdout.strip() == "sweep"


def test_next_commands_can_be_copied(tmp_path):
    lines = after_run(tmp_path / "my out", floor_bytes=123)
    assert f"lowtide plan '{tmp_path}/my out/profile.json' --budget 123" in lines[0]
    assert all(word in " ".join(lines) for word in ("tradeoff", "verify", "load_plan"))
    assert "with executor 'eager'" in after_run(tmp_path, floor_bytes=123, executor="inductor")[0]
