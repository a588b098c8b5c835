"""Write files so that an interrupted command leaves the old file or the new one, never half of one; and where
to keep what can be made again, or is needed for a while."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import NamedTemporaryFile, TemporaryDirectory

from lowtide.errors import FreshProcessError, LowtideError


def cache_folder() -> Path:
    """`lowtide` in `XDG_CACHE_HOME`, else `~/.cache/lowtide`; nobody says that it can be written."""
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
    """A folder that is gone afterwards, where Python puts temporary files."""
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
    """Write `content` to `path` by way of a temporary file beside it. Makes the folder if missing."""
    try:
        _replace(path, content.encode() if isinstance(content, str) else content)
    except OSError as error:
        raise LowtideError(f"cannot write {path}: {error.strerror or error}") from error
    return path


def _replace(path: Path, data: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with NamedTemporaryFile(dir=path.parent, prefix=f".{path.name}.", delete=False) as temporary:
        partial = Path(temporary.name)
        try:
            temporary.write(data)
            temporary.flush()
            # A temporary file is private to its owner; a report is there to be passed on.
            partial.chmod(0o666 & ~_umask())
            partial.replace(path)
        except BaseException:
            partial.unlink(missing_ok=True)
            raise


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
