"""Sizes in bytes as people write them."""

import re

from lowtide.errors import BadSize

__all__ = ["BadSize", "parse_budget", "parse_size"]

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
}
_NUMBER = r"\s*([0-9]{1,200}(?:\.[0-9]{1,200})?|\.[0-9]{1,200})\s*"
_SIZE = re.compile(_NUMBER + r"([a-zA-Z]*)\s*")
_PERCENT = re.compile(_NUMBER + r"%\s*")


def parse_size(text: str | int) -> int:
    """Bytes of `text`: an int, or a number with a unit (`8GiB`, `8GB`, `500 MiB`)."""
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


def parse_budget(text: str | int, *, whole: int) -> int:
    """Bytes of a budget; a percentage is taken of `whole`."""
    match = _PERCENT.fullmatch(text) if isinstance(text, str) else None
    if match is None:
        return parse_size(text)
    nbytes = int(whole * float(match[1]) / 100)
    if nbytes <= 0:
        raise BadSize(text)
    return nbytes
