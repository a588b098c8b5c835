"""Processes of a sharded model that do not fit together, or that go: all of them end, soon, and say why."""

import signal
from typing import Any

import pytest
from ranks import Group, Rank, run_ranks

pytestmark = [pytest.mark.slow, pytest.mark.long]

TROUBLES = ("", "a bad batch", "another budget", "another model", "another file")
GOES = ("killed in backward", "raises in forward")


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Rank]]:
    folder = str(tmp_path_factory.mktemp("plans"))
    groups = {
        "troubles": Group("sharded_trouble:all_troubles", {"troubles": TROUBLES, "folder": folder}),
        **{how: Group("sharded_trouble:ends_in_a_step", {"how": how}) for how in GOES},
    }
    return run_ranks(groups)


@pytest.fixture
def said(ended: dict[str, list[Rank]]) -> dict[str, list[Any]]:
    """By trouble, what the two ranks gave or raised."""
    assert [rank.error for rank in ended["troubles"]] == ["", ""]
    both = [rank.value for rank in ended["troubles"]]
    return {trouble: [results[index] for results in both] for index, trouble in enumerate(TROUBLES)}


def test_all_ranks_get_one_plan(said: dict[str, list[Any]]) -> None:
    first, second = said[""]
    assert first == second
    assert isinstance(first, int)


def test_an_error_of_one_rank_stops_the_others(said: dict[str, list[Any]]) -> None:
    first, second = said["a bad batch"]
    assert first.startswith("RankError: rank 1 cannot train with the others: ")
    assert second.startswith("CaptureError: ") and second in first


@pytest.mark.parametrize(
    ("trouble", "words"),
    [
        ("another budget", "PlanMismatch: rank 1 has the budget '97%', and rank 0 '98%'"),
        ("another model", "PlanMismatch: rank 1 has the parameters "),
        ("another file", "PlanMismatch: rank 1 has another plan than rank 0 "),
    ],
)
def test_what_differs_stops_every_rank(said: dict[str, list[Any]], trouble: str, words: str) -> None:
    first, second = said[trouble]
    assert first == second
    assert first.startswith(words)


@pytest.mark.parametrize("how", GOES)
def test_a_rank_that_goes_in_a_step_is_named(ended: dict[str, list[Rank]], how: str) -> None:
    left, gone = ended[how]
    expected = "rank 1 raised in its forward pass: ValueError: a bad batch"
    if "killed" in how:
        assert gone.status == signal.SIGKILL
        expected = "rank 1 is gone: its process ended in the middle of a step"
    else:
        assert gone.error == "ValueError: a bad batch"
    assert left.error.startswith(f"RankError: {expected}")
