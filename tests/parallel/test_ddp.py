"""A plan inside of DistributedDataParallel: the same training, reduced while backward runs, in its budget."""

from typing import Any

import pytest
from ddp_cases import OPTIONS
from ranks import Group, Rank, run_ranks

pytestmark = pytest.mark.slow

FEW = ["accumulation, own hook, small buckets", "unused parameters, bucket views"]


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Rank]]:
    folder = str(tmp_path_factory.mktemp("plans"))
    names = ("launches", "collectives", "batches_of_all_sizes", "sync_batch_norm", "auto_budgets")
    groups = {
        "orders": Group("ddp_cases:both_orders", {"folder": folder, "names": FEW}),
        "peaks": Group("ddp_cases:peaks", {"folder": folder}),
        **{name: Group(f"ddp_cases:{name}") for name in names},
    }
    return run_ranks(groups)


def values(ended: dict[str, list[Rank]], name: str) -> list[Any]:
    assert [rank.error for rank in ended[name]] == [""] * len(ended[name])
    return [rank.value for rank in ended[name]]


def test_training_is_equal_to_plain_ddp_in_both_orders(ended: dict[str, list[Rank]]) -> None:
    expected = dict.fromkeys(FEW, (True, True))
    assert values(ended, "orders") == [expected, expected]


@pytest.mark.long
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_training_is_equal_with_every_option(tmp_path: Any, ranks: int) -> None:
    group = Group("ddp_cases:both_orders", {"folder": str(tmp_path)}, ranks=ranks, seconds=120)
    ended = run_ranks({"all": group}, limit_seconds=900)
    assert values(ended, "all") == [dict.fromkeys(OPTIONS, (True, True))] * ranks


def test_buckets_are_sent_while_backward_runs_as_in_plain_ddp(ended: dict[str, list[Rank]]) -> None:
    for found in values(ended, "launches"):
        (plain, plain_ops), (planned, ops) = found["plain"], found["planned"]
        assert len(planned) == len(plain) > 3
        assert planned == sorted(planned)
        assert planned[0] < ops / 4 and planned[1] < ops / 2
        # a plan adds what it recomputes, and nothing else stands between a bucket and the one before
        assert all(late <= early + ops - plain_ops for late, early in zip(planned, plain, strict=True))


def test_ranks_share_a_machine_and_have_one_automatic_budget(ended: dict[str, list[Rank]]) -> None:
    (first, said), (second, silent) = values(ended, "auto_budgets")
    assert first == second == int(15 * 0.9 * (1 << 30)), "half of what the second rank sees, less a tenth"
    assert len(said) == 2 and "30.0 GiB free on cpu / 2 processes" in said[0] and silent == []


def test_every_rank_keeps_its_budget_with_its_buckets(ended: dict[str, list[Rank]]) -> None:
    for found in values(ended, "peaks"):
        for name, (budget, predicted, measured) in found.items():
            assert measured <= predicted <= budget, name
            assert measured > 0.99 * predicted, name
        assert found["wrapped, bucket views"][1] < found["wrapped"][1]


def test_what_talks_to_other_ranks_is_never_run_again(ended: dict[str, list[Rank]]) -> None:
    for exact, (plain, planned) in values(ended, "collectives"):
        assert exact
        assert plain == planned > 0


def test_sync_batch_norm_is_refused_on_a_cpu_by_torch_itself(ended: dict[str, list[Rank]]) -> None:
    """Where a torch runs it, this goes red, and `AcrossRanks` can be the module itself."""
    for plain, planned in values(ended, "sync_batch_norm"):
        assert plain.startswith("SyncBatchNorm expected input tensor to be on GPU")
        assert plain in planned


def test_ranks_may_have_batches_of_other_sizes(ended: dict[str, list[Rank]]) -> None:
    for exact, said in values(ended, "batches_of_all_sizes"):
        assert exact
        assert any("is planned: " in line for line in said)
        assert any("counted for buckets of gradients" in line for line in said)
