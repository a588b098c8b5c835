"""Levers that every plan has by now, switched off: what `bench/levers.py` starts its table with."""

from collections.abc import Collection, Iterator
from contextlib import ExitStack, contextmanager
from unittest import mock

from lowtide import methods

METHODS_OF = {"packed": ("bits", "sign", "narrow"), "slices": ("slices",)}


@contextmanager
def without(levers: Collection[str]) -> Iterator[None]:
    """Profile, plan and run as if these levers were not there."""
    with ExitStack() as stack:
        gone = {name for lever in levers for name in METHODS_OF.get(lever, ())}
        others = tuple(method for method in methods.METHODS if method.name not in gone)
        stack.enter_context(mock.patch.object(methods, "METHODS", others))
        if "slices" in levers:
            stack.enter_context(mock.patch("lowtide.torchside.ops.use_loss_rows", lambda graph: None))
            stack.enter_context(mock.patch("lowtide.torchside.ops.use_score_rows", lambda graph: None))
            for module in ("capture.analyse", "running.rewrite"):
                stack.enter_context(mock.patch(f"lowtide.{module}.overwrites", lambda segment: {}))
        if "pieces" in levers:
            stack.enter_context(mock.patch("lowtide.capture.step._pieces", lambda *_: ()))
        yield
