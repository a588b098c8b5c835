"""Sizes in bytes as people write them."""

import re

from lowtide.errors import BadSize

__all__ = [
    "BadSize",
    "check_budget",
    "is_auto",
    "is_reserved",
    "parse_budget",
    "parse_size",
    "split_reserved",
    "step_budget",
]

_UNITS = {
    "": 1,
    "b": 1,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
    "tb": 10**12,
    "kib": 2**10,
    "mib": 2**20,
    "gib": 2**30,
    "tib": 2**40,
    "k": 2**10,
    "m": 2**20,
    "g": 2**30,
    "t": 2**40,
}
_NUMBER = r"\s*([0-9]{1,200}(?:\.[0-9]{1,200})?|\.[0-9]{1,200})\s*"
_SIZE = re.compile(_NUMBER + r"([a-zA-Z]*)\s*")
_PERCENT = re.compile(_NUMBER + r"%\s*")


def parse_size(text: str | int) -> int:
    """Bytes of `text`: an int, or a number with a unit (`8GiB`, `8GB`, `500 MiB`; `8G` is `8GiB`)."""
    if isinstance(text, bool):
        raise BadSize(text)
    if isinstance(text, int):
        if text <= 0:
            raise BadSize(text)
        return text
    match = _SIZE.fullmatch(text) if isinstance(text, str) else None
    if match is None or match[2].lower() not in _UNITS:
        raise BadSize(text)
    nbytes = (
        int(float(match[1]) * _UNITS[match[2].lower()])
        if "." in match[1]
        else int(match[1]) * _UNITS[match[2].lower()]
    )
    if nbytes <= 0:
        raise BadSize(text)
    return nbytes


RESERVED = "reserved"
AUTO = "auto"
LEAST_STEP_BYTES = 1000
"""No training step takes less: a number of up to three digits lacks its unit."""


def split_reserved(text: str | int) -> tuple[str | int, bool]:
    """A budget without the word `reserved` at its end, and whether it has that word: `20GiB reserved`."""
    if isinstance(text, str) and text.strip().lower().endswith(RESERVED):
        return text.strip()[: -len(RESERVED)], True
    return text, False


def is_reserved(text: str | int) -> bool:
    """Whether a budget is one of reserved bytes."""
    return split_reserved(text)[1]


def is_auto(text: str | int) -> bool:
    """Whether a budget is `auto`, of live or of reserved bytes: what the device has free."""
    bare = split_reserved(text)[0]
    return isinstance(bare, str) and bare.strip().lower() == AUTO


def check_budget(text: str | int) -> None:
    """BadSize for a budget that cannot be read, of live or of reserved bytes."""
    if not is_auto(text):
        step_budget(split_reserved(text)[0], whole=1 << 60)


def step_budget(text: str | int, *, whole: int) -> int:
    """Bytes of a budget for a training step, as `parse_budget`. A number alone that is too small for any step
    lacks its unit: `BadSize` asks which one was meant."""
    nbytes = parse_budget(text, whole=whole)
    number = str(text).strip()
    if number.isdigit() and nbytes < LEAST_STEP_BYTES:
        other = f"'{number}%' of the step's peak" if nbytes <= 100 else f"'{number}MiB'"
        raise BadSize(
            text,
            f"a budget of {number} bytes is too small for any step: did you mean {other}, or '{number}GiB'?",
        )
    return nbytes


def parse_budget(text: str | int, *, whole: int) -> int:
    """Bytes of a budget; a percentage is taken of `whole`."""
    match = _PERCENT.fullmatch(text) if isinstance(text, str) else None
    if match is None:
        return parse_size(text)
    nbytes = int(whole * float(match[1]) / 100)
    if nbytes <= 0:
        raise BadSize(text)
    return nbytes
