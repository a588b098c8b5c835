"""The options that commands share: types, help texts and completions.

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
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, fields, is_dataclass
from enum import StrEnum
from functools import wraps
from pathlib import Path
from typing import Annotated, Any, get_args, get_type_hints

import typer

from lowtide.cli.terminal import claim_folder, session
from lowtide.errors import LowtideError
from lowtide.facts.gpus import GPUS
from lowtide.facts.plan import parse_offload
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


def _budget(text: str) -> str:
    """Refuse an invalid budget before any work; the peak is known only later."""
    return _read(text, lambda: check_budget(text))


def bytes_budget(text: str) -> str:
    """Refuse a share as well: each size has its own peak."""
    if text.strip().endswith("%"):
        raise typer.BadParameter(
            f"'{text}' is a share of one size's own peak, and here sizes differ: write bytes, such as 8GiB"
        )
    return _live_budget(text)


def _live_budget(text: str) -> str:
    """Refuse a budget of reserved bytes: sizes are compared by live bytes."""
    if split_reserved(text)[1]:
        raise typer.BadParameter(f"'{text}': sizes are compared by live bytes, so leave 'reserved' out")
    return _budget(text)


def bytes_budgets(text: str) -> str:
    """The same for several budgets, with commas between them."""
    for one in text.split(","):
        bytes_budget(one)
    return text


def live_budgets(text: str | None) -> str | None:
    """Budgets of live bytes, shares among them, with commas between; or none."""
    for one in several(text):
        _live_budget(one)
    return text


def _size(text: str) -> str:
    return _read(text, lambda: parse_size(text))


def optional_size(text: str) -> str:
    """Refuse an invalid size before any work."""
    return _size(text) if text else ""


def _read(text: str, read: Callable[[], object]) -> str:
    try:
        read()
    except BadSize as error:
        raise typer.BadParameter(str(error)) from None
    return text


def _offload(text: str) -> str:
    try:
        return str(parse_offload(text)) if text else ""
    except LowtideError as error:
        raise typer.BadParameter(str(error)) from None


def _planner(name: str) -> str:
    known = planner_names()
    if name not in known:
        raise typer.BadParameter(f"there is no planner '{name}': choose one of {', '.join(known)}")
    return name


def _planners(text: str | None) -> str | None:
    for name in several(text):
        _planner(name)
    return text


def several(names: str | None, default: Sequence[str] = ()) -> tuple[str, ...]:
    """`auto, mu-two` as names, each once."""
    return tuple(default if names is None else dict.fromkeys(name.strip() for name in names.split(",")))


def _device(name: str | None) -> str | None:
    if name is not None and name.lower() not in GPUS:
        raise typer.BadParameter(f"no GPU called '{name}' is known here: choose one of {', '.join(GPUS)}")
    return None if name is None else name.lower()


def _on(text: str | None) -> str | None:
    """Refuse a device that is not here before any work."""
    if text is None:
        return None
    from lowtide.zoo.placement import device_named

    try:
        return str(device_named(text))
    except LowtideError as error:
        raise typer.BadParameter(str(error)) from None


class ProfileMode(StrEnum):
    OPS = "ops"
    RUN = "run"


class ShardKind(StrEnum):
    FSDP2 = "fsdp2"


class ExecutorName(StrEnum):
    EAGER = "eager"
    INDUCTOR = "inductor"


TargetText = Annotated[
    str,
    typer.Argument(
        metavar="TARGET",
        help="A built-in name (see `lowtide models`), file.py:factory or package.module:factory.",
        show_default=False,
        autocompletion=targets,
    ),
]
Source = Annotated[
    str,
    typer.Argument(
        metavar="SOURCE",
        help="A profile.json of `lowtide profile`, or a TARGET: a built-in name, file.py:factory or "
        "package.module:factory.",
        show_default=False,
        autocompletion=sources,
    ),
]
OptionalBatchSize = Annotated[
    int | None,
    typer.Option("--batch-size", "-b", metavar="N", min=1, help="Samples in a batch, for a TARGET."),
]
BatchSize = Annotated[int, typer.Option("--batch-size", "-b", metavar="N", min=1, help="Samples in a batch.")]
ImageSize = Annotated[
    int | None,
    typer.Option(metavar="N", min=1, help="Height and width of images, for built-in targets that take them."),
]
SequenceLength = Annotated[
    int | None,
    typer.Option(metavar="N", min=1, help="Tokens in a sequence, for built-in targets that take them."),
]
Optimizer = Annotated[
    str | None,
    typer.Option(
        metavar="NAME",
        help="adam, adamw, sgd or none; a variant after a colon, as in adam:fused (foreach, fused, single). "
        "Without it: adam for a built-in target, the factory's own otherwise.",
        autocompletion=optimizers,
    ),
]
Seed = Annotated[int, typer.Option(metavar="N", help="Decides random weights and data.")]
Budget = Annotated[
    str,
    typer.Option(
        metavar="SIZE",
        help="Largest peak that the step may have: 8GiB, 500MB, 60% of the baseline's peak, or auto: "
        "what the device has free. "
        "'20GiB reserved': of what an accelerator's allocator reserves.",
        show_default=False,
        callback=_budget,
    ),
]
LiveBudget = Annotated[
    str,
    typer.Option(
        metavar="SIZE",
        help="Largest peak that the step may have: 8GiB, 500MB, 60% of the baseline's peak, or auto: "
        "what the device has free.",
        show_default=False,
        callback=_live_budget,
    ),
]
MemoryLimit = Annotated[
    str,
    typer.Option(
        metavar="SIZE",
        help="Memory that profiling itself may take; larger ops are scaled.",
        callback=_size,
    ),
]
Mode = Annotated[
    ProfileMode,
    typer.Option(
        help="ops: time each distinct op alone, in little memory. run: run the whole step, which takes "
        "its memory."
    ),
]
Ranks = Annotated[
    int | None,
    typer.Option(
        metavar="N",
        min=1,
        help="Plan for one of so many processes that share the parameters of a TARGET; none has to run.",
    ),
]
Shard = Annotated[
    ShardKind,
    typer.Option(help="How --ranks share parameters. fsdp2: fully_shard on every block and on the model."),
]
Device = Annotated[
    str | None,
    typer.Option(
        metavar="NAME",
        help=f"Estimate for a GPU that is not here: {', '.join(GPUS)}.",
        autocompletion=devices,
        callback=_device,
        show_default=False,
    ),
]
On = Annotated[
    str | None,
    typer.Option(
        "--on",
        metavar="DEVICE",
        help="Device of this machine: cpu, cuda, cuda:1. Without it: the CPU for a built-in target, the "
        "factory's own choice otherwise.",
        callback=_on,
        show_default=False,
    ),
]
NoCache = Annotated[bool, typer.Option("--no-cache", help="Time every op anew: use no earlier times.")]
StepInBackward = Annotated[
    bool,
    typer.Option(
        "--step-in-backward",
        help="Update each parameter as soon as its gradient is final, and free the gradient. Not for loops "
        "that clip by norm, scale the loss or accumulate gradients.",
    ),
]
Offload = Annotated[
    str,
    typer.Option(
        metavar="STORE",
        help="Let activations wait outside of device memory: disk:FOLDER, a folder on a local disk; or host, "
        "the host's memory, for a model on an accelerator.",
        callback=_offload,
    ),
]
Swap = Annotated[str, typer.Option(hidden=True, callback=_offload)]
Executor = Annotated[
    ExecutorName,
    typer.Option(
        help="What runs the graphs. eager: op by op. inductor: code that Inductor compiles, which needs a "
        "C++ compiler."
    ),
]
TimedPairs = Annotated[
    int | None,
    typer.Option(
        "--timed-runs",
        metavar="N",
        min=0,
        help="Steps to time, of the baseline and of the plan in turn. Without it: until the noise is below "
        "two points, or half a minute is spent.",
        show_default=False,
    ),
]
TimedRuns = Annotated[
    int, typer.Option(metavar="N", min=0, help="Steps to time, of the baseline and of the plan in turn.")
]
Planner = Annotated[
    str,
    typer.Option(
        metavar="NAME",
        help=f"One of {', '.join(planner_names())}.",
        autocompletion=planners,
        callback=_planner,
    ),
]
Planners = Annotated[
    str | None,
    typer.Option(
        metavar="NAMES",
        help=f"Planners to set side by side, with commas between them: {', '.join(planner_names())}.",
        callback=_planners,
        show_default=False,
    ),
]
Folder = Annotated[
    Path | None,
    typer.Option("-o", "--output", metavar="DIR", file_okay=False, help="Folder to write files into."),
]
RunFolder = Annotated[
    Path, typer.Option("-o", "--output", metavar="DIR", file_okay=False, help="Folder to write files into.")
]
Force = Annotated[bool, typer.Option("--force", help="Replace files that are there.")]
Json = Annotated[bool, typer.Option("--json", help="One JSON value on stdout instead of tables.")]
Quiet = Annotated[bool, typer.Option("-q", "--quiet", help="Nothing on stderr but errors.")]
Verbose = Annotated[
    int,
    typer.Option(
        "-v",
        "--verbose",
        count=True,
        help="Log each stage with its seconds, and show tracebacks; -vv: each decision, too.",
        show_default=False,
    ),
]


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
