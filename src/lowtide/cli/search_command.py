"""`lowtide plan TARGET --gpus N --device GPU --search`: the fastest mesh of GPUs that are not here."""

from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

import typer
from rich.console import RenderableType
from rich.text import Text

from lowtide.cli.exit_codes import Exit, UsageError
from lowtide.cli.option_values import bytes_budget
from lowtide.cli.sources import StepOptions, profile_target
from lowtide.cli.terminal import Terminal, table
from lowtide.errors import LowtideError, TargetError
from lowtide.facts.auto_budget import gpu_budget
from lowtide.facts.gpus import GPUS, Gpu
from lowtide.facts.sizes import is_auto, parse_size
from lowtide.planning.mesh_estimates import PARAMETERS, MeshRow
from lowtide.planning.mesh_search import MeshSearch
from lowtide.planning.mesh_seconds import Job
from lowtide.report.style import size
from lowtide.zoo.decoders import DECODERS, DecoderSize
from lowtide.zoo.targets import check_target

if TYPE_CHECKING:
    from lowtide.profiles import Profile

SHOWN = 10
ALLOWED = (
    "--device",
    "--image-size",
    "--sequence-length",
    "--optimizer",
    "--seed",
    "--memory-limit",
    "--no-cache",
)
ESTIMATED = (
    "all estimated: nothing was measured, and no GPU was there. Ops and links run at three quarters of "
    "published rates, so speeds are too high and their order is what counts; peaks leave out what other "
    "libraries allocate"
)


def search_command(
    terminal: Terminal,
    source: str,
    *,
    gpus: int | None,
    batch_size: int | None,
    budget: str | None,
    step: StepOptions,
    others: tuple[str, ...],
) -> None:
    """MeshSearch, show the meshes that fit, and exit with 3 where none does. `others`: more options that were
    given."""
    job = _job(source, gpus=gpus, batch_size=batch_size, budget=budget, step=step, others=others)
    decoder = DECODERS.get(source)
    if decoder is None:
        _check(source)
    found, unit, each = (
        _search_target(terminal, source, job, step)
        if decoder is None
        else _search_decoder(terminal, decoder, job, step)
    )
    if not found.candidates:
        raise LowtideError(
            f"a batch of {job.batch} cannot be divided among {job.gpus} GPUs: give a multiple of {job.gpus}, "
            f"such as -b {-(-job.batch // job.gpus) * job.gpus}"
        )
    terminal.data(search_data(found, job, name=source, unit=unit, each=each))
    terminal.show(*search_tables(found, job, name=source, unit=unit, each=each))
    raise typer.Exit(Exit.DONE if any(row.fits for row in found.rows) else Exit.DOES_NOT_FIT)


def _job(
    source: str,
    *,
    gpus: int | None,
    batch_size: int | None,
    budget: str | None,
    step: StepOptions,
    others: tuple[str, ...],
) -> Job:
    if gpus is None:
        raise UsageError("--search among how many GPUs? Say --gpus N, as in --gpus 64")
    if step.device is None:
        raise UsageError(f"--search estimates for which GPU? Say --device NAME, one of {', '.join(GPUS)}")
    if batch_size is None:
        raise UsageError(
            f"how many samples in a step of all {gpus} GPUs? Say --batch-size N, as in -b {4 * gpus}"
        )
    if source.endswith(".json"):
        raise UsageError(
            f"'{source}' is profiled for one batch size, and --search tries several: give a TARGET instead"
        )
    given = [*[name for name in step.given if name not in ALLOWED], *others]
    if given:
        raise UsageError(f"{given[0]} is for one plan, and --search makes many: leave one of them out")
    gpu = GPUS[step.device]
    return Job(gpu=gpu, gpus=gpus, batch=batch_size, budget_bytes=_budget_bytes(budget, gpu))


def _check(source: str) -> None:
    try:
        check_target(source)
    except TargetError as error:
        if ":" in source or "/" in source:
            raise
        raise TargetError(f"{error}; --search also knows {', '.join(DECODERS)}") from None


def _budget_bytes(budget: str | None, gpu: Gpu) -> int:
    if budget is None or is_auto(budget):
        return gpu_budget(gpu).nbytes
    try:
        return parse_size(bytes_budget(budget))
    except typer.BadParameter as error:
        raise UsageError(f"--budget {error.message}") from None


