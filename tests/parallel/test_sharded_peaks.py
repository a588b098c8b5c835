"""What a process of a sharded model holds: predicted with the others, without them, and measured."""

import pytest
import torch
from ranks import on_ranks
from sharded_cases import MIXED, WORDS, Net
from torch.nn import functional

import lowtide

pytestmark = pytest.mark.slow

SIZE = {"width": 128, "blocks": 3, "batch": (8, 64)}


def simulated_profile(ranks: int) -> lowtide.Profile:
    model = Net(SIZE["width"], SIZE["blocks"])
    tokens, targets = torch.randint(0, WORDS, (2, *SIZE["batch"]))

    def loss(output: torch.Tensor) -> torch.Tensor:
        return functional.cross_entropy(output.flatten(0, 1).float(), targets.flatten())

    return lowtide.profile(
        model, tokens, optimizer=torch.optim.AdamW(model.parameters()), loss=loss, ranks=ranks
    )


@pytest.mark.long
@pytest.mark.parametrize(("ranks", "shares"), [(2, (0,)), (4, (0.5, 0))], ids=["2", "4"])
def test_peaks_are_as_predicted_with_and_without_the_other_processes(ranks, shares):
    simulated = simulated_profile(ranks)
    for rows in on_ranks("sharded_cases:peaks", ranks=ranks, options=SIZE, shares=shares):
        plain, *planned = rows
        assert abs(plain["predicted"] - plain["measured"]) <= 0.02 * plain["measured"]
        assert abs(simulated.peak_bytes - plain["measured"]) <= 0.02 * plain["measured"]
        for row in planned:
            assert row["measured"] <= row["budget"]
            assert abs(row["predicted"] - row["measured"]) <= 0.02 * row["measured"]
        assert abs(simulated.floor_bytes - planned[-1]["measured"]) <= 0.02 * planned[-1]["measured"]


@pytest.mark.long
@pytest.mark.parametrize(
    "options", [{"reshard_after_forward": False}, {"root": False}, {"mp_policy": MIXED, "batch": (4, 64)}]
)
def test_peaks_are_as_predicted_for_other_ways_to_shard(options):
    for rows in on_ranks("sharded_cases:peaks", options={**SIZE, **options}):
        for row in rows:
            assert abs(row["predicted"] - row["measured"]) <= 0.02 * row["measured"]
