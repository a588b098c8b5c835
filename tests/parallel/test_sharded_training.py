"""Sharded models on two processes: the same results as without a plan, to the last bit."""

from pathlib import Path

import pytest
from ranks import on_ranks
from sharded_cases import LOOPS, OPTIONS

pytestmark = pytest.mark.slow

OFTEN = [("mixed precision", "clipping"), ("default", "changing")]
RARELY = [(options, "plain") for options in OPTIONS]
RARELY += [("default", loop) for loop in LOOPS if loop not in ("plain", "changing")]


@pytest.fixture(scope="module")
def results(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory):
    folder, blocks = tmp_path_factory.mktemp("saved"), 2 if request.param is OFTEN else 3
    return on_ranks("sharded_cases:all_differences", wanted=request.param, folder=folder, blocks=blocks)


def _check(results, options: str, loop: str) -> None:
    for rank in results:
        result = rank[options, loop]
        assert result["compared"]
        assert result["different"] == []
        assert result["recompute_seconds"] > 0
        assert result["backwards"]


@pytest.mark.parametrize("results", [OFTEN], indirect=True, ids=["often"])
@pytest.mark.parametrize(("options", "loop"), OFTEN)
def test_training_by_a_plan_leaves_the_same_behind_on_every_process(results, options, loop):
    _check(results, options, loop)


@pytest.mark.parametrize("results", [OFTEN], indirect=True, ids=["often"])
def test_equal_blocks_share_a_graph(results):
    assert [rank["mixed precision", "clipping"]["graphs"] for rank in results] == [3, 3]


@pytest.mark.long
@pytest.mark.parametrize("results", [RARELY], indirect=True, ids=["rarely"])
@pytest.mark.parametrize(("options", "loop"), RARELY)
def test_every_way_to_shard_and_to_train_leaves_the_same_behind(results, options, loop):
    _check(results, options, loop)


@pytest.mark.long
def test_every_planner_leaves_the_same_behind(tmp_path: Path) -> None:
    planners = ("mu-two", "all", "every-block", "sqrt")
    for rank in on_ranks("sharded_cases:by_planners", planners=planners, folder=tmp_path):
        for name in planners:
            assert rank[name]["compared"] and rank[name]["different"] == [], name
            assert rank[name]["recompute_seconds"] > 0


@pytest.mark.long
def test_what_cannot_work_is_refused_with_the_next_step():
    for said in on_ranks("sharded_cases:mistakes"):
        assert "lowest reachable peak" in said["too small"]
        assert "leave `ranks` and `shard` out" in said["sharded twice"]
        assert "mode 'ops'" in said["run"]
        assert "plan the sharded model" in said["sharded later"]
