"""Plans of models that FSDP2 shards: time per step, peaks and results, next to plain FSDP2.

    python bench/fsdp2.py --ranks 2 --budget 70% --target tiny-gpt2 --batch-size 32

Every rank trains the same model plainly and by plans, step by step in turn, so that all times are of one
run; figures are those of the rank with the most. `same` says whether all losses, and parameters after the
last step, are those of plain FSDP2 to the last bit, on every rank.
"""

import argparse
import copy
import csv
import os
import statistics
import tempfile
import time
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import multiprocessing, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import lowtide
from lowtide.parallel.simulated_sharding import blocks_of
from lowtide.runtime.apply import plan_of
from lowtide.torch_compat.dispatch import local
from lowtide.verification.measure_step import peak_above_start, static_bytes, train_step
from lowtide.zoo.targets import Target, TargetSpec

Row = dict[str, Any]
BUDGETS = {"plain": None, "100%": "100%"}


@dataclass(slots=True)
class Trained:
    model: nn.Module
    optimizer: torch.optim.Optimizer
    plan: lowtide.Plan | None
    seconds: list[float] = field(default_factory=list)
    losses: list[torch.Tensor] = field(default_factory=list)


def _build(target: Target, budget: str | None, options: argparse.Namespace) -> Trained:
    model = copy.deepcopy(target.model)
    settings: dict[str, Any] = {"reshard_after_forward": not options.keep_whole}
    if options.bf16:
        settings["mp_policy"] = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    for block in blocks_of(model):
        fully_shard(block, **settings)
    fully_shard(model, **settings)
    optimizer = torch.optim.AdamW(model.parameters())
    if budget is not None:
        lowtide.checkpoint(model, target.batch, budget=budget, optimizer=optimizer, loss=target.loss)
    return Trained(model, optimizer, plan_of(model))


def _run(rank: int, options: argparse.Namespace, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/group",
        rank=rank,
        world_size=options.ranks,
        timeout=timedelta(minutes=30),
    )
    torch.manual_seed(0)
    target = TargetSpec(text=options.target, batch_size=options.batch_size).load()
    budgets = {**BUDGETS, options.budget: options.budget}
    ways = {name: _build(target, budget, options) for name, budget in budgets.items()}
    for number in range(options.warm_up + options.steps):
        for way in ways.values():
            torch.manual_seed(number)
            dist.barrier()
            start = time.perf_counter()
            way.losses.append(train_step(way.model, target.batch, way.optimizer, target.loss))
            way.seconds.append(time.perf_counter() - start)
    same = {name: _is_same(way, ways["plain"]) for name, way in ways.items()}  # before any trains on
    rows = [{**_row(name, way, target, options), "same": same[name]} for name, way in ways.items()]
    gathered: list[Any] = [None] * options.ranks
    dist.all_gather_object(gathered, rows)
    if rank == 0:
        _report(gathered, options)
    dist.barrier()
    dist.destroy_process_group()


def _is_same(way: Trained, plain: Trained) -> bool:
    pairs = zip(way.model.parameters(), plain.model.parameters(), strict=True)
    parameters = all(torch.equal(local(one), local(other)) for one, other in pairs)
    return parameters and all(map(torch.equal, way.losses, plain.losses))


def _row(name: str, way: Trained, target: Target, options: argparse.Namespace) -> Row:
    step = partial(train_step, way.model, target.batch, way.optimizer, target.loss)
    # the least of three: gloo frees its copies in threads of its own, now and then too late
    above = min(peak_above_start(step) for _ in range(3))
    return {
        "model": name,
        "seconds": statistics.median(way.seconds[options.warm_up :]),
        "predicted_bytes": way.plan.peak_bytes if way.plan is not None else 0,
        "budget_bytes": way.plan.budget_bytes if way.plan is not None else 0,
        "measured_bytes": static_bytes(way.model, target.batch, way.optimizer) + above,
    }


def _report(ranks: list[list[Row]], options: argparse.Namespace) -> None:
    rows = []
    for each in zip(*ranks, strict=True):
        most = {name: max(row[name] for row in each) for name in ("seconds", "measured_bytes")}
        rows.append({**each[0], **most, "same": all(row["same"] for row in each)})
    for row in rows:
        print(
            f"{row['model']:>10}  {row['seconds']:7.3f} s  x{row['seconds'] / rows[0]['seconds']:5.3f}  "
            f"budget {row['budget_bytes'] / 2**20:7.1f} MiB  "
            f"predicted {row['predicted_bytes'] / 2**20:7.1f} MiB  "
            f"measured {row['measured_bytes'] / 2**20:7.1f} MiB  {'same' if row['same'] else 'different'}"
        )
    if options.output:
        with Path(options.output).open("w", newline="") as file:
            writer = csv.DictWriter(file, fieldnames=list(rows[0]))
            writer.writeheader()
            writer.writerows(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--target", default="tiny-gpt2")
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--budget", default="70%")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--warm-up", type=int, default=3)
    parser.add_argument("--keep-whole", action="store_true", help="reshard_after_forward=False")
    parser.add_argument("--bf16", action="store_true", help="MixedPrecisionPolicy: bfloat16, sums in float32")
    parser.add_argument("-o", "--output", default="")
    options = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    with tempfile.TemporaryDirectory() as folder:
        multiprocessing.spawn(_run, args=(options, folder), nprocs=options.ranks)


if __name__ == "__main__":
    main()
