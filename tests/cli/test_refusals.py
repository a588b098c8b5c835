"""The commands after a refused budget, and lines that no terminal breaks."""

import io
import shlex

import pytest
from rich.console import Console

from lowtide.cli.refusals import again, lever_to_type, target_command
from lowtide.cli.terminal import Terminal
from lowtide.errors import BudgetTooSmall
from lowtide.facts.levers import Lever
from lowtide.folding import folded
from lowtide.zoo.targets import TargetSpec


def lever(floor_bytes, *options, is_estimate=False):
    keywords = tuple("abc"[: len(options)])
    return Lever(keywords=keywords, options=options, floor_bytes=floor_bytes, is_estimate=is_estimate)


def refused(*levers):
    error = BudgetTooSmall(budget_bytes=100, floor_bytes=200, node="mm")
    error.name_levers(levers, [])
    return error


def test_the_lever_to_type_fits_with_the_fewest_changes():
    both, one, guess = lever(50, "--a", "--b"), lever(90, "--a"), lever(40, "--c", is_estimate=True)
    assert lever_to_type(refused(guess, both, one)) is one
    assert lever_to_type(refused(guess)) is guess


def test_where_none_fits_it_is_the_lowest_that_was_searched_for():
    high, low, guess = lever(180, "--a"), lever(150, "--b"), lever(120, "--c", is_estimate=True)
    assert lever_to_type(refused(guess, low, high)) is low


def test_a_lever_that_the_command_lacks_is_not_typed():
    assert lever_to_type(refused(lever(50, ""), lever(60, "--a", ""), lever(70, "half the batch"))) is None


@pytest.mark.parametrize("budget", [["--budget", "50%"], ["--budget=50%"]])
def test_the_same_command_with_another_budget(budget):
    argv = ["/bin/lowtide", "run", "x.py:make", "-b", "4", *budget, "-o", "my out"]
    words = shlex.split(again(argv, ["--offload disk:my out/store"], budget="9MiB", force=True))
    assert words == [
        *("lowtide", "run", "x.py:make", "-b", "4", "--budget", "9MiB", "-o", "my out"),
        *("--offload", "disk:my out/store", "--force"),
    ]


def test_the_budget_stays_where_the_lever_meets_it():
    assert again(["x", "plan", "t", "--budget", "50%"], ["--a"]) == "lowtide plan t --budget 50% --a"


def test_the_target_of_a_profile_is_planned_anew():
    spec = TargetSpec(text="tiny-unet", batch_size=4, image_size=32, optimizer="sgd")
    command = target_command(spec, "9 MiB")
    assert command == "lowtide plan tiny-unet -b 4 --image-size 32 --optimizer sgd --budget '9 MiB'"


TEXT = "error: the lowest reachable peak is at 'convolution_backward_2' " + "and so on " * 12
LONG = "lowtide plan a-folder-with-a-name/profile.json --budget 11127KiB -o a-folder-with-a-long-name"


@pytest.mark.parametrize("width", [40, 80])
def test_no_word_is_broken(width):
    lines = folded(TEXT, width)
    assert " ".join(lines).split() == TEXT.split()
    assert max(map(len, lines)) <= width


def test_a_long_command_can_be_pasted():
    lines = folded(f"{LONG}   # why", 80, start="next: ", is_command=True)
    assert lines[0] == "next: # why"
    pasted = "\n".join(lines[1:]).replace("\\\n", " ")
    assert all(len(line) <= 80 for line in lines)
    assert shlex.split(pasted) == LONG.split()


def test_a_short_command_keeps_its_comment_behind():
    assert folded("lowtide verify p   # again", 80, is_command=True) == ["lowtide verify p   # again"]


def test_a_stage_on_a_terminal_says_its_seconds_and_its_count():
    screen = io.StringIO()
    console = Console(file=screen, force_terminal=True, width=80)
    terminal = Terminal(err=console)
    with terminal.working("verifying"):
        pass
    with terminal.counting("measuring") as progress:
        progress(3, 8)
    shown = screen.getvalue()
    assert "verifying" in shown and "0 s" in shown and "3/8" in shown
