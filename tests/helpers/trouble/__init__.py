"""Small models written for trouble: whatever is known to break recompute, graph capture, or both."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from .graphs import (
    Constants,
    CustomFunction,
    EqualBlocks,
    FrozenBeforeABreak,
    GraphBreak,
    ReadsValues,
    Recurrent,
    Upsampling,
)
from .outputs import DataclassOutput, DictOutput, LossesInside, Results, TupleOutput, Widening
from .sizes import BATCH, WIDTH
from .state import (
    BatchNorms,
    CountsCalls,
    DrawsInVain,
    FrozenAndUnused,
    RandomInForward,
    SpectralNorm,
    StochasticDepth,
    TiedWeights,
)
from .values import (
    AttentionByHand,
    InplaceResidual,
    IntegersAndBools,
    LongSkips,
    ReadTransposed,
    SharedModule,
    Views,
)


@dataclass(frozen=True)
class Trouble:
    """A model to build, its batch, and what it needs besides."""

    build: Callable[[], nn.Module]
    batch: Callable[[], Any]
    loss: Callable[[Any], torch.Tensor] | None = None


def _floats(*shape: int, dtype: torch.dtype = torch.float32) -> Callable[[], torch.Tensor]:
    return lambda: torch.randn(*shape, dtype=dtype)


def _outer_loss(output: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    return F.cross_entropy(output[0], torch.zeros(BATCH, dtype=torch.long)) + output[1].square().mean()


def _loss_of_results(output: Results) -> torch.Tensor:
    return output.scores.abs().mean() + output.hidden.mean()


ROWS = _floats(BATCH, WIDTH)
TROUBLE = {
    "in-place-residual": Trouble(InplaceResidual, ROWS),
    "random-in-forward": Trouble(RandomInForward, ROWS),
    "stochastic-depth": Trouble(StochasticDepth, ROWS),
    "spectral-norm": Trouble(SpectralNorm, ROWS),
    "tied-weights": Trouble(TiedWeights, lambda: torch.randint(0, 50, (8, 16))),
    "frozen-and-unused": Trouble(FrozenAndUnused, ROWS),
    "graph-break": Trouble(GraphBreak, ROWS),
    "frozen-before-a-break": Trouble(FrozenBeforeABreak, ROWS),
    "equal-blocks": Trouble(EqualBlocks, _floats(4 * BATCH, WIDTH)),
    "draws-in-vain": Trouble(DrawsInVain, ROWS),
    "reads-values": Trouble(ReadsValues, ROWS),
    "lstm": Trouble(Recurrent, _floats(8, 6, WIDTH)),
    "custom-function": Trouble(CustomFunction, ROWS),
    "long-skips": Trouble(LongSkips, ROWS),
    "shared-module": Trouble(SharedModule, ROWS),
    "tuple-output": Trouble(TupleOutput, ROWS, _outer_loss),
    "tuple-output-summed": Trouble(TupleOutput, ROWS),
    "dict-output": Trouble(DictOutput, ROWS),
    "loss-of-powers": Trouble(Widening, ROWS, lambda output: output.square().mean()),
    "dataclass-output": Trouble(DataclassOutput, ROWS, _loss_of_results),
    "batch-norms": Trouble(BatchNorms, _floats(4, 6, 12, 12)),
    "counts-calls": Trouble(CountsCalls, ROWS),
    "integers-and-bools": Trouble(IntegersAndBools, ROWS),
    "views": Trouble(Views, ROWS),
    "constants": Trouble(Constants, ROWS),
    "losses-inside": Trouble(LossesInside, _floats(8 * BATCH, WIDTH), sum),
    "read-transposed": Trouble(ReadTransposed, _floats(8, 16, 100), lambda output: output.abs().mean()),
    "attention-by-hand": Trouble(
        AttentionByHand, _floats(8, 16, WIDTH), lambda output: output.square().mean()
    ),
    "upsampling": Trouble(Upsampling, _floats(4, 6, 16, 16)),
    "double": Trouble(lambda: SharedModule().double(), _floats(BATCH, WIDTH, dtype=torch.float64)),
    "bfloat16": Trouble(lambda: SharedModule().bfloat16(), _floats(BATCH, WIDTH, dtype=torch.bfloat16)),
}
