"""The step of one GPU of a mesh, captured on fake tensors and estimated for an absent GPU.

    DecoderSize, tensor, context ── trace 4 blocks ── once for each micro-batch
                                          └── shard among 8, 64, 512 GPUs ── Step ── StagePlanner

Parameters and batch are bfloat16; shards, gradients and AdamW's state are float32, as FSDP2 has them with
`MixedPrecisionPolicy(param_dtype=torch.bfloat16)`.
"""

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from lowtide.analyze.analyze_again import StepSettings
from lowtide.analyze.captured_step import analyzed
from lowtide.facts import Step
from lowtide.facts.gpus import Gpu
from lowtide.garbage import rarely_collected
from lowtide.parallel.simulated_sharding import SimulatedSharding, simulate_sharding
from lowtide.planning.link_seconds import LinkedGroup, with_link_seconds
from lowtide.planning.repeated_graphs import RepeatedGraphsPlanner
from lowtide.planning.stages import StagePlanner
from lowtide.planning.variants import without_dominated
from lowtide.profiling.roofline import estimated_costs
from lowtide.torch_compat.dispatch import FakeTensorMode
from lowtide.trace.segments import Trace
from lowtide.trace.trace_model import trace
from lowtide.zoo.decoder_parts import DecoderPart, PartSize, Wrap, default_dtype, part_batch


@dataclass(frozen=True)
class CapturedPart:
    """A part of a decoder, traced once, and its step for any number of GPUs that share its parameters."""

    size: PartSize
    micro_batch: int
    model: nn.Module
    batch: tuple[Any, ...]
    gpu: Gpu
    traced: Trace
    planners: dict[int, StagePlanner]

    def sharding(self, ranks: int) -> SimulatedSharding:
        return _simulated(self.model, ranks)

    def step(self, ranks: int) -> Step:
        """The step of one of `ranks` GPUs."""
        simulated = self.sharding(ranks)
        own = replace(self.traced, sharding=simulated.sharding)
        optimizer = torch.optim.AdamW(self.model.parameters(), fused=True)
        captured = analyzed(
            own,
            self.model,
            (self.batch, {}),
            StepSettings(),
            optimizer=optimizer,
            simulated=simulated,
            gpu=self.gpu,
        )
        size = self.size
        stride = size.tensor
        key_width = 2 * size.model.width * size.model.key_heads // size.model.heads // size.tensor
        return with_link_seconds(
            estimated_costs(captured, self.gpu),
            LinkedGroup(self.gpu, size.tensor),
            LinkedGroup(self.gpu, size.context, stride),
            key_bytes=self.micro_batch * size.tokens * key_width * torch.bfloat16.itemsize,
        )

    def planner(self, ranks: int) -> StagePlanner:
        """What plans stages for one of `ranks` GPUs; schedules of graphs are searched once for all."""
        if ranks not in self.planners:
            planner = RepeatedGraphsPlanner(without_dominated(self.step(ranks)))
            if self.planners:
                first = next(iter(self.planners.values())).planner
                for name in ("choices", "unplanned"):
                    if name in vars(first):
                        vars(planner)[name] = vars(first)[name]
            self.planners[ranks] = StagePlanner(planner)
        return self.planners[ranks]


def capture_part(size: PartSize, micro_batch: int, *, gpu: Gpu, wrap: Wrap | None = None) -> CapturedPart:
    """Trace a part of a decoder, of `CAPTURED_BLOCKS` blocks or as many as `size` says."""
    with FakeTensorMode(), default_dtype(torch.bfloat16):
        model = DecoderPart(size, wrap=wrap)
        batch = part_batch(size, micro_batch)
    with rarely_collected():
        traced = trace(model, batch, {}, loss=None, simulated=_simulated(model, 1), gpu=gpu)
    return CapturedPart(size, micro_batch, model, batch, gpu, traced, {})


def _simulated(model: nn.Module, ranks: int) -> SimulatedSharding:
    return simulate_sharding(
        model, ranks=ranks, stored_dtype=torch.float32, reduce_dtype=torch.float32, backend="nccl"
    )