def _search_decoder(
    terminal: Terminal, decoder: DecoderSize, job: Job, step: StepOptions
) -> tuple[MeshSearch, str, int]:
    if step.optimizer is not None:
        raise UsageError(
            f"--optimizer {step.optimizer}: {decoder.name} is searched with AdamW, as published runs of it "
            "are; leave --optimizer out"
        )
    if step.image_size is not None:
        raise UsageError(f"--image-size {step.image_size}: {decoder.name} has none, say --sequence-length")
    from lowtide.experiments.decoder_search import search_decoder

    length = step.sequence_length or decoder.length
    with terminal.counting(f"searching {job.gpus} x {job.gpu.name}") as progress:
        found = search_decoder(decoder, job, length=length, progress=progress)
    return found, "tokens", length


def _search_target(
    terminal: Terminal, source: str, job: Job, step: StepOptions
) -> tuple[MeshSearch, str, int]:
    from lowtide.experiments.target_search import search_target

    def find(micro_batch: int, shards: int) -> "tuple[Profile, int, int]":
        profile = profile_target(step.spec(source, micro_batch), terminal, replace(step, ranks=shards))
        parameters = sum(s.nbytes for s in profile.step.storages if s.static and s.kind.value == "parameter")
        return profile, parameters * shards, parameters * shards

    return search_target(job, find), "samples", 1


def search_data(found: MeshSearch, job: Job, *, name: str, unit: str, each: int) -> dict[str, Any]:
    return {
        "target": name,
        "device": job.gpu.label,
        "gpus": job.gpus,
        "batch": job.batch,
        "budget_bytes": job.budget_bytes,
        "unit": unit,
        "candidates": found.candidates,
        "estimated": True,
        "rows": [
            {
                **asdict(row),
                "label": row.mesh.label,
                "fits": row.fits,
                f"{unit}_per_second": row.samples_per_second * each,
            }
            for row in found.rows
        ],
    }


def search_tables(found: MeshSearch, job: Job, *, name: str, unit: str, each: int) -> list[RenderableType]:
    fitting = [row for row in found.rows if row.fits]
    refused = [row for row in found.rows if not row.fits]
    samples = f"{job.batch} x {each} tokens" if each > 1 else str(job.batch)
    title = f"{name}, batch {samples}, on {job.gpus} x {job.gpu.label}, {size(job.budget_bytes)} on each"
    shown: list[RenderableType] = []
    if fitting:
        columns = ("mesh", "micro-batches>", "peak>", "recompute>", "waits>", f"{unit}/s>")
        shown.append(table(title, columns, [_fitting(row, each) for row in fitting[:SHOWN]]))
    else:
        less = ", or a smaller -b" if any(row.reason != PARAMETERS for row in refused) else ""
        shown.append(Text(f"{title}: no mesh fits. Give more --gpus{less}"))
    if refused:
        reasons = ("does not fit", "micro-batch>", "needs at least>", "for")
        shown.append(table("", reasons, [_refused(row) for row in refused[:SHOWN]]))
    if found.candidates > len(found.rows):
        shown.append(
            Text(
                f"looked at {len(found.rows)} of {found.candidates} combinations of mesh and micro-batch; "
                "the others are expected to be slower, or need more than one that does not fit"
            )
        )
    return [*shown, Text(_legend(unit)), Text(ESTIMATED)]


def _legend(unit: str) -> str:
    words = "dp: replicas x shards of the parameters (FSDP2)"
    if unit == "tokens":
        words += "; tp, pp, cp: layers, blocks and sequence divided"
    return f"{words}; micro-batches: samples x number of them; waits: for parameters, and in a pipeline"


def _fitting(row: MeshRow, each: int) -> tuple[str, ...]:
    return (
        row.mesh.label,
        f"{row.micro_batch} x {row.micro_batches}",
        size(row.peak_bytes),
        f"{row.recompute_share:.1%}",
        f"{row.waiting_share:.1%}",
        _rate(row.samples_per_second * each),
    )


def _refused(row: MeshRow) -> tuple[str, ...]:
    return row.mesh.label, str(row.micro_batch), size(row.floor_bytes), row.reason


def _rate(per_second: float) -> str:
    return f"{per_second:,.0f}" if per_second >= 100 else f"{per_second:.3g}"
