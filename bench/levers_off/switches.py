"""Levers that every plan has by now, switched off: what `bench/levers.py` starts its table with."""

from collections.abc import Collection, Iterator
from contextlib import ExitStack, contextmanager
from unittest import mock

from lowtide import remat
from lowtide.analyze import captured_step
from lowtide.analyze.backward_facts import BackwardOrder
from lowtide.ops import loss_chunks, passes

RULES_OF = {
    "packed": ("bits", "sign", "narrow"),
    "slices": ("slices", "large_slices", "large_rows", "whole_rows"),
}
CHUNKED = (
    loss_chunks.use_loss_chunks,
    loss_chunks.use_soft_loss_chunks,
    loss_chunks.use_logits_in_place,
)


@contextmanager
def without(levers: Collection[str]) -> Iterator[None]:
    """Profile, plan and run as if these levers were not there."""
    with ExitStack() as stack:
        gone = {name for lever in levers for name in RULES_OF.get(lever, ())}
        others = tuple(rule for rule in remat.REMAT_RULES if rule.name not in gone)
        stack.enter_context(mock.patch.object(remat, "REMAT_RULES", others))
        if "slices" in levers:
            whole = tuple(each for each in passes.PASSES if each[0] not in CHUNKED)
            stack.enter_context(mock.patch.object(passes, "PASSES", whole))
            stack.enter_context(mock.patch.object(BackwardOrder, "overwrites", lambda *_: {}))
        if "pieces" in levers:
            stack.enter_context(mock.patch.object(captured_step, "chunks_of_step", lambda *_: ()))
        yield
