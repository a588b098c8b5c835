"""bench/results.py: pieces are run once, and the page tells what is there and what is missing."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from report_cases import make_case

sys.path.insert(0, str(Path(__file__).parents[2] / "bench"))
import results
import results_page
from lowtide.cli.tables import profile_summary
from lowtide.profiles import Profile

STEP = {
    "predicted_peak_bytes": 101 << 20,
    "measured_peak_bytes": 100 << 20,
    "seconds_median": 1.0,
    "seconds_spread": 0.1,
}
ROW = {
    "batch_size": 4,
    "budget_bytes": 100 << 20,
    "baseline": STEP | {"measured_peak_bytes": 200 << 20, "predicted_peak_bytes": 200 << 20},
    "planned": STEP,
    "reduction": 0.5,
    "overhead": 0.25,
    "predicted_overhead": 0.2,
    "exact": True,
    "status": "measured",
    "why": "",
}
METHOD = {
    "method": "auto",
    "kind": "eager",
    "peak_bytes": 90 << 20,
    "time_ratio": 1.25,
    "verdict": "wrong",
    "why": "a|b",
}


FIT = {
    "largest_plain": 8,
    "largest": 20,
    "no_plan_above": 24,
    "multiple_of": 1,
    "fastest": 8,
    "rows": [{"size": 8, "per_second": 10.0}, {"size": 20, "per_second": 9.0}],
    "checks": [
        {"planned": False, "measured_peak_bytes": 9 << 20, "exact": None},
        {"planned": True, "measured_peak_bytes": 8 << 20, "exact": True},
    ],
}


@pytest.fixture
def answers():
    return {
        "profile": profile_summary(Profile(make_case().step), name="tiny, batch 8"),
        "sweep": {"settings": {"budget": "75%"}, "rows": [ROW]},
        "fit": [FIT] * 3,
        "compare": {"target": "tiny, batch 8", "methods": [METHOD]},
    }


@pytest.fixture
def run(monkeypatch, tmp_path, answers):
    """Run the script with made-up commands; gives exit code, page and the commands that ran."""

    def run_script(*arguments, exit_code=0):
        ran, own_run = [], subprocess.run

        def command(words, **options):
            if words[0] != sys.executable:  # matplotlib asks for fonts the first time
                return own_run(words, **options)
            ran.append(words[3:])
            return subprocess.CompletedProcess(words, exit_code, stdout=json.dumps(answers[words[3]]))

        monkeypatch.setattr(results.subprocess, "run", command)
        page = tmp_path / "page.md"
        folder = ["--folder", str(tmp_path / "pieces"), "-o", str(page)]
        monkeypatch.setattr(sys, "argv", ["results.py", *arguments, *folder])
        with pytest.raises(SystemExit) as caught:
            results.main()
        return caught.value.code, page.read_text() if page.exists() else "", ran

    return run_script


def test_all_pieces_of_all_models(run):
    code, page, ran = run()
    assert code == 0 and len(ran) == 13 and "**not run**" not in page
    assert ran[2][:6] == ["sweep", "resnet152", "--budget", "70%", "-b", "4,8,16,32,64"]
    assert "--resume" in ran[2] and ran[1][:4] == ["fit", "resnet152", "--budget", "1.5GB,2GB,4GB"]
    assert ran[-1][:6] == ["compare", "gpt2", "-b", "4", "--executor", "inductor"]
    for text in ("## resnet152", "## bert-base", "## transformer", "| +1.00 % |", "wrong: a/b", "ResNet-152"):
        assert text in page
    assert "| 4 | 100.0 MiB | 200.0 MiB | 100.0 MiB | −50.0 % |" in page


def test_how_much_larger_a_batch_may_be(run, answers):
    page = run("--only", "bert-base-fit")[1]
    assert "| bert-base | 2GB | 8 | 20 | × 2.50 | 25 | ~10 | ~9 | −10.0 % | 8 | 8.0 MiB, exact |" in page
    nothing = {
        "largest_plain": 0,
        "largest": 0,
        "no_plan_above": None,
        "fastest": None,
        "rows": [],
        "checks": [],
    }
    answers["fit"] = [FIT | nothing, FIT, FIT]
    page = run("--only", "bert-base-fit", "--no-check")[1]
    assert "| bert-base | 1.5GB | none | none | – | – | – | – | – | – | – |" in page
    assert "fit bert-base --budget 1.5GB,2GB,4GB --no-check" in page


def test_pictures_stand_beside_the_page_that_shows_them(run, tmp_path):
    _, page, _ = run("--only", "bert-base")
    names = ("peak_by_batch_size", "latency_by_batch_size", "methods")
    assert [f"(page/bert-base/{name}.png)" in page for name in names] == [True] * 3
    assert {path.stem for path in (tmp_path / "page" / "bert-base").iterdir()} == set(names)


def test_what_is_there_is_not_run_again(run):
    first = run("--only", "bert-base-profile", "bert-base-compare")
    assert [words[0] for words in first[2]] == ["profile", "compare"] and "**not run**" in first[1]
    again = run("--only", "bert-base")
    assert again[0] == 0 and [words[0] for words in again[2]] == ["fit", "sweep"]
    assert run("--page")[2] == []


def test_a_piece_of_another_command_counts_as_missing(run):
    run("--only", "bert-base-sweep", "--timed-runs", "3")
    code, page, ran = run("--only", "bert-base-profile", "--timed-runs", "5")
    assert code == 0 and len(ran) == 1 and page.count("**not run**") == 12
    assert len(run("--only", "bert-base-sweep", "--timed-runs", "5")[2]) == 1


def test_a_failed_piece_is_told_and_tried_again(run):
    code, page, _ = run("--only", "bert-base-profile", exit_code=1)
    assert code == 1 and "**not run**" in page
    assert len(run("--only", "bert-base-profile", exit_code=4)[2]) == 1


def test_a_piece_that_does_not_exist(run, capsys):
    assert run("--only", "gpt5")[0] == 2 and "resnet152-sweep" in capsys.readouterr().err


def test_published_figures_have_their_reductions():
    text = "\n".join(results_page._published())
    assert "| ResNet-152 | second | 16 | 3464 MiB | 2324 MiB | −32.9 % | +23.3 % |" in text
    assert "| Transformer | second | 256 | 15272 MiB | 9893 MiB | −35.2 % | – |" in text
