"""A command as a function of its terminal and of groups of options.

A command takes its terminal, and options that belong together as one frozen dataclass. `command`
turns such a function into one with a parameter for each option, for typer:

    @command                                                  def profile(
    def profile(                                                  target: TargetText,
        terminal: Terminal,                                       *,
        target: TargetText,                                       image_size: ImageSize = None,
        *,                                             ->         ...
        step: Annotated[StepOptions, offers("mode")],             mode: Mode = ProfileMode.OPS,
        output: OutputOptions,                                    folder: Folder = None,
    ) -> None:                                                    ...
                                                                  verbose: Verbose = 0,
                                                              ) -> None:
"""

import inspect
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields, is_dataclass
from functools import wraps
from pathlib import Path
from typing import Any, get_args, get_type_hints

from lowtide.cli.options import Folder, Force, Json, Quiet, Verbose
from lowtide.cli.terminal import claim_folder, session


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputOptions:
    """The folder to write files into, if any."""

    folder: Folder = None
    force: Force = False

    def claim(self, *names: str) -> Path | None:
        """The folder, made if missing; an error where one of `names` exists, unless forced."""
        return claim_folder(self.folder, names, force=self.force)


@dataclass(frozen=True, slots=True, kw_only=True)
class TerminalOptions:
    as_json: Json = False
    quiet: Quiet = False
    verbose: Verbose = 0


@dataclass(frozen=True, slots=True)
class Offered:
    """The fields of a group that a command has as options; by default all."""

    names: tuple[str, ...]


def command(function: Callable[..., None]) -> Callable[..., None]:
    """The function for typer: an option for each field of its groups, run inside a session."""
    _, *own = inspect.signature(function).parameters.values()
    parameters: list[inspect.Parameter] = []
    groups: dict[str, tuple[Callable[..., Any], list[str]]] = {}
    for parameter in (*own, _keyword(_SESSION, TerminalOptions)):
        kind, *marks = get_args(parameter.annotation) or (parameter.annotation,)
        if not (isinstance(kind, type) and is_dataclass(kind)):
            parameters.append(parameter)
            continue
        offered = next((mark.names for mark in marks if isinstance(mark, Offered)), None)
        found = [field for field in fields(kind) if offered is None or field.name in offered]
        hints = get_type_hints(kind, include_extras=True)
        parameters += [_keyword(field.name, hints[field.name], field.default) for field in found]
        groups[parameter.name] = kind, [field.name for field in found]

    @wraps(function)
    def flat(**values: Any) -> None:
        for name, (kind, options) in groups.items():
            values[name] = kind(**{option: values.pop(option) for option in options})
        with session(**asdict(values.pop(_SESSION))) as terminal:
            function(terminal, **values)

    flat.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    return flat


_SESSION = "session"


def _keyword(name: str, annotation: Any, default: Any = inspect.Parameter.empty) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)
