"""Sharded models on two processes: the same results as without a plan, to the last bit."""

import pytest
from processes import on_processes
from sharded_cases import LOOPS, OPTIONS, all_differences

pytestmark = pytest.mark.slow

WANTED = [(options, "plain") for options in OPTIONS] + [
    ("default", loop) for loop in LOOPS if loop != "plain"
]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory):
    return on_processes(
        all_differences, 2, tmp_path_factory.mktemp("ranks"), WANTED, tmp_path_factory.mktemp("saved")
    )


@pytest.mark.parametrize(("options", "loop"), WANTED)
def test_training_by_a_plan_leaves_the_same_behind_on_every_process(found, options, loop):
    for rank in found:
        result = rank[options, loop]
        assert result["compared"]
        assert result["different"] == []
        assert result["recompute_seconds"] > 0
        assert result["backwards"]


def test_equal_blocks_share_a_graph(found):
    assert [rank["default", "plain"]["graphs"] for rank in found] == [3, 3]
