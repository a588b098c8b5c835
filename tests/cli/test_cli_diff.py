"""`lowtide diff`: two runs from their files."""

import json
import subprocess
import sys

import pytest
from report_cases import make_case

from lowtide.cli.exit_codes import Exit
from lowtide.cli.output_files import save_plan, save_profile
from lowtide.profiles import Profile
from lowtide.zoo.targets import TargetSpec

SPEC = TargetSpec(text="tiny-resnet152", batch_size=4)


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Two folders with plans of one profile for 90 % and for 60 % of its peak."""
    profile = Profile(make_case().step)
    found = []
    for budget in ("90%", "60%"):
        folder = tmp_path_factory.mktemp("run")
        save_profile(folder / "profile.json", profile, SPEC)
        save_plan(folder / "plan.json", profile.plan(budget), SPEC)
        found.append(folder)
    return found


def verified(folder, *, predicted):
    timing = {"runs": [1.0, 2.0, 3.0]}
    data = {
        "predicted_peak_bytes": predicted, "measured_peak_bytes": predicted,
        "baseline_measured_peak_bytes": 9, "step_timing": timing, "baseline_step_timing": timing,
        "noise": 0.1, "exact": True,
    }  # fmt: skip
    (folder / "verification.json").write_text(json.dumps(data))


def test_two_folders_as_a_table_and_as_data(run_lowtide, runs):
    code, stdout, stderr = run_lowtide("diff", *map(str, runs))
    assert code == 0 and stderr == ""
    for words in ("B peaks ", "tiny-resnet152, batch 4: A ", "floor", "What changes, by module", "kept → "):
        assert words in stdout
    code, stdout, _ = run_lowtide("diff", *map(str, runs), "--json")
    data = json.loads(stdout)
    assert code == 0 and data["a"]["budget_bytes"] > data["b"]["budget_bytes"] >= data["b"]["peak_bytes"]
    assert data["a"]["floor_bytes"] == data["b"]["floor_bytes"] and data["a"]["measured_peak_bytes"] is None
    assert any(change["was"] == "kept" for change in data["changes"])


def test_a_page_in_a_folder_as_other_commands_write_it(run_lowtide, runs, tmp_path):
    for folder in (tmp_path, tmp_path / "new"):
        code, _, stderr = run_lowtide("diff", *map(str, runs), "-o", str(folder))
        assert code == 0 and str(folder / "diff.html") in stderr and (folder / "diff.html").is_file()


def test_files_and_measurements_are_found_beside_each_other(run_lowtide, runs, tmp_path):
    plan = json.loads((runs[0] / "plan.json").read_text())
    for name in ("plan.json", "profile.json"):
        (tmp_path / name).write_bytes((runs[0] / name).read_bytes())
    verified(tmp_path, predicted=plan["peak_bytes"])
    code, stdout, _ = run_lowtide("diff", str(tmp_path), str(runs[1] / "plan.json"), "--json")
    found = json.loads(stdout)["a"]
    assert code == 0 and found["measured_peak_bytes"] == plan["peak_bytes"]
    assert found["measured_seconds"] == 2.0 and found["exact"] is True
    verified(tmp_path, predicted=1)
    _, stdout, stderr = run_lowtide("diff", str(tmp_path), str(runs[1] / "profile.json"), "--json")
    assert json.loads(stdout)["a"]["measured_peak_bytes"] is None and "is of another plan: left out" in stderr
    assert json.loads(stdout)["b"]["budget_bytes"] is None
    (tmp_path / "verification.json").write_text("{}")
    code, _, stderr = run_lowtide("diff", str(tmp_path), str(tmp_path))
    assert code == Exit.ERROR and "is no verification" in stderr and stderr.count("\n") == 1


def test_the_page_is_written_once(run_lowtide, runs, tmp_path):
    page = tmp_path / "diff.html"
    code, _, stderr = run_lowtide("diff", *map(str, runs), "-o", str(page))
    assert code == 0 and f"wrote {page}" in stderr
    assert "two runs side by side" in page.read_text() and len(page.read_bytes()) < 300_000
    code, _, stderr = run_lowtide("diff", *map(str, runs), "-o", str(page))
    assert code == Exit.ERROR and "say --force" in stderr


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "there is no plan.json and no profile.json in"),
        ('{"target": "x"}', "is no run to compare: name an output folder of `lowtide run`"),
        ("not json", "cannot read"),
    ],
)
def test_what_is_no_run_is_refused_in_one_line(run_lowtide, runs, tmp_path, content, message):
    path = tmp_path
    if content is not None:
        path = tmp_path / "other.json"
        path.write_text(content)
    code, stdout, stderr = run_lowtide("diff", str(runs[0]), str(path))
    assert code == Exit.ERROR and stdout == "" and message in stderr and stderr.count("\n") == 1


def test_no_torch_is_needed(runs):
    script = (
        "import sys; sys.argv = ['lowtide', 'diff', *sys.argv[1:]]\n"
        "from lowtide.cli.app import main\n"
        "try: main()\n"
        "finally: assert 'torch' not in sys.modules"
    )
    words = [sys.executable, "-c", script, *map(str, runs), "-o", str(runs[0] / "page.html")]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
