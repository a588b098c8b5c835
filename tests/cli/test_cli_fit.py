"""`lowtide fit`: tables, data and exit codes; what it finds is made up."""

import json
from dataclasses import replace

import pytest

from lowtide.cli.exit_codes import Exit
from lowtide.experiments import fit
from lowtide.experiments.fit import Check, Fit, FitRow


def row(size, *, recompute=0.0, profiled=True):
    return FitRow(
        size=size,
        plain_peak_bytes=size << 30,
        peak_bytes=min(size, 8) << 30,
        step_seconds=size / 10,
        recompute_seconds=recompute,
        per_second=size / (size / 10 + recompute),
        profiled=profiled,
    )


PLAIN = Check(size=9, planned=False, predicted_peak_bytes=9 << 30, measured_peak_bytes=9 << 30)
PLANNED = Check(size=20, planned=True, predicted_peak_bytes=8 << 30, measured_peak_bytes=8 << 30, exact=True)
FOUND = Fit(
    budget_bytes=8 << 30,
    vary="batch size",
    unit="samples",
    multiple_of=1,
    most=1 << 20,
    largest_plain=8,
    largest=20,
    lowest_bytes=1 << 30,
    no_plan_above=23,
    rows=(row(8), row(14, recompute=0.1, profiled=False), row(20, recompute=0.4)),
    checks=(PLAIN, PLANNED),
)


@pytest.fixture
def finds(monkeypatch):
    """Let `lowtide fit` find something; the options that it asked with are returned."""
    asked = {}

    def let(*found):
        def find_fits(source, **options):
            asked.update(options, source=source)
            return list(found)

        monkeypatch.setattr(fit, "find_fits", find_fits)
        return asked

    return let


def test_the_answer_is_told_in_eighty_columns(run_lowtide, finds):
    asked = finds(FOUND)
    code, stdout, stderr = run_lowtide("fit", "bert-base-mlm", "--budget", "8GiB", "-q")
    assert code == Exit.DONE and stderr == ""
    table = [line.rstrip() for line in stdout.splitlines() if "GiB" in line and ":" not in line][1:]
    assert len(table) == 3 and max(map(len, table)) <= 80
    assert "~14" in table[1] and "+20.0 %" in table[2]
    assert "largest batch size without a plan: 8 (10 samples/s)\n" in stdout
    assert "largest batch size with a plan: 20, 2.5 times as large (8.33 samples/s, −16.7 %)\n" in stdout
    assert "no plan exists from 24 on; between, no plan was found and none is ruled out\n" in stdout
    assert "fastest: 8 (10 samples/s)\n" in stdout
    said = " ".join(stdout.split())
    assert "batch size 9 without a plan: measured 9.00 GiB" in said and "above the budget" in said
    assert "within the budget, results exact" in said
    assert asked["source"](7).batch_size == 7 and asked["check"] is True


def test_a_size_that_fits_against_all_prediction_is_said_to(run_lowtide, finds):
    finds(replace(FOUND, checks=(replace(PLAIN, measured_peak_bytes=8 << 30),)))
    code, stdout, _ = run_lowtide("fit", "bert-base", "--budget", "8GiB", "-q")
    assert code == Exit.DONE and "within the budget after all" in " ".join(stdout.split())


def test_data_for_programs(run_lowtide, finds):
    asked = finds(FOUND)
    code, stdout, _ = run_lowtide("fit", "bert-base", "--budget", "8GiB", "--no-check", "--json")
    data = json.loads(stdout)
    assert code == 0 and asked["check"] is False
    assert (data["largest_plain"], data["largest"], data["fastest"]) == (8, 20, 8) and len(data["rows"]) == 3


def test_several_budgets_are_asked_at_once(run_lowtide, finds):
    none = replace(FOUND, budget_bytes=1 << 20, largest_plain=0, largest=0, rows=(), checks=())
    asked = finds(none, FOUND)
    code, stdout, _ = run_lowtide("fit", "bert-base", "--budget", "1MiB,8GiB", "--json")
    assert code == Exit.DOES_NOT_FIT and asked["budgets"] == ["1MiB", "8GiB"]
    assert [found["largest"] for found in json.loads(stdout)] == [0, 20]
    code, stdout, _ = run_lowtide("fit", "bert-base", "--budget", "1MiB,8GiB")
    assert "fits into 1.0 MiB" in stdout and "with a plan: 20" in stdout


@pytest.mark.parametrize(
    ("vary", "amount"), [("sequence-length", 4 * 64), ("image-size", 4 * 64**2), ("batch-size", 64)]
)
def test_what_grows(run_lowtide, finds, vary, amount):
    asked = finds(FOUND)
    given = () if vary == "batch-size" else ("-b", "4")
    assert run_lowtide("fit", "bert-base", "--budget", "8GiB", "--vary", vary, *given)[0] == 0
    assert getattr(asked["source"](64), vary.replace("-", "_")) == 64
    assert asked["vary"].amount(64) == amount and asked["vary"].name == vary.replace("-", " ")


@pytest.mark.parametrize(
    ("found", "code"),
    [
        (replace(FOUND, checks=()), Exit.DONE),
        (replace(FOUND, checks=(replace(PLANNED, exact=False, differences=("loss",)),)), Exit.RESULTS_DIFFER),
        (replace(FOUND, checks=(replace(PLANNED, measured_peak_bytes=9 << 30),)), Exit.DOES_NOT_FIT),
        (replace(FOUND, checks=(replace(PLANNED, measured_peak_bytes=None, reason="needs 9"),)), Exit.DONE),
        (replace(FOUND, largest_plain=0, largest=0, rows=(), checks=()), Exit.DOES_NOT_FIT),
    ],
)
def test_how_it_ends(run_lowtide, finds, found, code):
    finds(found)
    ended, stdout, _ = run_lowtide("fit", "bert-base", "--budget", "8GiB")
    assert ended == code and stdout


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--budget", "60%"), "8GiB"),
        (("--budget", "2GB,60%"), "8GiB"),
        (("--budget", "2GB,"), "cannot read the size"),
        (("--budget", "8GiB", "-b", "4"), "--batch-size 4 is what grows"),
        (("--budget", "8GiB", "--vary", "image-size"), "Say --batch-size N"),
        (("--budget", "8GiB", "--vary", "colour"), "colour"),
    ],
)
def test_what_makes_no_sense(run_lowtide, finds, arguments, words):
    finds(FOUND)
    code, stdout, stderr = run_lowtide("fit", "bert-base", *arguments)
    assert code == Exit.USAGE and stdout == "" and words in stderr and stderr.count("\n") == 1
