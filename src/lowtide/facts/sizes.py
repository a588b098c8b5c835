"""Read and print sizes in bytes."""

import re

from lowtide.errors import LowtideError

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
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?|\.\d+)\s*([a-zA-Z]*)\s*")
_PERCENT = re.compile(r"\s*(\d+(?:\.\d+)?|\.\d+)\s*%\s*")


class BadSize(LowtideError):
    """A size that cannot be read."""

    def __init__(self, text: object) -> None:
        super().__init__(
            f"cannot read the size {text!r}: write bytes (8000000000), "
            "a size ('8GiB', '500MB') or a share of the step's peak ('60%')"
        )


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


def format_size(nbytes: int) -> str:
    """`nbytes` for people, in binary units."""
    value = float(nbytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(value) < 1024:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.2f} TiB"
