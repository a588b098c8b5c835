"""`lowtide plan --search`: meshes of GPUs that are not here."""

import json

import pytest

from lowtide.cli.exit_codes import Exit

SEARCH = ("--gpus", "8", "--device", "h100-80g", "--search")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("gpt-125m", "--search"), "--gpus N, as in --gpus 64"),
        (("gpt-125m", "--search", "--gpus", "0"), "'0' is no number of GPUs"),
        (("gpt-125m", "--search", "--gpus", "many"), "'many' is no number of GPUs"),
        (("gpt-125m", "--search", "--gpus", "8"), "Say --device NAME, one of a100-40g"),
        (("gpt-125m", "--search", "--gpus", "8", "--device", "h900"), "no GPU called 'h900'"),
        (("gpt-125m", *SEARCH), "--batch-size N, as in -b 32"),
        (("gpt-125m", "-b", "8", *SEARCH, "--ranks", "4"), "--ranks is for one plan"),
        (("gpt-125m", "-b", "8", *SEARCH, "--planner", "none"), "--planner is for one plan"),
        (("gpt-125m", "-b", "8", *SEARCH, "-o", "out"), "--output is for one plan"),
        (("gpt-125m", "-b", "8", *SEARCH, "--budget", "60%"), "'60%' is a share"),
        (("gpt-125m", "-b", "8", *SEARCH, "--optimizer", "sgd"), "--optimizer sgd"),
        (("profile.json", *SEARCH, "-b", "8"), "give a TARGET instead"),
        (("gpt-125m", "-b", "8", "--gpus", "8", "--budget", "1GiB"), "is a model of --search alone"),
        (("tiny-gpt2", "-b", "8", "--gpus", "8", "--budget", "1GiB"), "--gpus 8 is for --search"),
    ],
)
def test_wrong_options_are_one_line_that_says_what_to_type(run_lowtide, arguments, message):
    code, stdout, stderr = run_lowtide("plan", *arguments)
    assert code == Exit.USAGE and stdout == ""
    assert message in stderr and stderr.count("\n") == 1


def test_an_unknown_model_names_those_that_can_be_searched(run_lowtide):
    code, _, stderr = run_lowtide("plan", "llama3-9b", "-b", "8", *SEARCH)
    assert code == Exit.ERROR and "llama3-8b" in stderr


def test_a_batch_that_cannot_be_divided_is_refused_with_one_that_can(run_lowtide):
    code, _, stderr = run_lowtide("plan", "tiny-gpt2", "-b", "12", *SEARCH)
    assert code == Exit.ERROR and "such as -b 16" in stderr


@pytest.mark.long
@pytest.mark.slow
def test_any_target_is_searched_along_samples_and_parameters(run_lowtide):
    code, stdout, _ = run_lowtide("plan", "tiny-gpt2", "-b", "8", *SEARCH, "--json")
    found = json.loads(stdout)
    assert code == Exit.DONE and found["estimated"] and found["device"] == "h100-80g (estimated)"
    (row,) = found["rows"]
    assert row["fits"] and row["label"] == "dp 8" and row["samples_per_second"] > 0


@pytest.mark.slow
def test_a_decoder_is_searched_and_shown_in_80_columns(run_lowtide, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    options = ("--sequence-length", "256", "-b", "2", "--gpus", "2", "--device", "h100-80g", "--search")
    code, stdout, _ = run_lowtide("plan", "gpt-125m", *options)
    assert code == Exit.DONE and "tokens/s" in stdout and "all estimated" in stdout
    assert "dp 2" in stdout and "dp 1 tp 2" in stdout and max(map(len, stdout.splitlines())) <= 80


@pytest.mark.slow
def test_where_nothing_fits_every_mesh_says_why(run_lowtide):
    code, stdout, _ = run_lowtide("plan", "llama3-405b", "-b", "8", *SEARCH)
    assert code == Exit.DOES_NOT_FIT
    assert "no mesh fits" in stdout and "parameters and optimizer state" in stdout
