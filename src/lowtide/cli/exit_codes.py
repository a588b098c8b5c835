"""How a command fails: its exit code, the line on stderr, and the value of `--json`."""

from dataclasses import asdict
from enum import IntEnum
from typing import Any

from lowtide.errors import BudgetTooSmall, LowtideError, is_out_of_memory
from lowtide.experiments.machine import NotEnoughMemory
from lowtide.facts.sizes import BadSize

NOT_FIGURES = ("levers", "details", "remedy")
"""Attributes of errors that are no figures: tracebacks, and texts that the message has."""


class UsageError(LowtideError):
    """Options that contradict each other."""


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
        case _ if is_out_of_memory(error):
            return Exit.DOES_NOT_FIT
        case BadSize() | UsageError():
            return Exit.USAGE
        case _:
            return Exit.ERROR


def one_line(error: BaseException) -> str:
    """The text about an error without `-v`."""
    text = " ".join(str(error).split())
    if isinstance(error, LowtideError):
        return text
    if isinstance(error, KeyboardInterrupt):
        return "interrupted"
    if is_out_of_memory(error):
        said = ". ".join(text.split(". ")[:3]).rstrip(".") or "out of memory"
        return f"{said}: try a smaller batch, or end what else is on the device"
    return f"{type(error).__name__}: {text} (this should not happen; -v shows where)"


def error_data(error: BaseException) -> dict[str, Any]:
    """What `--json` prints of an error: its type, its message, and its public figures."""
    figures = {
        name: value
        for name, value in vars(error).items()
        if not name.startswith("_")
        and name not in NOT_FIGURES
        and isinstance(value, int | float | str | None)
    }
    found: dict[str, Any] = {"type": type(error).__name__, "message": one_line(error), **figures}
    if isinstance(error, BudgetTooSmall):
        found["levers"] = [asdict(lever) for lever in error.levers]
    return {"error": found}
