"""When and with what a report was made."""

import datetime
import platform
from importlib.metadata import PackageNotFoundError, version

from lowtide.report.records import Environment


def environment_here(*, machine: str, command: str = "") -> Environment:
    """Now, on this system, with the libraries that are installed here."""
    return Environment(
        command=command,
        date=datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC"),
        machine=f"{machine}, {platform.system()} {platform.machine()}",
        versions=(("python", platform.python_version()), *_versions("lowtide", "torch", "transformers")),
    )


def _versions(*names: str) -> list[tuple[str, str]]:
    found = []
    for name in names:
        try:
            found.append((name, version(name)))
        except PackageNotFoundError:
            continue  # an optional library that is not here took no part
    return found
