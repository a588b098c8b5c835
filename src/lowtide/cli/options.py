"""The options that commands share: their types, with help texts, checks and completions."""

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from lowtide.cli.option_values import (
    device_here,
    devices,
    known_device,
    live_budget,
    number_of,
    optimizers,
    planners,
    sources,
    targets,
    valid_budget,
    valid_offload,
    valid_offload_what,
    valid_optional_budget,
    valid_planner,
    valid_planners,
    valid_rounds,
    valid_size,
)
from lowtide.facts.gpus import GPUS
from lowtide.planning.registry import planner_names
from lowtide.zoo.decoders import DECODERS


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
        callback=valid_budget,
    ),
]
OptionalBudget = Annotated[
    str | None,
    typer.Option(
        "--budget",
        metavar="SIZE",
        help="Largest peak that the step may have: 8GiB, 500MB, 60% of the baseline's peak, or auto: "
        "what the device has free. "
        "'20GiB reserved': of what an accelerator's allocator reserves. --search alone needs none.",
        show_default=False,
        callback=valid_optional_budget,
    ),
]
LiveBudget = Annotated[
    str,
    typer.Option(
        metavar="SIZE",
        help="Largest peak that the step may have: 8GiB, 500MB, 60% of the baseline's peak, or auto: "
        "what the device has free.",
        show_default=False,
        callback=live_budget,
    ),
]
MemoryLimit = Annotated[
    str,
    typer.Option(
        metavar="SIZE",
        help="Memory that profiling itself may take; larger ops are scaled.",
        callback=valid_size,
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
Gpus = Annotated[
    str | None,
    typer.Option(
        metavar="N",
        help="How many GPUs --search divides a step among.",
        callback=number_of("GPUs", 64),
        show_default=False,
    ),
]
SearchMeshes = Annotated[
    bool,
    typer.Option(
        "--search",
        help="Find the fastest mesh of --gpus of a --device, none of which has to be here: how samples and "
        "parameters are divided, in which micro-batches, with which plan. Of "
        f"{', '.join(DECODERS)} also layers, blocks and the sequence. --batch-size is that of all GPUs.",
    ),
]
Pipeline = Annotated[
    str | None,
    typer.Option(
        metavar="N",
        help="Cut the model into so many stages of a pipeline (1F1B), and plan each of them for the budget.",
        callback=number_of("stages", 4),
        show_default=False,
    ),
]
Microbatches = Annotated[
    str | None,
    typer.Option(
        metavar="N",
        help="How many micro-batches a step of the --pipeline has; --batch-size is that of the step.",
        callback=number_of("micro-batches", 8),
        show_default=False,
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
        callback=known_device,
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
        callback=device_here,
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
        callback=valid_offload,
    ),
]
OffloadWhat = Annotated[
    str,
    typer.Option(
        metavar="WHAT",
        help="What may wait there, with commas between: activations, state (the optimizer's), frozen "
        "(weights that are not trained), parameters.",
        callback=valid_offload_what,
    ),
]
Rounds = Annotated[
    str,
    typer.Option(
        metavar="WHAT",
        help="What may run with other bits than eager's: head, a linear layer with its cross entropy or "
        "log-probabilities in chunks of rows, so that no tensor has all logits. The one option that is not "
        "exact.",
        callback=valid_rounds,
    ),
]
Swap = Annotated[str, typer.Option(hidden=True, callback=valid_offload)]
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
        callback=valid_planner,
    ),
]
Planners = Annotated[
    str | None,
    typer.Option(
        metavar="NAMES",
        help=f"Planners to set side by side, with commas between them: {', '.join(planner_names())}.",
        callback=valid_planners,
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
