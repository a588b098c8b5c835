"""Memory of one GPU of a mesh, predicted against what torchtitan published for Llama 3.1 on H100.

    python bench/published_scale.py [--only 8b] [--csv scale.csv]

Predicted from the settings alone: parameters in bfloat16, shards and reduction in float32, fused AdamW, eager
ops, torchtitan's own activation checkpointing (`full`: every block; `selective`: all but every second matrix
product, attention and reduce-scatters). No GPU is needed and no constant was chosen by these rows.
"""

import argparse
import csv
from collections import defaultdict
from dataclasses import dataclass
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
from lowtide.planning.mesh_seconds import FIRST, LAST, WHOLE
from lowtide.planning.repeated_graphs import RepeatedGraphsPlanner
from lowtide.planning.reserved_budget import baseline_reserved
from lowtide.planning.schedules import eager_timeline
from lowtide.planning.stages import CAPTURED_BLOCKS, peak_of_timeline
from lowtide.zoo.decoder_parts import PartSize
from lowtide.zoo.decoders import DECODERS

aten = torch.ops.aten
KEPT = {
    aten._scaled_dot_product_flash_attention.default,
    torch.ops.lowtide_mesh.scatter_tokens.default,
    torch.ops.lowtide_mesh.ring_attention.default,
}


SETTINGS = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
"""torchtitan's."""
UNTRIED = "lowtide.profiling.roofline.with_untried_ops"
"""Collectives here stand for real ones, which torchtitan computes again: no trial has to tell."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A published run. `local_batch` samples on each group of the mesh, in `micro_batches`."""

    source: str
    model: str
    mesh: Mesh
    local_batch: int
    micro_batches: int = 1
    length: int = 8192
    checkpointing: str
    differs: str = ""
    published: float | None = None


F8 = "compile, float8"
ROWS = (
    Row(source="table 1", model="llama3-8b", mesh=Mesh(shards=8), local_batch=2, checkpointing="selective"),
    Row(
        source="table 1",
        model="llama3-8b",
        mesh=Mesh(shards=8),
        local_batch=2,
        checkpointing="selective",
        differs="compile",
    ),
    Row(
        source="table 1",
        model="llama3-8b",
        mesh=Mesh(shards=8),
        local_batch=2,
        checkpointing="selective",
        differs=F8,
    ),
    *(
        Row(
            source="table 2",
            model="llama3-8b",
            mesh=Mesh(shards=8 // cp, context=cp),
            local_batch=1,
            length=32768 * cp,
            checkpointing="full",
            differs=F8,
        )
        for cp in (1, 2, 4, 8)
    ),
    Row(source="table 3", model="llama3-8b", mesh=Mesh(shards=128), local_batch=2, checkpointing="selective"),
    Row(
        source="table 3",
        model="llama3-8b",
        mesh=Mesh(shards=128),
        local_batch=2,
        checkpointing="selective",
        differs="compile",
    ),
    Row(
        source="table 3",
        model="llama3-8b",
        mesh=Mesh(shards=128),
        local_batch=2,
        checkpointing="selective",
        differs=F8,
    ),
    Row(
        source="table 4",
        model="llama3-70b",
        mesh=Mesh(shards=32, tensor=8),
        local_batch=16,
        checkpointing="full",
        differs=F8,
    ),
    Row(
        source="table 5",
        model="llama3-405b",
        mesh=Mesh(shards=8, tensor=8, pipeline=8),
        local_batch=32,
        micro_batches=8,
        checkpointing="full",
        differs=f"{F8}, async TP",
    ),
    *(
        Row(
            source="table 6",
            model="llama3-405b",
            mesh=Mesh(shards=8 // cp, context=cp, tensor=8, pipeline=8),
            local_batch=8,
            micro_batches=8,
            length=32768 * cp,
            checkpointing="full",
            differs=f"{F8}, async TP",
        )
        for cp in (1, 2, 4, 8)
    ),
    *(
        Row(
            source="H200, Trainy",
            model="llama3-8b",
            mesh=Mesh(shards=shards),
            local_batch=2,
            checkpointing="selective",
            differs=F8,
        )
        for shards in (32, 64)
    ),
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
    """The peak of the fullest stage as eager PyTorch runs it, and what torch's allocator reserves then; the
    latter only where one stage has all blocks."""

    peak_bytes: int
    reserved_bytes: int | None


def predicted(row: Row) -> Predicted:
    model, mesh = DECODERS[row.model], row.mesh
    found = []
    for part in (WHOLE,) if mesh.pipeline == 1 else (FIRST, LAST):
        step = captured_step(row, part, blocks=CAPTURED_BLOCKS)
        load = stage_load(divided(model, length=row.length), mesh, part, number=row.micro_batches)
        blocks = max(RepeatedGraphsPlanner(step).kinds, key=len)
        assert len(blocks) == CAPTURED_BLOCKS
        found.append(peak_of_timeline(step, eager_timeline(step), blocks, load))
    reserved = None
    if mesh.pipeline == 1:
        whole = captured_step(row, WHOLE, blocks=model.blocks)
        assert abs(eager_timeline(whole).peak_bytes / found[0] - 1) < 0.001
        reserved = baseline_reserved(
            whole, {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
        ).reserved_bytes
    return Predicted(max(found), reserved)


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
    captured = capture_part(size, micro_batch, gpu=GPUS["h100-80g"], wrap=WRAPS[row.checkpointing])
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
        gib, reserved = known[key].peak_bytes / 2**30, known[key].reserved_bytes
        best = gib if reserved is None else reserved / 2**30
        error = "" if row.published is None else f"{best / row.published - 1:+.1%}"
        lines.append(
            {
                "run": row.source,
                "model": row.model,
                "mesh": row.mesh.label,
                "batch": f"{row.local_batch}",
                "length": str(row.length),
                "checkpointing": row.checkpointing,
                "differs": row.differs,
                "published": "" if row.published is None else f"{row.published:.1f}",
                "allocated": f"{gib:.1f}",
                "reserved": "" if reserved is None else f"{best:.1f}",
                "error": error,
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
