"""What the shell offers when Tab is pressed; answers without torch."""

from collections.abc import Iterable
from pathlib import Path

from lowtide.facts.devices import GPUS
from lowtide.facts.plan import PLANNERS
from lowtide.zoo.catalog import CATALOG

OPTIMIZERS = ("adam", "adamw", "sgd", "none", "adam:fused", "adam:foreach", "adam:single")


def targets(incomplete: str) -> list[str]:
    """Built-in targets, then Python files, whose factory is still to be named, and folders."""
    return [*_starting(CATALOG, incomplete), *_files(incomplete, ".py", end=":")]


def sources(incomplete: str) -> list[str]:
    """Profiles, and everything that can be profiled."""
    return [*_files(incomplete, ".json", folders=False), *targets(incomplete)]


def planners(incomplete: str) -> list[str]:
    return _starting(PLANNERS, incomplete)


def devices(incomplete: str) -> list[str]:
    return _starting(GPUS, incomplete)


def optimizers(incomplete: str) -> list[str]:
    return _starting(OPTIMIZERS, incomplete)


def _starting(names: Iterable[str], incomplete: str) -> list[str]:
    return [name for name in names if name.startswith(incomplete)]


def _files(incomplete: str, suffix: str, *, end: str = "", folders: bool = True) -> list[str]:
    head, slash, tail = incomplete.rpartition("/")
    folder = Path(head + slash) if slash else Path()
    try:
        entries = sorted(folder.iterdir())
    except OSError:
        return []  # nothing to offer in a folder that cannot be read
    shown = [entry for entry in entries if entry.name.startswith(tail) and not entry.name.startswith(".")]
    files = [
        f"{head}{slash}{entry.name}{end}" for entry in shown if entry.suffix == suffix and entry.is_file()
    ]
    return files + [f"{head}{slash}{entry.name}/" for entry in shown if folders and entry.is_dir()]
