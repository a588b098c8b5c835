"""Plans inside of DistributedDataParallel: time per step, peaks, and when each bucket is sent.

    python bench/ddp.py --ranks 2 --budget 70% --bucket-mb 0.5

Every rank trains the same model plainly and by plans, step by step in turn, so that all times are of one
run; figures are those of the slowest rank. `at the end` is a plan whose gradients all come at the end
of the backward pass, as without hand-over. Buckets: how much of the backward pass's ops had run when each
was sent, in percent.
"""

import argparse
import copy
import csv
import os
import statistics
import sys
import tempfile
import time
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import multiprocessing, nn
from torch.distributed import GradBucket
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils._python_dispatch import TorchDispatchMode

import lowtide
from lowtide.runtime import backend
from lowtide.verification.measure_step import peak_above_start, static_bytes, train_step
from lowtide.zoo.targets import TargetSpec

Row = dict[str, Any]


class Ops(TorchDispatchMode):
    """How many ops have run."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


def sent_at(model: DDP, batch: Any) -> list[int]:
    """Percent of the backward pass's ops that had run when each bucket was sent."""
    ops, seen = Ops(), []

    def hook(_state: object, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        seen.append(ops.count)
        bucket.buffer().div_(dist.get_world_size())
        work = dist.all_reduce(bucket.buffer(), async_op=True)
        return work.get_future().then(lambda done: done.value()[0])

    model.register_comm_hook(None, hook)
    loss = _loss(model, batch)
    with ops:
        loss.backward()
    model.zero_grad()
    return [100 * count // ops.count for count in seen]


def _loss(model: nn.Module, batch: Any) -> torch.Tensor:
    output = model(**batch) if isinstance(batch, dict) else model(*batch)
    loss: torch.Tensor = output.loss if hasattr(output, "loss") else output
    return loss if loss.dim() == 0 else loss.float().mean()


def _run(rank: int, options: argparse.Namespace, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/group",
        rank=rank,
        world_size=options.ranks,
        timeout=timedelta(minutes=10),
    )
    torch.manual_seed(0)
    target = TargetSpec(text=options.target, batch_size=options.batch_size).load()
    models: dict[str, tuple[DDP, torch.optim.Optimizer, lowtide.Plan | None]] = {}
    for name, budget in (("plain", None), ("100%", "100%"), ("at the end", "100%"), ("plan", options.budget)):
        inner = copy.deepcopy(target.model)
        optimizer = torch.optim.SGD(inner.parameters(), lr=1e-3)
        model = DDP(inner, gradient_as_bucket_view=options.bucket_views, bucket_cap_mb=options.bucket_mb)
        plan = None
        if budget is not None:
            path = Path(folder, f"{name}.json")
            if rank == 0:
                lowtide.profile(model, target.batch, optimizer=optimizer).plan(budget).save(path)
            dist.barrier()
            plan = lowtide.load_plan(path)
            plan.apply(model)
        gates_of = backend.gates_of
        if name == "at the end":
            backend.gates_of = lambda *_, **__: None
        step = partial(train_step, model, target.batch, optimizer)
        for _ in range(3):
            step()
        backend.gates_of = gates_of
        models[name] = (model, optimizer, plan)
    seconds: dict[str, list[float]] = {name: [] for name in models}
    for _ in range(options.steps):
        for name, (model, optimizer, _) in models.items():
            dist.barrier()
            start = time.perf_counter()
            train_step(model, target.batch, optimizer)
            seconds[name].append(time.perf_counter() - start)
    rows = []
    for name, (model, optimizer, plan) in models.items():
        above = peak_above_start(partial(train_step, model, target.batch, optimizer))
        buckets = model._get_ddp_logging_data()["rebuilt_bucket_sizes"]
        peak = static_bytes(model, target.batch, optimizer) + above + sum(map(int, buckets.split(", ")))
        rows.append(
            {
                "model": name,
                "seconds": statistics.median(seconds[name]),
                "predicted_bytes": plan.peak_bytes if plan is not None else 0,
                "budget_bytes": plan.budget_bytes if plan is not None else 0,
                "measured_bytes": peak,
                "sent_at_percent": " ".join(map(str, sent_at(model, target.batch))),
            }
        )
    gathered: list[list[Row] | None] = [None] * options.ranks
    dist.all_gather_object(gathered, rows)
    if rank == 0:
        _report([each for each in gathered if each is not None], options)
    dist.barrier()
    dist.destroy_process_group()


def _report(ranks: list[list[Row]], options: argparse.Namespace) -> None:
    rows = []
    for same in zip(*ranks, strict=True):
        slowest = max(row["seconds"] for row in same)
        rows.append({**same[0], "seconds": slowest, "measured_bytes": max(r["measured_bytes"] for r in same)})
    plain = rows[0]["seconds"]
    for row in rows:
        print(
            f"{row['model']:>10}  {row['seconds']:7.3f} s  x{row['seconds'] / plain:5.3f}  "
            f"predicted {row['predicted_bytes'] / 2**20:7.1f} MiB  "
            f"measured {row['measured_bytes'] / 2**20:7.1f} MiB  "
            f"sent at {row['sent_at_percent']}"
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
    parser.add_argument("--bucket-mb", type=float)
    parser.add_argument("--bucket-views", action="store_true")
    parser.add_argument("-o", "--output", default="")
    options = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    with tempfile.TemporaryDirectory() as folder:
        multiprocessing.spawn(_run, args=(options, folder), nprocs=options.ranks)
    sys.exit(0)


if __name__ == "__main__":
    main()
