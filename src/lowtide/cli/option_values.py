"""What the options of commands may be: checks before any work, and completions for the shell."""

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import typer

from lowtide.errors import LowtideError
from lowtide.facts.gpus import GPUS
from lowtide.facts.plan import parse_offload, parse_offload_what, parse_rounds
from lowtide.facts.sizes import BadSize, check_budget, parse_size, split_reserved
from lowtide.planning.registry import planner_names
from lowtide.zoo.targets import CATALOG

OPTIMIZERS = ("adam", "adamw", "sgd", "none", "adam:fused", "adam:foreach", "adam:single")


def targets(incomplete: str) -> list[str]:
    """Built-in targets, then Python files, whose factory is still to be named, and folders."""
    return [*_starting(CATALOG, incomplete), *_files(incomplete, ".py", end=":")]


def sources(incomplete: str) -> list[str]:
    """Profiles, and everything that can be profiled."""
    return [*_files(incomplete, ".json", folders=False), *targets(incomplete)]


def planners(incomplete: str) -> list[str]:
    return _starting(planner_names(), incomplete)


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
        return []  # no completions in a folder that cannot be read
    shown = [entry for entry in entries if entry.name.startswith(tail) and not entry.name.startswith(".")]
    files = [
        f"{head}{slash}{entry.name}{end}" for entry in shown if entry.suffix == suffix and entry.is_file()
    ]
    return files + [f"{head}{slash}{entry.name}/" for entry in shown if folders and entry.is_dir()]


def valid_budget(text: str) -> str:
    """Refuse an invalid budget before any work; the peak is known only later."""
    return _read(text, lambda: check_budget(text))


def valid_optional_budget(text: str | None) -> str | None:
    return None if text is None else valid_budget(text)


def bytes_budget(text: str) -> str:
    """Refuse a share as well: each size has its own peak."""
    if text.strip().endswith("%"):
        raise typer.BadParameter(
            f"'{text}' is a share of one size's own peak, and here sizes differ: write bytes, such as 8GiB"
        )
    return live_budget(text)


def live_budget(text: str) -> str:
    """Refuse a budget of reserved bytes: sizes are compared by live bytes."""
    if split_reserved(text)[1]:
        raise typer.BadParameter(f"'{text}': sizes are compared by live bytes, so leave 'reserved' out")
    return valid_budget(text)


def bytes_budgets(text: str) -> str:
    """The same for several budgets, with commas between them."""
    for one in text.split(","):
        bytes_budget(one)
    return text


def live_budgets(text: str | None) -> str | None:
    """Budgets of live bytes, shares among them, with commas between; or none."""
    for one in several(text):
        live_budget(one)
    return text


def number_of(what: str, example: int) -> Callable[[str | None], str | None]:
    """A callback that refuses what is not a positive whole number."""

    def valid(text: str | None) -> str | None:
        if text is None or (text.isascii() and text.isdigit() and int(text) > 0):
            return text
        raise typer.BadParameter(
            f"'{text}' is no number of {what}: give a whole number from 1 on, such as {example}"
        )

    return valid


def valid_size(text: str) -> str:
    return _read(text, lambda: parse_size(text))


def optional_size(text: str) -> str:
    """Refuse an invalid size before any work."""
    return valid_size(text) if text else ""


def _read(text: str, read: Callable[[], object]) -> str:
    try:
        read()
    except BadSize as error:
        raise typer.BadParameter(str(error)) from None
    return text


def valid_offload(text: str) -> str:
    try:
        return str(parse_offload(text)) if text else ""
    except LowtideError as error:
        raise typer.BadParameter(str(error)) from None


def valid_offload_what(text: str) -> str:
    try:
        return ",".join(parse_offload_what(text, offload="some"))
    except LowtideError as error:
        raise typer.BadParameter(str(error)) from None


def valid_rounds(text: str) -> str:
    try:
        return ",".join(parse_rounds(text))
    except LowtideError as error:
        raise typer.BadParameter(str(error)) from None


def valid_planner(name: str) -> str:
    known = planner_names()
    if name not in known:
        raise typer.BadParameter(f"there is no planner '{name}': choose one of {', '.join(known)}")
    return name


def valid_planners(text: str | None) -> str | None:
    for name in several(text):
        valid_planner(name)
    return text


def several(names: str | None, default: Sequence[str] = ()) -> tuple[str, ...]:
    """`auto, mu-two` as names, each once."""
    return tuple(default if names is None else dict.fromkeys(name.strip() for name in names.split(",")))


def known_device(name: str | None) -> str | None:
    if name is not None and name.lower() not in GPUS:
        raise typer.BadParameter(f"no GPU called '{name}' is known here: choose one of {', '.join(GPUS)}")
    return None if name is None else name.lower()


def device_here(text: str | None) -> str | None:
    """Refuse a device that is not here before any work."""
    if text is None:
        return None
    from lowtide.zoo.placement import device_named

    try:
        return str(device_named(text))
    except LowtideError as error:
        raise typer.BadParameter(str(error)) from None
