"""`lowtide plan --pipeline`: the stages of a pipeline that does not run."""

import json

import pytest

from lowtide.cli.exit_codes import Exit

PIPELINE = ("--pipeline", "3", "--microbatches", "4", "--budget", "1GiB")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("tiny-gpt2", "-b", "8", "--budget", "1GiB", "--pipeline", "0"), "'0' is no number of stages"),
        (("tiny-gpt2", "-b", "8", "--budget", "1GiB", "--pipeline", "1"), "2 stages or more"),
        (("tiny-gpt2", "-b", "8", "--budget", "1GiB", "--pipeline", "3"), "--microbatches N, as in 6"),
        (("tiny-gpt2", "-b", "8", "--budget", "1GiB", "--microbatches", "4"), "Say --pipeline N"),
        (("tiny-gpt2", "-b", "8", "--pipeline", "3", "--microbatches", "4"), "Missing option '--budget'"),
        (("tiny-gpt2", *PIPELINE), "--batch-size N, as in -b 4"),
        (("tiny-gpt2", "-b", "10", *PIPELINE), "such as -b 8"),
        (("tiny-gpt2", "-b", "8", *PIPELINE, "--ranks", "2"), "--ranks is not planned for a pipeline"),
        (("tiny-gpt2", "-b", "8", *PIPELINE, "--planner", "none"), "--planner is not planned"),
        (("profile.json", *PIPELINE), "give a TARGET instead"),
    ],
)
def test_wrong_options_are_one_line_that_says_what_to_type(run_lowtide, arguments, message):
    code, stdout, stderr = run_lowtide("plan", *arguments)
    assert code == Exit.USAGE and stdout == ""
    assert message in stderr and stderr.count("\n") == 1


@pytest.mark.slow
def test_a_model_without_so_many_equal_blocks_is_refused(run_lowtide):
    code, _, stderr = run_lowtide("plan", "tiny-gpt2", "-b", "8", *PIPELINE[2:], "--pipeline", "4")
    assert code == Exit.ERROR and "its longest list of equal blocks has 3" in stderr


@pytest.mark.long
@pytest.mark.slow
def test_each_stage_has_what_is_in_flight_and_fits_or_not(run_lowtide):
    code, stdout, _ = run_lowtide("plan", "tiny-gpt2", "-b", "8", *PIPELINE, "--json")
    found = json.loads(stdout)["stages"]
    assert code == Exit.DONE and [stage["in_flight"] for stage in found] == [3, 2, 1]
    assert [stage["blocks"][0] for stage in found] == [f"transformer.h.{index}" for index in range(3)]
    assert all(stage["floor_bytes"] <= stage["peak_bytes"] for stage in found)
    least = min(stage["floor_bytes"] for stage in found)
    code, stdout, _ = run_lowtide("plan", "tiny-gpt2", "-b", "8", *PIPELINE[:4], "--budget", f"{least}B")
    assert code == Exit.DOES_NOT_FIT and stdout.count("does not fit") == 2
