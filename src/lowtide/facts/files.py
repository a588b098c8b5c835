"""Files that are written whole or not at all, the folder of caches, and temporary folders."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from secrets import token_hex
from tempfile import TemporaryDirectory

from lowtide.errors import FreshProcessError, LowtideError


def cache_folder() -> Path:
    """`lowtide` in `XDG_CACHE_HOME`, else `~/.cache/lowtide`. The folder may not exist or be read-only."""
    if shared := os.environ.get("XDG_CACHE_HOME"):
        return Path(shared) / "lowtide"
    try:
        return Path.home() / ".cache" / "lowtide"
    except RuntimeError as error:
        raise LowtideError(
            "there is no home folder to keep files in: set XDG_CACHE_HOME to a folder that can be written"
        ) from error


@contextmanager
def temporary_folder() -> Iterator[str]:
    """A folder in Python's place for temporary files, removed at the end."""
    try:
        made = TemporaryDirectory(prefix="lowtide-")
    except OSError as error:
        raise FreshProcessError(
            f"no folder for temporary files can be written ({error.strerror}): set TMPDIR to one that can",
            kind=type(error).__name__,
        ) from error
    with made as folder:
        yield folder


def write_atomic(path: Path, content: str | bytes) -> Path:
    """Write `content` to a temporary file beside `path` and rename that file. Makes the folder if missing.

    An interrupted command leaves the old file or the new one.
    """
    try:
        _replace(path, content.encode() if isinstance(content, str) else content)
    except OSError as error:
        raise LowtideError(f"cannot write {path}: {error.strerror or error}") from error
    return path


def _replace(path: Path, data: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    # not by `tempfile`, whose files are private to their owner: a report is there to be passed on
    partial = path.with_name(f".{path.name}.{token_hex(4)}")
    with partial.open("xb") as file:
        try:
            file.write(data)
            file.flush()
            partial.replace(path)
        except BaseException:
            partial.unlink(missing_ok=True)
            raise
