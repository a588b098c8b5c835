"""What fits on one of many GPUs, and which mesh of them is the fastest: decoders, on paper.

    python bench/scale.py --budget 40GiB [--models gpt-7b,llama3-70b] [--gpus 8,64,512,4096] [--csv scale.csv]
    python bench/scale.py --search [--models llama3-70b] [--gpus 64,512,4096] [--csv scale.csv]

Nothing is run and no parameter is allocated: models and batches are fake tensors in bfloat16, parameters are
stored and reduced in float32, AdamW is fused, times are those of an absent GPU. Each GPU has `--batch-size`
samples. Without `--search` FSDP2 divides parameters among all GPUs; with it, samples, parameters, layers,
blocks and the sequence are divided in all ways, and the fastest is a row. Four of the blocks are traced.
"""

import argparse
import csv
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from lowtide.experiments.decoder_search import search_decoder
from lowtide.experiments.mesh_steps import capture_part
from lowtide.facts.auto_budget import gpu_budget
from lowtide.facts.gpus import GPUS
from lowtide.facts.sizes import parse_size
from lowtide.planning.mesh_seconds import Job
from lowtide.planning.stages import CAPTURED_BLOCKS, StageLoad
from lowtide.units import format_size
from lowtide.zoo.decoder_parts import PartSize
from lowtide.zoo.decoders import DECODERS, DecoderSize

Row = dict[str, str]


def sharded_rows(model: DecoderSize, gpus: list[int], options: argparse.Namespace) -> Iterator[Row]:
    """FSDP2 among all GPUs, for each number of them; the graphs are captured once."""
    length = options.sequence_length or model.length
    size = PartSize(model=model, length=length, blocks=CAPTURED_BLOCKS)
    captured = capture_part(size, options.batch_size, gpu=GPUS[options.device])
    for number in gpus:
        planner, load = captured.planner(number), StageLoad(blocks=model.blocks)
        lowest = planner.lowest(load)
        chosen = planner.best(budget_bytes(options), load)
        seconds = model.blocks * (lowest.block_forward_seconds + lowest.block_backward_seconds)
        yield {
            "model": model.name,
            "GPUs": str(number),
            "without a plan": format_size(lowest.unplanned_peak_bytes),
            "floor": format_size(lowest.peak_bytes),
            "peak": format_size(chosen.peak_bytes) if chosen else "does not fit",
            "recompute": f"{chosen.recompute_seconds / seconds:.1%}" if chosen else "",
        }


def searched_rows(model: DecoderSize, gpus: list[int], options: argparse.Namespace) -> Iterator[Row]:
    """The fastest mesh, for each number of GPUs, and of how many candidates."""
    length = options.sequence_length or model.length
    for number in gpus:
        job = Job(
            gpu=GPUS[options.device],
            gpus=number,
            batch=options.batch_size * number,
            budget_bytes=budget_bytes(options),
        )
        found = search_decoder(model, job, length=length, fastest=1)
        best = found.rows[0]
        yield {
            "model": model.name,
            "GPUs": str(number),
            "mesh": best.mesh.label if best.fits else "none fits",
            "micro-batches": f"{best.micro_batch} x {best.micro_batches}",
            "peak": format_size(best.peak_bytes or best.floor_bytes),
            "recompute": f"{best.recompute_share:.1%}",
            "waits": f"{best.waiting_share:.1%}",
            "tokens/s per GPU": f"{best.samples_per_second * length / number:,.0f}",
            "candidates": str(found.candidates),
        }


def budget_bytes(options: argparse.Namespace) -> int:
    return parse_size(options.budget) if options.budget else gpu_budget(GPUS[options.device]).nbytes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--budget", default="")
    parser.add_argument("--models", default=",".join(DECODERS))
    parser.add_argument("--gpus", default="8,64,512,4096")
    parser.add_argument("--device", default="h100-80g", choices=sorted(GPUS))
    parser.add_argument("--batch-size", type=int, default=4, help="samples of each GPU")
    parser.add_argument("--sequence-length", type=int)
    parser.add_argument("--search", action="store_true")
    parser.add_argument("--csv", type=Path)
    options = parser.parse_args()
    gpus = [int(number) for number in options.gpus.split(",")]
    rows: list[Row] = []
    for name in options.models.split(","):
        start = time.perf_counter()
        for row in (searched_rows if options.search else sharded_rows)(DECODERS[name], gpus, options):
            rows.append(row)
            if len(rows) == 1:
                print("| " + " | ".join(row) + " |\n|" + "---|" * len(row))
            print("| " + " | ".join(row.values()) + " |", flush=True)
        print(f"{name}: {time.perf_counter() - start:.1f} s", file=sys.stderr)
    if options.csv:
        with options.csv.open("w", newline="") as file:
            writer = csv.DictWriter(file, fieldnames=list(rows[0]))
            writer.writeheader()
            writer.writerows(rows)


if __name__ == "__main__":
    main()
