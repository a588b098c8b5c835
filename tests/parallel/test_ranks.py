"""Ranks that do not fit together, or that go: all of them end, soon, and say why."""

import signal
from typing import Any

import pytest
from ranks import GROUP_SECONDS, Group, Rank, run_ranks

pytestmark = pytest.mark.slow

TROUBLES = (
    "",
    "another batch",
    "another model",
    "another torch",
    "another plan",
    "too small a budget",
    "no model",
)
SECONDS = 2
GOES = {"killed in backward": 3, "raises in forward": 2}
GOES_OTHERWISE = {
    "killed in forward": 2,
    "killed outside": 2,
    "raises in forward": 3,
    "raises in backward": 2,
}
"""How rank 1 goes, and of how many."""


@pytest.fixture(scope="module")
def ended() -> dict[str, list[Rank]]:
    troubles = [("in_group", {"trouble": trouble}) for trouble in TROUBLES]
    groups = {
        "troubles": Group("ddp_trouble:several", {"calls": troubles}),
        "removed": Group("ddp_trouble:applied_and_removed"),
        "does not come": Group("ddp_trouble:does_not_come", {"seconds": SECONDS}),
        **going(GOES),
        "no group": Group("ddp_trouble:alone"),
    }
    return run_ranks(groups)


def going(ways: dict[str, int]) -> dict[str, Group]:
    return {how: Group("ddp_trouble:ends_in_a_step", {"how": how}, ranks=n) for how, n in ways.items()}


@pytest.fixture
def said(ended: dict[str, list[Rank]]) -> dict[str, list[Any]]:
    """By trouble, what the two ranks gave or raised."""
    both = [rank.value for rank in ended["troubles"]]
    return {trouble: [results[index] for results in both] for index, trouble in enumerate(TROUBLES)}


def test_all_ranks_get_one_plan(said: dict[str, list[Any]]) -> None:
    first, second = said[""]
    assert first == second
    assert isinstance(first, int)


def test_a_rank_with_another_batch_gets_its_own(said: dict[str, list[Any]]) -> None:
    first, second = said["another batch"]
    assert first < second


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("trouble", "words"),
    [
        ("another model", "PlanMismatch: rank 1 has the parameters '608 in "),
        ("another torch", "PlanMismatch: rank 1 has the torch '2.99.0', and rank 0 "),
        ("another plan", "PlanMismatch: rank 1 has another plan than rank 0 "),
    ],
)
def test_what_differs_stops_every_rank(said: dict[str, list[Any]], trouble: str, words: str) -> None:
    first, second = said[trouble]
    assert first == second
    assert words in first


def test_an_error_of_one_rank_stops_the_others(said: dict[str, list[Any]]) -> None:
    first, second = said["too small a budget"]
    assert first.startswith("BudgetTooSmall: cannot fit in 1000 bytes")
    assert second.startswith(f"RankError: rank 0 cannot train with the others: {first}")
    first, second = said["no model"]
    assert second == "LowtideError: profile() needs an nn.Module, not a NoneType"
    assert first == f"RankError: rank 1 cannot train with the others: {second}"


def test_a_rank_that_does_not_come_is_named(ended: dict[str, list[Rank]]) -> None:
    waiting, _ = ended["does not come"]
    assert waiting.value.startswith(f"rank 1 did not come to agree on a plan within {SECONDS} s")


def test_a_planned_model_listens_nowhere_and_leaves_nothing_in_its_process(
    ended: dict[str, list[Rank]],
) -> None:
    for rank in ended["removed"]:
        assert not rank.error
        assert rank.value == {
            "while planned": (False, True),
            "another is planned": (False, True),
            "attached again": (False, True),
            "wrapper": True,
            "removed": (True, False),
            "collected": (True, False),
            "listens": [],
        }


@pytest.mark.parametrize("how", GOES)
def test_a_rank_that_goes_in_a_step_is_named(ended: dict[str, list[Rank]], how: str) -> None:
    check_that_it_is_named(how, ended[how])


@pytest.mark.long
def test_a_rank_that_goes_otherwise_is_named() -> None:
    for how, ranks in run_ranks(going(GOES_OTHERWISE)).items():
        check_that_it_is_named(how, ranks)


def check_that_it_is_named(how: str, ranks: list[Rank]) -> None:
    first, gone, *others = ranks
    word, _, when = how.partition(" ")
    if word == "killed":
        assert gone.status == signal.SIGKILL
    else:
        assert gone.error == "ValueError: a bad batch"
    expected = "rank 1 is gone: its process ended in the middle of a step"
    if word == "raises":
        expected = f"rank 1 raised in its {when.removeprefix('in ')} pass: ValueError: a bad batch"
    for left in (first, *others):
        assert left.error.startswith(f"RankError: {expected}")
        assert left.seconds < gone.seconds + GROUP_SECONDS


def test_processes_without_a_group_are_told_to_make_one(ended: dict[str, list[Rank]]) -> None:
    for rank in ended["no group"]:
        assert rank.value.startswith("this is one of 2 processes (WORLD_SIZE), but there is no process group")
