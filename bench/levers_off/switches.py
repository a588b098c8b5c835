"""Levers that every plan has by now, switched off: what `bench/levers.py` starts its table with."""

from collections.abc import Collection, Iterator
from contextlib import ExitStack, contextmanager
from unittest import mock

from lowtide import remat

METHODS_OF = {
    "packed": ("bits", "sign", "narrow"),
    "slices": ("slices", "large_slices", "large_rows", "whole_rows"),
}


@contextmanager
def without(levers: Collection[str]) -> Iterator[None]:
    """Profile, plan and run as if these levers were not there."""
    with ExitStack() as stack:
        gone = {name for lever in levers for name in METHODS_OF.get(lever, ())}
        others = tuple(method for method in remat.REMAT_RULES if method.name not in gone)
        stack.enter_context(mock.patch.object(remat, "REMAT_RULES", others))
        if "slices" in levers:
            for rows in ("use_loss_rows", "use_soft_loss_rows", "use_score_rows"):
                stack.enter_context(mock.patch(f"lowtide.ops.passes.{rows}", lambda graph: None))
            for module in ("capture.analyse", "running.rewrite"):
                stack.enter_context(mock.patch(f"lowtide.{module}.overwrites", lambda *_: {}))
        if "pieces" in levers:
            stack.enter_context(mock.patch("lowtide.analyze.captured_step.pieces_of_step", lambda *_: ()))
        yield
