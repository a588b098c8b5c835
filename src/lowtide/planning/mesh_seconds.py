"""Estimated seconds of a step on a mesh, from those of its blocks.

    no pipeline   micro-batches x (forward + backward of all blocks) + optimizer; gathers and reductions of
                  FSDP2 run beside the blocks, and a block takes the longer of its ops and its exchange
    pipeline      (micro-batches + stages - 1) x (forward + backward of the slowest stage), one reduction;
                  weights stay gathered and gradients whole for all micro-batches, as in torch's schedules

`lower_bound` needs no captured step: flops of the matrix products, exchanges, nothing else.
"""

from dataclasses import dataclass

from lowtide.facts.gpus import Gpu
from lowtide.facts.meshes import Mesh
from lowtide.planning.link_seconds import SHARE_OF_PEAK, LinkedGroup
from lowtide.planning.stages import StagePlan

WHOLE, FIRST, LAST = "whole", "first", "last"
"""Parts of a model that one GPU has: all blocks; the first stage of a pipeline; the last."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DividedModel:
    """The sizes of a model that limit its meshes, and what its parts exchange, in elements."""

    blocks: int
    heads: int
    length: int
    width: int
    block_parameters: int
    other_parameters: int

    @property
    def parameters(self) -> int:
        return self.blocks * self.block_parameters + self.other_parameters


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """`batch` samples in each step of all `gpus`, with `budget_bytes` for each of them."""

    gpu: Gpu
    gpus: int
    batch: int
    budget_bytes: int


def longest_stage(model: DividedModel, mesh: Mesh) -> int:
    """The blocks of the longest stage."""
    return -(-model.blocks // mesh.pipeline)


def other_parameters(model: DividedModel, mesh: Mesh, part: str) -> int:
    """Parameters of embedding and head; each end of a pipeline has one of them."""
    return model.other_parameters // mesh.tensor // (1 if part == WHOLE else 2)


def pass_seconds(plan: StagePlan, blocks: int) -> float:
    """Forward and backward of one micro-batch, without exchanges of parameters."""
    block = plan.block_forward_seconds + plan.block_backward_seconds
    return blocks * block + plan.other_forward_seconds + plan.other_backward_seconds


def step_seconds(
    model: DividedModel, job: Job, mesh: Mesh, plans: list[StagePlan], *, micro_batch: int, number: int
) -> tuple[float, float]:
    """The seconds of a step, and those in which a GPU computes."""
    blocks = longest_stage(model, mesh)
    inner = mesh.tensor
    shards = LinkedGroup(job.gpu, mesh.parameter_ranks, inner)
    replicas = LinkedGroup(job.gpu, mesh.replicas, inner * mesh.parameter_ranks)
    block = model.block_parameters / mesh.tensor
    other = other_parameters(model, mesh, WHOLE if mesh.pipeline == 1 else FIRST)

    def gathered(parameters: float) -> float:
        return shards.gather_seconds(2 * parameters)

    def reduced(parameters: float) -> float:
        return shards.gather_seconds(4 * parameters) + replicas.reduce_seconds(
            4 * parameters / mesh.parameter_ranks
        )

    slowest = max(pass_seconds(plan, blocks) for plan in plans)
    update = max(plan.optimizer_seconds for plan in plans)
    compute = number * slowest + update
    if mesh.pipeline == 1:
        (plan,) = plans
        forward = max(plan.block_forward_seconds, gathered(block)) * blocks + plan.other_forward_seconds
        backward = max(plan.block_backward_seconds, gathered(block) + reduced(block)) * blocks
        # nothing runs beside the first gather and the last reduction
        ends = gathered(other) + gathered(block) + reduced(block) + reduced(other)
        return number * (forward + backward + plan.other_backward_seconds + ends) + update, compute
    stages = LinkedGroup(job.gpu, mesh.pipeline, job.gpus // mesh.pipeline)
    message = micro_batch * model.length * model.width * 2 // mesh.context // mesh.tensor
    turn = slowest + 2 * stages.send_seconds(message)
    ends = gathered(blocks * block + other) + reduced(blocks * block + other)
    return (number + mesh.pipeline - 1) * turn + ends + update, compute


def lower_bound(model: DividedModel, job: Job, mesh: Mesh, *, micro_batch: int, number: int) -> float:
    """No step of this mesh is estimated faster: its ops have at least the flops of their matrix products."""
    rate = job.gpu.flops_per_second.get("bfloat16", job.gpu.flops_per_second["float32"]) * SHARE_OF_PEAK
    tokens = micro_batch * model.length / mesh.context
    whole = tokens * model.width * 2
    tensor = LinkedGroup(job.gpu, mesh.tensor)
    exchanges = 4 * tensor.gather_seconds(whole)
    products = 2 * model.block_parameters * tokens / mesh.tensor / rate
    scores = 4 * tokens * model.length * model.width / mesh.tensor / rate
    ends = 2 * model.other_parameters / 2 * tokens / mesh.tensor / rate
    plan = StagePlan(
        peak_bytes=0,
        unplanned_peak_bytes=0,
        block_forward_seconds=products + scores + exchanges,
        block_backward_seconds=2 * products + 2.5 * scores + exchanges,
        other_forward_seconds=ends,
        other_backward_seconds=2 * ends,
        recompute_seconds=0.0,
        optimizer_seconds=0.0,
    )
    return step_seconds(model, job, mesh, [plan], micro_batch=micro_batch, number=number)[0]
