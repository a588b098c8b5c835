"""What fits on one of many processes: GPT-like models, sharded by FSDP2, simulated.

    python bench/scale.py --budget 40GiB [--models 125M,70B] [--ranks 8,64,512,4096] [--csv scale.csv]

Nothing is run and no parameter is allocated: models and batches are fake tensors in bfloat16, parameters
are stored and reduced in float32, AdamW is fused. An op takes the longer of its flops at 400 Tflop/s and
its bytes at 3 TB/s, so that recompute is a share of that step; communication takes no time.
"""

import argparse
import csv
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional

from lowtide.analyze.captured_step import captured_step, with_costs
from lowtide.analyze.graph_facts import analyze_graphs
from lowtide.facts import Step
from lowtide.facts.sizes import parse_size
from lowtide.ops.calls import Call, signature
from lowtide.parallel.simulated_sharding import simulate_sharding
from lowtide.planning.repeated_graphs import RepeatedGraphsPlanner
from lowtide.profiling.work import visible_work_of
from lowtide.torch_compat.dispatch import FakeTensorMode
from lowtide.trace.trace_model import trace
from lowtide.units import format_size

FLOPS_PER_SECOND = 400e12
BYTES_PER_SECOND = 3e12
WORDS = 50304


@dataclass(frozen=True, slots=True)
class Size:
    width: int
    blocks: int
    heads: int


SIZES = {
    "125M": Size(768, 12, 12),
    "350M": Size(1024, 24, 16),
    "1.3B": Size(2048, 24, 32),
    "7B": Size(4096, 32, 32),
    "13B": Size(5120, 40, 40),
    "30B": Size(7168, 48, 56),
    "70B": Size(8192, 86, 64),
}


class Block(nn.Module):
    def __init__(self, size: Size) -> None:
        super().__init__()
        self.heads = size.heads
        self.attention_norm = nn.LayerNorm(size.width)
        self.qkv = nn.Linear(size.width, 3 * size.width)
        self.out = nn.Linear(size.width, size.width)
        self.norm = nn.LayerNorm(size.width)
        self.up = nn.Linear(size.width, 4 * size.width)
        self.down = nn.Linear(4 * size.width, size.width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        parts = self.qkv(self.attention_norm(x)).view(batch, length, 3, self.heads, -1)
        query, key, value = (part.transpose(1, 2) for part in parts.unbind(2))
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(functional.gelu(self.up(self.norm(x))))


class Gpt(nn.Module):
    def __init__(self, size: Size, length: int) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, size.width)
        self.places = nn.Parameter(torch.zeros(length, size.width))
        self.blocks = nn.ModuleList(Block(size) for _ in range(size.blocks))
        self.norm = nn.LayerNorm(size.width)
        self.head = nn.Linear(size.width, WORDS, bias=False)

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        x = self.words(tokens) + self.places
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x)).flatten(0, 1)
        return functional.cross_entropy(logits.float(), targets.flatten())


@contextmanager
def set_default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def planners(size: Size, *, batch: int, length: int, ranks: list[int]) -> dict[int, RepeatedGraphsPlanner]:
    """What plans the step of one process, for each number of processes; the graphs are captured once."""
    with FakeTensorMode(), set_default_dtype(torch.bfloat16):
        model = Gpt(size, length)
        tokens = torch.zeros(2, batch, length, dtype=torch.int64)
        args = (tokens[0].clone(), tokens[1].clone())
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    papers = {
        number: simulate_sharding(
            model, ranks=number, stored_dtype=torch.float32, reduce_dtype=torch.float32, backend="nccl"
        )
        for number in ranks
    }
    traced = trace(model, args, {}, loss=None, simulated=papers[ranks[0]])
    found: dict[int, RepeatedGraphsPlanner] = {}
    costs: dict[str, tuple[float, int, bool]] = {}
    for number, paper in papers.items():
        own = replace(traced, sharding=paper.sharding)
        captured = captured_step(
            analyze_graphs(own), own, model, batch=args, optimizer=optimizer, simulated=paper
        )
        known = {run: _cost(call, costs) for run, call in captured.calls.items()}
        planner = RepeatedGraphsPlanner(with_costs(captured.step, known))
        if found:
            planner.__dict__["choices"] = next(iter(found.values())).choices  # the graphs are the same
        found[number] = planner
    return found


def _cost(call: Call, known: dict[str, tuple[float, int, bool]]) -> tuple[float, int, bool]:
    name = signature(call)
    if name not in known:
        work = visible_work_of(call)
        known[name] = (max(work.flops / FLOPS_PER_SECOND, work.nbytes / BYTES_PER_SECOND), 0, True)
    return known[name]


def row(name: str, ranks: int, planner: RepeatedGraphsPlanner, budget_bytes: int) -> dict[str, str]:
    step: Step = planner.step
    lowest = planner.floor()
    chosen = planner.best(budget_bytes)
    return {
        "model": name,
        "ranks": str(ranks),
        "always there": format_size(step.static_bytes),
        "without a plan": format_size(planner.eager_peak_bytes),
        "floor": format_size(lowest.floor_bytes),
        "set by": lowest.node,
        "peak": format_size(chosen.peak_bytes) if chosen else "does not fit",
        "recompute": f"{chosen.added_seconds / planner.baseline.seconds:.1%}" if chosen else "",
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--budget", default="40GiB")
    parser.add_argument("--models", default=",".join(SIZES))
    parser.add_argument("--ranks", default="8,64,512,4096")
    parser.add_argument("--batch-size", type=int, default=4)
    parser.add_argument("--sequence-length", type=int, default=2048)
    parser.add_argument("--csv", type=Path)
    options = parser.parse_args()
    rows = []
    for name in options.models.split(","):
        start = time.perf_counter()
        numbers = [int(number) for number in options.ranks.split(",")]
        found = planners(SIZES[name], batch=options.batch_size, length=options.sequence_length, ranks=numbers)
        for number, planner in found.items():
            rows.append(row(name, number, planner, parse_size(options.budget)))
            if len(rows) == 1:
                print("| " + " | ".join(rows[0]) + " |\n|" + "---|" * len(rows[0]))
            print("| " + " | ".join(rows[-1].values()) + " |", flush=True)
        print(f"{name}: {time.perf_counter() - start:.1f} s", file=sys.stderr)
    if options.csv:
        with options.csv.open("w", newline="") as file:
            writer = csv.DictWriter(file, fieldnames=list(rows[0]))
            writer.writeheader()
            writer.writerows(rows)


if __name__ == "__main__":
    main()
