"""The passes that make a captured joint graph compute what eager computes, in the order in which they run.

A pass changes a graph in place; its docstring says what it preserves. `PASSES` need only the graph. Some
passes need more, and run elsewhere:

    Dynamo's graph      use_gpu_attention, use_gpu_autocast     planned for a GPU that is absent
         |
    joint graph         PASSES                                  once per capture
         |
    each plan's copy    drop_zeros, return_terms                which gradients arrive, which leave as terms
         |
    forward, run once   draw_high                               capture that needs real values
"""

from collections.abc import Callable

from torch import fx

from lowtide.ops.collectives import share_awaited
from lowtide.ops.eager_batch_norm import use_eager_batch_norm
from lowtide.ops.gradient_terms import cast_weights_once
from lowtide.ops.loss_chunks import use_logits_in_place, use_loss_chunks, use_soft_loss_chunks
from lowtide.ops.packing import separate_signs
from lowtide.ops.random_ops import use_eager_dropout
from lowtide.ops.recurrent import add_in_eagers_order, use_recurrent_layers
from lowtide.ops.traced_ops import use_real_dtypes

PASSES: tuple[tuple[Callable[[fx.Graph], None], str], ...] = (
    (
        share_awaited,
        "what is waited for is the collective's own result, of which torch's fake value is a copy",
    ),
    (cast_weights_once, "eager's autocast caches its casts of weights, torch's tracer does not"),
    (use_recurrent_layers, "the traced layer lacks the workspace that its backward reads"),
    (add_in_eagers_order, "eager adds a cell's gradients one by one to the sum so far"),
    (use_eager_dropout, "native_dropout rounds its scale differently from eager on a CPU"),
    (use_eager_batch_norm, "eager chooses the vendor's batch norm on accelerators, torch's tracer does not"),
    (use_real_dtypes, "fake norms give their statistics the input's dtype, kernels the weight's"),
    (separate_signs, "a value of which backward reads only the sign can then be kept as bits"),
    (use_loss_chunks, "the gradient of a cross entropy needs only some rows at a time"),
    (use_soft_loss_chunks, "the same where targets are probabilities"),
    (use_logits_in_place, "log-probabilities can take the memory of logits that nothing else reads"),
)


def as_eager_computes(graph: fx.Graph) -> None:
    """Run all `PASSES` on a joint graph."""
    for run, _why in PASSES:
        run(graph)
