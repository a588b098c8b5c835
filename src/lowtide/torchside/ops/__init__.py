"""Ops that need more than their name: one file each, with all that lowtide knows of them.

- `dropout`: eager's own rounding, and the mask that it keeps
- `recurrent`: RNN layers and their workspace
- `random`: which ops draw random numbers, and the state they draw from
- `schema`: what an op's schema says: what it writes, what its results share
"""

from torch import fx

from lowtide.torchside.ops.dropout import use_eager_dropout
from lowtide.torchside.ops.recurrent import use_recurrent_layers


def as_eager_computes(graph: fx.Graph) -> None:
    """Replace, in place, ops whose captured form differs from what eager computes; preserves all else."""
    use_recurrent_layers(graph)
    use_eager_dropout(graph)
