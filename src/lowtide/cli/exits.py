"""Exit codes, and which error ends with which."""

from enum import IntEnum

from lowtide.errors import BudgetTooSmall, LowtideError
from lowtide.experiments.machine import NotEnoughMemory
from lowtide.facts.sizes import BadSize


class UsageError(LowtideError):
    """What was typed makes no sense together."""


class Exit(IntEnum):
    DONE = 0
    ERROR = 1
    USAGE = 2
    DOES_NOT_FIT = 3
    RESULTS_DIFFER = 4
    INTERRUPTED = 130


def exit_code(error: BaseException) -> Exit:
    match error:
        case KeyboardInterrupt():
            return Exit.INTERRUPTED
        case BudgetTooSmall() | NotEnoughMemory():
            return Exit.DOES_NOT_FIT
        case BadSize() | UsageError():
            return Exit.USAGE
        case _:
            return Exit.ERROR


def one_line(error: BaseException) -> str:
    """What is told about an error without `-v`."""
    text = " ".join(str(error).split())
    if isinstance(error, LowtideError):
        return text
    if isinstance(error, KeyboardInterrupt):
        return "interrupted"
    return f"{type(error).__name__}: {text} (this should not happen; -v shows where)"
