"""The versions of torch that lowtide was checked with, and what happens with any other.

Differences between these versions are handled in `lowtide.torch_compat` alone, with a comment that names
them.
"""

import logging
import re

from lowtide.errors import UnsupportedTorch

CHECKED_TORCH = ("2.13.0", "2.14.1", "2.15.0")
"""Every test of exactness has passed with these: `make test-torch VERSION=...` runs them."""

REQUIREMENT = "torch>=2.13,<2.16"
"""As pip reads it; the same as in pyproject.toml."""

OLDEST, NEWEST = (2, 13), (2, 15)

logger = logging.getLogger("lowtide")


def check_version(found: str) -> None:
    """Raise for a torch that is too old, and warn of one that is newer than any that was checked."""
    version = _version(found)
    if version is not None and version < OLDEST:
        raise UnsupportedTorch(
            f"lowtide needs torch {_text(OLDEST)} or newer, and this is torch {found}: "
            f"pip install '{REQUIREMENT}'"
        )
    if is_newer(found):
        logger.warning(
            "lowtide was checked with torch %s to %s, and this is torch %s: lowtide.verify says whether it "
            "is exact, or pip install '%s'",
            _text(OLDEST),
            _text(NEWEST),
            found,
            REQUIREMENT,
        )


def is_newer(found: str) -> bool:
    """Whether a torch is newer than any that was checked, or has a version that cannot be read."""
    version = _version(found)
    return version is None or version > NEWEST


def _version(found: str) -> tuple[int, int] | None:
    numbers = re.match(r"(\d+)\.(\d+)", found)
    return (int(numbers[1]), int(numbers[2])) if numbers else None


def _text(version: tuple[int, int]) -> str:
    return "{}.{}".format(*version)
