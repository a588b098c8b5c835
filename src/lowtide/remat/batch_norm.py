"""Recompute batch norm without its running statistics, which count once, in the forward pass."""

import torch
from torch import fx

from lowtide.ops.calls import Call
from lowtide.ops.eager_batch_norm import RESERVE, eager_batch_norm, eager_batch_norm_again
from lowtide.remat.rule import Blocks, Kept, RematRule

aten = torch.ops.aten

WITH_STATISTICS = aten._native_batch_norm_legit_functional.default
"""Gives (result, mean, inverse deviation, new running mean, new running variance)."""

WITHOUT_STATISTICS = aten._native_batch_norm_legit.no_stats
"""Gives (result, mean, inverse deviation)."""

COUNTED_ONCE = "running statistics are counted once"


def counts_statistics(node: fx.Node) -> bool:
    if node.target is eager_batch_norm:
        return node.meta["val"][3] is not None
    return node.target is WITH_STATISTICS


def is_statistic(getitem: fx.Node) -> bool:
    """Whether an item of a tuple is a new running mean or variance."""
    source, index = getitem.args
    return isinstance(source, fx.Node) and counts_statistics(source) and index in (3, 4)


class RecomputeBatchNorm(RematRule):
    name = "no_stats"
    words = "recomputed without counting statistics"

    def why_not(self, node: fx.Node) -> str | None:
        return "" if counts_statistics(node) else None

    def call(self, node: fx.Node, kept: tuple[Kept, ...]) -> Call:
        value, weight, bias, _mean, _variance, training, momentum, eps, *library = node.args
        if library:
            statistics = node.meta["val"][3].dtype
            return Call(eager_batch_norm_again, (value, weight, bias, statistics, momentum, eps, *library))
        return Call(WITHOUT_STATISTICS, (value, weight, bias, training, momentum, eps))

    def blocks(self, node: fx.Node, *, makes: Blocks, holds: Blocks) -> tuple[Blocks, Blocks]:
        made = (*makes[:3], *makes[RESERVE:])
        return made, made
