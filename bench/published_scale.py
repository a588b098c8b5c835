"""Memory of one GPU of a mesh, predicted against what torchtitan published for Llama 3.1 on H100.

    python bench/published_scale.py [--only 8b] [--csv scale.csv]

Predicted from the settings alone: parameters in bfloat16, shards and reduction in float32, fused AdamW, eager
ops, torchtitan's own activation checkpointing (`full`: every block; `selective`: all but every second matrix
product, attention and reduce-scatters). No GPU is needed and no constant was chosen by these rows.
"""

import argparse
import csv
from collections import defaultdict
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from unittest import mock

import torch
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import lowtide
from lowtide.experiments.decoder_search import divided
from lowtide.experiments.mesh_steps import capture_part
from lowtide.facts import Step
from lowtide.facts.gpus import GPUS
from lowtide.facts.meshes import Mesh
from lowtide.planning.mesh_estimates import stage_load
from lowtide.planning.mesh_seconds import FIRST, LAST, WHOLE, Job, step_seconds
from lowtide.planning.repeated_graphs import RepeatedGraphsPlanner
from lowtide.planning.reserved_budget import baseline_reserved
from lowtide.planning.schedules import eager_timeline
from lowtide.planning.stages import CAPTURED_BLOCKS, StagePlanner, peak_of_timeline
from lowtide.zoo.decoder_parts import PartSize
from lowtide.zoo.decoders import DECODERS

aten = torch.ops.aten
KEPT = {
    aten._scaled_dot_product_flash_attention.default,
    torch.ops.lowtide_mesh.scatter_tokens.default,
    torch.ops.lowtide_mesh.ring_attention.default,
}


GPU = GPUS["h100-80g"]
SETTINGS = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
"""torchtitan's."""
UNTRIED = "lowtide.profiling.roofline.with_untried_ops"
"""Collectives here stand for real ones, which torchtitan computes again: no trial has to tell."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A published run: `local_batch` samples on each group of the mesh, in `micro_batches`.

    `published`: GiB of one GPU. `tokens_per_second`: of one GPU that computes in bfloat16 alone.
    """

    source: str
    model: str
    mesh: Mesh
    local_batch: int
    micro_batches: int = 1
    length: int = 8192
    checkpointing: str
    differs: str = ""
    published: float | None = None
    tokens_per_second: float = 0.0


F8 = "compile, float8"
EIGHT, SEVENTY, FOUR_HUNDRED = "llama3-8b", "llama3-70b", "llama3-405b"


def _fsdp(source: str, ranks: int, differs: str, published: float, tokens: float = 0.0) -> Row:
    return Row(
        source=source,
        model=EIGHT,
        mesh=Mesh(shards=ranks),
        local_batch=2,
        checkpointing="selective",
        differs=differs,
        published=published,
        tokens_per_second=tokens,
    )


def _long(source: str, model: str, context: int, published: float) -> Row:
    """A sequence that grows with the GPUs that it is divided among."""
    is_deep = model == FOUR_HUNDRED
    wide = 8 if is_deep else 1
    return Row(
        source=source,
        model=model,
        mesh=Mesh(
            shards=8 // context, context=context, tensor=8 if is_deep else 1, pipeline=8 if is_deep else 1
        ),
        local_batch=wide,
        micro_batches=wide,
        length=32768 * context,
        checkpointing="full",
        differs=f"{F8}, async TP" if is_deep else F8,
        published=published,
    )


def _divided(  # noqa: PLR0917  rows of a table
    source: str, mesh: Mesh, batch: int, how: str, differs: str, published: float | None, tokens: float = 0.0
) -> Row:
    model = {1: SEVENTY if mesh.shards == 32 else EIGHT, 8: FOUR_HUNDRED}[mesh.pipeline]
    return Row(
        source=source,
        model=model,
        mesh=mesh,
        local_batch=batch,
        micro_batches=mesh.pipeline,
        checkpointing=how,
        differs=differs,
        published=published,
        tokens_per_second=tokens,
    )


ROWS = (
    _fsdp("table 1", 8, "", 82.4, 5762),
    _fsdp("table 1", 8, "compile", 77.0, 6667),
    _fsdp("table 1", 8, F8, 76.8),
    *(_long("table 2", EIGHT, 2**i, gib) for i, gib in enumerate((83.9, 84.2, 84.0, 84.5))),
    _fsdp("table 3", 128, "", 67.0, 5605),
    _fsdp("table 3", 128, "compile", 62.0, 6514),
    _fsdp("table 3", 128, F8, 61.8),
    _divided("table 4", Mesh(shards=32, tensor=8), 16, "full", F8, 71.9),
    _divided("table 4", Mesh(shards=32, tensor=8), 16, "full", f"{F8}, async TP", 67.6),
    _divided("table 5", Mesh(shards=8, tensor=8, pipeline=8), 32, "full", f"{F8}, async TP", 82.5),
    *(_long("table 6", FOUR_HUNDRED, 2**i, gib) for i, gib in enumerate((75.3, 75.9, 77.1, 84.9))),
    _fsdp("H200", 32, F8, 47.96),
    _fsdp("H200", 64, F8, 46.97),
    _divided("async TP", Mesh(shards=32, tensor=8), 16, "full", "compile", None, 597.3),
    _divided("async TP", Mesh(shards=8, tensor=8), 12, "selective", "compile", None, 4378),
)


