"""`lowtide plan`: from a profile.json to a plan.json, without torch."""

import csv
import json

import pytest
from offloadable import with_offload
from report_cases import make_case

from lowtide.cli.exit_codes import Exit
from lowtide.cli.output_files import load_plan, load_profile, save_profile
from lowtide.cli.tables import NUM_LARGEST, profile_summary, profile_tables
from lowtide.cli.terminal import Terminal, table
from lowtide.errors import LowtideError
from lowtide.facts import TransferSpeed
from lowtide.planning.activations import activations
from lowtide.planning.simulate import baseline_runs, simulate
from lowtide.profiles import Profile
from lowtide.zoo.targets import TargetSpec

SPEC = TargetSpec(text="tiny-resnet152", batch_size=4, image_size=64, optimizer="adam:fused", seed=3)


@pytest.fixture(scope="module")
def step():
    return make_case().step


@pytest.fixture
def profile(step, tmp_path):
    path = tmp_path / "profile.json"
    save_profile(path, Profile(step), SPEC)
    return path


def test_profiles_keep_their_target(profile, step):
    loaded, spec = load_profile(profile)
    assert (loaded.step, spec) == (step, SPEC)


def test_a_target_that_cannot_be_read(profile):
    data = json.loads(profile.read_text())
    profile.write_text(json.dumps(data | {"target": {"unknown": 1}}))
    with pytest.raises(LowtideError, match="names a target that cannot be read"):
        load_profile(profile)


def test_plan_writes_its_files_and_says_so(run_lowtide, profile, step, tmp_path):
    out = tmp_path / "out"
    code, stdout, stderr = run_lowtide("plan", str(profile), "--budget", "60%", "-o", str(out))
    assert code == 0 and "predicted peak" in stdout and str(out / "plan.json") in stderr
    plan, spec = load_plan(out / "plan.json")
    solution = plan.solution
    assert spec == SPEC
    peak_bytes = simulate(step, baseline_runs(step)).peak_bytes
    assert solution.budget_bytes == int(peak_bytes * 0.6)
    assert simulate(step, solution.schedule.runs).peak_bytes == solution.peak_bytes <= solution.budget_bytes
    with (out / "ac_decisions.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == len(activations(step))
    assert {row["decision"] for row in rows} == {"RECOMPUTE", "RETAINED"}
    assert sorted(path.name for path in out.iterdir()) == ["ac_decisions.csv", "plan.json"]


def test_plan_as_json_is_all_of_stdout(run_lowtide, profile):
    code, stdout, stderr = run_lowtide("plan", str(profile), "--budget", "70%", "--json", "-q")
    data = json.loads(stdout)
    assert code == 0 and stderr == ""
    assert data["peak_bytes"] <= data["budget_bytes"] < data["baseline_peak_bytes"]
    assert data["num_recomputed"] == sum(d["action"] == "RECOMPUTE" for d in data["decisions"]) > 0


def test_a_planner_that_does_not_search_shows_no_floor(run_lowtide, profile, tmp_path):
    arguments = ("plan", str(profile), "--budget", "100%", "--planner", "none")
    code, stdout, _ = run_lowtide(*arguments, "-o", str(tmp_path))
    assert code == 0 and "predicted peak" in stdout and "lowest reachable" not in stdout
    assert load_plan(tmp_path / "plan.json")[0].solution.floor_bytes is None
    assert json.loads(run_lowtide(*arguments, "--json")[1])["floor_bytes"] is None


def test_files_are_not_replaced_unless_forced(run_lowtide, profile, tmp_path):
    (tmp_path / "plan.json").write_text("precious")
    arguments = ("plan", str(profile), "--budget", "60%", "-o", str(tmp_path))
    code, stdout, stderr = run_lowtide(*arguments)
    assert code == Exit.ERROR and stdout == "" and "--force" in stderr
    assert (tmp_path / "plan.json").read_text() == "precious"
    assert run_lowtide(*arguments, "--force")[0] == 0
    assert load_plan(tmp_path / "plan.json")[1] == SPEC


def test_does_not_fit(run_lowtide, profile, step, tmp_path):
    out = tmp_path / "out"
    code, stdout, stderr = run_lowtide("plan", str(profile), "--budget", "1KiB", "-o", str(out))
    assert code == Exit.DOES_NOT_FIT and stdout == ""
    error, command = stderr.splitlines()
    assert str(Profile(step).floor_bytes) in error
    assert command.startswith("next: lowtide plan tiny-resnet152 -b 4") and "--budget 1KiB" in command
    assert list(out.iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (("--budget", "10 apples"), Exit.USAGE, "cannot read the size"),
        ((), Exit.USAGE, "Missing option '--budget'"),
        (("--budget", "60%", "--planner", "best"), Exit.USAGE, "no planner 'best'"),
    ],
)
def test_wrong_options(run_lowtide, profile, arguments, code, message):
    found, stdout, stderr = run_lowtide("plan", str(profile), *arguments)
    assert found == code and stdout == "" and message in stderr and stderr.count("\n") == 1


