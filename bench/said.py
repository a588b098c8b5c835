"""What lowtide said, as one line each, without what is of this machine."""

import logging
import re
from collections.abc import Iterator
from contextlib import contextmanager

import lowtide

OF_THE_BENCHMARK = ("too busy", "a profiler is on")


@contextmanager
def warnings_kept() -> Iterator[list[str]]:
    """The distinct warnings of the block, without what is said of a busy machine and of being measured."""
    handler = _Warnings()
    logger = logging.getLogger("lowtide")
    logger.addHandler(handler)
    try:
        yield handler.lines
    finally:
        logger.removeHandler(handler)


class _Warnings(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        words = without_folders(record.getMessage())
        if words not in self.lines and not any(each in words for each in OF_THE_BENCHMARK):
            self.lines.append(words)


def first_line(error: BaseException) -> str:
    """Of an error; with its type where it is not lowtide's own."""
    words = without_folders((str(error).strip().splitlines() or [""])[0])
    return words if isinstance(error, lowtide.LowtideError) else f"{type(error).__name__}: {words}"


def without_folders(words: str) -> str:
    """Without where things are on this machine."""
    return re.sub(r"/\S*/", "", words)
