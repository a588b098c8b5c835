"""Models on device meshes: tensor parallelism alone and with FSDP2, and other ways to shard.

Training by a plan leaves the same behind as plain training, to the last bit, and stays within the budget.
"""

import signal
from typing import Any

import pytest
from ranks import Group, on_ranks, run_ranks

pytestmark = pytest.mark.slow

OFTEN = ("fsdp and tensor", "hsdp of one replica")
ON_TWO = (
    *("tensor", "sequence", "loss", "tensor in bf16", "loss in bf16", "fsdp and tensor, mixed"),
    *("on the host", "lower sums", "one between", "tied", "units of several modules"),
)
ON_FOUR = ("fsdp over two and tensor", "hsdp", "few between", "two meshes")


def _check(ranks: list[dict[str, dict[str, Any]]], axis: str) -> None:
    for rank in ranks:
        found = rank[axis]
        assert found["compared"]
        assert found["different"] == []
        assert found["recompute_seconds"] > 0
        for run in ("plain", "planned"):
            assert found[run]["measured"] <= found[run]["predicted"], (axis, run)
            assert found[run]["measured"] >= 0.8 * found[run]["predicted"], (axis, run)


@pytest.fixture(scope="module")
def often() -> list[Any]:
    return on_ranks("mesh_cases:all_compared", axes=OFTEN, blocks=1)


@pytest.mark.parametrize("axis", OFTEN)
def test_training_by_a_plan_leaves_the_same_behind_on_every_process(often, axis):
    _check(often, axis)


@pytest.fixture(scope="module")
def on_two() -> list[Any]:
    return on_ranks("mesh_cases:all_compared", axes=ON_TWO)


@pytest.mark.long
@pytest.mark.parametrize("axis", ON_TWO)
def test_two_processes_leave_the_same_behind_in_every_other_way(on_two, axis):
    _check(on_two, axis)


@pytest.fixture(scope="module")
def on_four() -> list[Any]:
    return on_ranks("mesh_cases:all_compared", ranks=4, axes=ON_FOUR)


@pytest.mark.long
@pytest.mark.parametrize("axis", ON_FOUR)
def test_four_processes_leave_the_same_behind(on_four, axis):
    _check(on_four, axis)


@pytest.fixture(scope="module")
def others() -> dict[str, Any]:
    groups = {
        "reused": Group("mesh_cases:reused"),
        "refusals": Group("mesh_cases:refusals"),
        "verified": Group("mesh_cases:verified"),
        "killed": Group("mesh_cases:ends_in_a_step", {"axis": "sequence"}),
    }
    return run_ranks(groups)


@pytest.mark.long
def test_gradients_of_a_weight_that_is_used_several_times_are_summed_as_in_eager(others):
    for rank in others["reused"]:
        assert rank.error == ""
        assert rank.value and all(rank.value.values()), rank.value


@pytest.mark.long
def test_what_cannot_work_is_refused_with_the_next_step(others):
    for rank in others["refusals"]:
        assert rank.error == ""
        said = rank.value
        assert "mode 'ops'" in said["run"]
        assert "lowtide.verify(model, batch, plan) measures it here" in said["measure"]
        assert "leave `ranks` and `shard` out" in said["simulated"]
        assert "leave it out" in said["in backward"]
        assert "let the model return ordinary tensors" in said["other gradient"]
        assert "divide first, then plan" in said["divided later"]


@pytest.mark.long
def test_all_processes_verify_a_plan_together(others):
    """A difference on one of them is one for all, and the model is as before."""
    for rank in others["verified"]:
        assert rank.error == ""
        (exact, fits, different), (also_exact, _, differs) = rank.value["results"]
        assert exact and fits and different == ()
        assert not also_exact and differs[0].startswith("rank ")
        assert rank.value["as before"]


@pytest.mark.long
def test_a_rank_that_is_killed_in_a_step_is_named(others):
    left, gone = others["killed"]
    assert gone.status == signal.SIGKILL
    assert left.error.startswith("RankError: rank 1 is gone: its process ended in the middle of a step")


@pytest.mark.long
@pytest.mark.parametrize("killed", ["fsdp and tensor", "hsdp of one replica", "on the host"])
def test_a_rank_that_is_killed_is_named_on_every_mesh(killed):
    ended = run_ranks({killed: Group("mesh_cases:ends_in_a_step", {"axis": killed})})
    left, gone = ended[killed]
    assert gone.status == signal.SIGKILL
    assert left.error.startswith("RankError: rank 1 is gone")


@pytest.mark.long
def test_fewer_processes_go_on_from_a_checkpoint_as_plain_training_does(tmp_path):
    axes = ("tensor", "fsdp over two and tensor", "hsdp", "on the host")
    arguments = {"axes": axes, "folder": str(tmp_path)}
    groups = {
        "saved": Group("mesh_cases:saved", arguments, ranks=4),
        "resumed": Group("mesh_cases:resumed", arguments, ranks=2),
    }
    ended = run_ranks(groups)
    assert not any(rank.status or rank.error for rank in (*ended["saved"], *ended["resumed"])), ended
    for rank in ended["resumed"]:
        for axis in axes:
            assert rank.value[axis]["compared"]
            assert rank.value[axis]["different"] == [], axis