def test_no_such_profile(run_lowtide, tmp_path):
    code, _, stderr = run_lowtide("plan", str(tmp_path / "none.json"), "--budget", "60%")
    assert code == Exit.ERROR and "there is no file" in stderr


def test_the_profile_summary_adds_up(step):
    summary = profile_summary(Profile(step), name="x")
    json.dumps(summary)
    assert sum(summary["peak_bytes_by_kind"].values()) == summary["peak_bytes"]
    assert sum(summary["seconds_by_region"].values()) == pytest.approx(summary["step_seconds"])
    sizes = [activation["nbytes"] for activation in summary["largest_activations"]]
    assert len(sizes) == NUM_LARGEST
    assert sizes == sorted((a.nbytes for a in activations(step)), reverse=True)[:NUM_LARGEST]


def test_the_profile_tables_show_what_a_user_asks_for(step, capsys):
    summary = profile_summary(Profile(step), name="tiny")
    Terminal().show(*profile_tables(summary))
    out = capsys.readouterr().out
    assert summary["peak"]["node"] in out and summary["peak"]["module"] in out
    for text in ("tiny: peak", "Memory at the peak", "Time by region", "forward", "Largest activations"):
        assert text in out
    assert all(activation["name"] in out for activation in summary["largest_activations"])


def test_a_table_without_names_has_no_head():
    assert not table("T", ("", ">"), [("a", 1)]).show_header
    assert table("T", ("a", ">"), [("a", 1)]).show_header


FAST = TransferSpeed(store="disk:/scratch", write_bytes_per_second=1e15, read_bytes_per_second=1e15)


def test_a_plan_tells_what_leaves_for_a_store(run_lowtide, step, tmp_path):
    path, out = tmp_path / "profile.json", tmp_path / "out"
    save_profile(path, Profile(with_offload(step, FAST)), SPEC)
    code, stdout, _ = run_lowtide("plan", str(path), "--budget", "60%", "-o", str(out))
    assert code == 0 and "to disk:/scratch" in stdout and "activations that are offloaded" in stdout
    code, stdout, _ = run_lowtide("plan", str(path), "--budget", "60%", "--json")
    found = json.loads(stdout)
    assert found["num_offloaded"] > 0 and found["offload"]["link"]["store"] == "disk:/scratch"
    with (out / "ac_decisions.csv").open() as file:
        decisions = [row["decision"] for row in csv.DictReader(file)]
    assert decisions.count("OFFLOAD") == found["num_offloaded"]


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("tiny-gpt2", "-b", "2", "--offload", "ram"), "cannot offload to 'ram'"),
        (("tiny-gpt2", "-b", "2", "--swap", "ram"), "cannot offload to 'ram'"),
        (("{profile}", "--offload", "disk:/tmp"), "--offload is for a TARGET"),
        (("{profile}", "--swap", "disk:/tmp"), "--swap is for a TARGET"),
        (("tiny-gpt2", "-b", "2", "--swap", "disk:/dev/null/in"), "'/dev/null/in' to offload to"),
        (
            ("tiny-gpt2", "-b", "2", "--swap", "disk:/a", "--offload", "disk:/b"),
            "--offload disk:/b and --swap disk:/a differ",
        ),
    ],
)
def test_a_store_that_cannot_be_is_refused(run_lowtide, profile, arguments, told):
    given = [str(profile) if argument == "{profile}" else argument for argument in arguments]
    code, _, stderr = run_lowtide("plan", *given, "--budget", "60%")
    assert code in (Exit.ERROR, Exit.USAGE) and told in " ".join(stderr.split())


def test_the_budget_auto_is_what_is_free_and_says_so(run_lowtide, profile, monkeypatch):
    monkeypatch.setattr("lowtide.facts.auto_budget.host_bytes", lambda: 20 << 30)
    code, stdout, _ = run_lowtide("plan", str(profile), "--budget", "auto")
    line = "budget auto: 18.0 GiB = 20.0 GiB free on cpu - 2.0 GiB reserve"
    assert code == 0 and line in " ".join(stdout.split())
    _, stdout, _ = run_lowtide("plan", str(profile), "--budget", "AUTO", "--json")
    assert json.loads(stdout)["budget_bytes"] == 18 << 30 and line in stdout