def policies(seen: dict[bool, int], ctx, op, *args, **kwargs):
    """torchtitan's: every second matrix product is computed again."""
    if op in KEPT:
        return CheckpointPolicy.MUST_SAVE
    if op in (aten.mm.default, aten.addmm.default):
        seen[ctx.is_recompute] += 1
        return CheckpointPolicy.MUST_SAVE if seen[ctx.is_recompute] % 2 else CheckpointPolicy.PREFER_RECOMPUTE
    return CheckpointPolicy.PREFER_RECOMPUTE


def selective_contexts():
    return create_selective_checkpoint_contexts(partial(policies, defaultdict(int)))


WRAPS = {
    "none": None,
    "full": partial(checkpoint, use_reentrant=False),
    "selective": partial(checkpoint, use_reentrant=False, context_fn=selective_contexts),
}


@dataclass(frozen=True, slots=True)
class Predicted:
    """The peak of the fullest stage as eager PyTorch runs it, what torch's allocator reserves then, and
    tokens per second; the last two only where one stage has all blocks."""

    peak_bytes: int
    reserved_bytes: int | None = None
    tokens_per_second: float = 0.0


def predicted(row: Row) -> Predicted:
    size, mesh = divided(DECODERS[row.model], length=row.length), row.mesh
    found = []
    for part in (WHOLE,) if mesh.pipeline == 1 else (FIRST, LAST):
        step = captured_step(row, part, blocks=CAPTURED_BLOCKS)
        load = stage_load(size, mesh, part, number=row.micro_batches)
        planner = StagePlanner(RepeatedGraphsPlanner(step))
        timeline = eager_timeline(step)
        found.append(peak_of_timeline(step, timeline, planner.blocks, load))
    if mesh.pipeline > 1:
        return Predicted(max(found))
    whole = captured_step(row, WHOLE, blocks=size.blocks)
    assert abs(eager_timeline(whole).peak_bytes / found[0] - 1) < 0.001
    plan = planner.best(1 << 60, load)
    assert plan is not None
    again = (timeline.seconds - step.seconds) / CAPTURED_BLOCKS
    plan = replace(plan, block_backward_seconds=plan.block_backward_seconds + again)
    batch = row.local_batch * mesh.data
    job = Job(gpu=GPU, gpus=mesh.gpus, batch=batch, budget_bytes=GPU.memory_bytes)
    seconds, _ = step_seconds(size, job, mesh, [plan], micro_batch=row.local_batch, number=1)
    return Predicted(
        found[0], baseline_reserved(whole, SETTINGS).reserved_bytes, batch * row.length / seconds / mesh.gpus
    )


def captured_step(row: Row, part: str, *, blocks: int) -> Step:
    mesh = row.mesh
    size = PartSize(
        model=DECODERS[row.model],
        length=row.length,
        blocks=blocks,
        tensor=mesh.tensor,
        context=mesh.context,
        is_first=part in (WHOLE, FIRST),
        is_last=part in (WHOLE, LAST),
    )
    micro_batch = row.local_batch // row.micro_batches
    captured = capture_part(size, micro_batch, gpu=GPU, wrap=WRAPS[row.checkpointing])
    with mock.patch(UNTRIED, lambda step, captured: step):
        return captured.step(mesh.parameter_ranks)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="")
    parser.add_argument("--csv", type=Path)
    options = parser.parse_args()
    # torchtitan computes collectives again, which lowtide's plans never do
    for name in ("gather_tokens", "scatter_tokens", "ring_attention"):
        lowtide.repeatable(f"lowtide_mesh::{name}")
    known: dict[object, Predicted] = {}
    lines = []
    for row in ROWS:
        if options.only not in f"{row.source} {row.model}":
            continue
        key = (row.model, row.mesh, row.local_batch, row.micro_batches, row.length, row.checkpointing)
        if key not in known:
            known[key] = predicted(row)
        one = known[key]
        best = (one.peak_bytes if one.reserved_bytes is None else one.reserved_bytes) / 2**30
        speed = one.tokens_per_second
        lines.append(
            {
                "run": row.source,
                "model": row.model,
                "mesh": row.mesh.label,
                "batch": f"{row.local_batch // row.micro_batches} x {row.micro_batches}",
                "length": f"{row.length:,}",
                "checkpointing": row.checkpointing,
                "differs": row.differs,
                "published": "" if row.published is None else f"{row.published:.1f}",
                "allocated": f"{one.peak_bytes / 2**30:.1f}",
                "reserved": "" if one.reserved_bytes is None else f"{best:.1f}",
                "error": "" if row.published is None else f"{best / row.published - 1:+.1%}",
                "tokens/s": f"{row.tokens_per_second:,.0f}" if row.tokens_per_second else "",
                "estimated": f"{speed:,.0f}" if row.tokens_per_second else "",
                "ratio": f"{speed / row.tokens_per_second:.2f}" if row.tokens_per_second else "",
            }
        )
        if len(lines) == 1:
            print("| " + " | ".join(lines[0]) + " |\n|" + "---|" * len(lines[0]))
        print("| " + " | ".join(lines[-1].values()) + " |", flush=True)
    if options.csv:
        with options.csv.open("w", newline="") as file:
            writer = csv.DictWriter(file, fieldnames=list(lines[0]))
            writer.writeheader()
            writer.writerows(lines)


if __name__ == "__main__":
    main()
