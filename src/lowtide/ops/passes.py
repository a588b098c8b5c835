"""Ops that need more than their name: one file each, with all that lowtide knows of them.

- `autocast`: weights that eager casts once
- `backward_chains`: pointwise ops of the backward pass, in slices with the forward ops that they need
- `by_number`: ops that torch traces only for a known number, for any
- `by_value`: ops that eager differentiates by looking at values
- `chains`: pointwise ops, a slice of the elements at a time
- `direct`: ops called without torch's ways around them
- `dropout`: eager's own rounding, and the mask that it keeps
- `grouped`: the products of experts, traced in all types
- `in_place`: ops that can write over what they read
- `loss_rows`: the gradient of a cross entropy in slices of rows
- `soft_loss_rows`: the same where targets are probabilities
- `packed`: truth values as bits, and names for values of which only the sign is asked
- `norms`: the types of their statistics under autocast
- `recurrent`: LSTM layers that are one op in eager, and their workspace
- `recurrent_cells`, `recurrent_tracing`, `recurrent_bytes`: those that eager computes cell by cell
- `random`: which ops draw random numbers, and the state they draw from
- `score_rows`: log-probabilities in the memory of their logits
- `readers`: who reads a value
- `schema`: what an op's schema says: what it writes, what its results share
- `terms`: gradients that leave a graph as terms of a sum
"""

from torch import fx

from lowtide.ops.loss_chunks import use_logits_in_place, use_loss_chunks, use_soft_loss_chunks
from lowtide.ops.packing import separate_signs
from lowtide.ops.random_ops import use_eager_dropout
from lowtide.ops.recurrent import use_recurrent_layers
from lowtide.ops.recurrent_cells import add_in_eagers_order
from lowtide.ops.traced_ops import use_real_dtypes


def as_eager_computes(graph: fx.Graph) -> None:
    """Replace, in place, ops whose captured form differs from what eager computes, and put right what
    fake tensors say wrongly; preserves all else."""
    use_recurrent_layers(graph)
    add_in_eagers_order(graph)
    use_eager_dropout(graph)
    use_real_dtypes(graph)
    separate_signs(graph)
    use_loss_chunks(graph)
    use_soft_loss_chunks(graph)
    use_logits_in_place(graph)
