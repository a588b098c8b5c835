"""One mesh of GPUs, estimated: the peak of the fullest GPU with the cheapest plan, and the seconds of a step.

Shortcomings: ops run at three quarters of published rates and one kernel at a time, so that speeds are too
high and only their order means something; 1F1B is the only schedule of a pipeline, of stages with equally
many blocks; what is live between micro-batches is counted whole although a part of it is made late.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

from lowtide.facts.meshes import Mesh
from lowtide.planning.mesh_seconds import (
    FIRST,
    LAST,
    WHOLE,
    DividedModel,
    Job,
    longest_stage,
    other_parameters,
    pass_seconds,
    step_seconds,
)
from lowtide.planning.stages import StageLoad, StagePlanner

STORED_BYTES = 12
"""Of each parameter in float32: itself, and two values of AdamW's state."""
GRADIENT_BYTES = 4
GATHERED_BYTES = 2 + 4
"""Of each parameter of a stage: itself in bfloat16 and its gradient in float32, for all micro-batches."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MeshRow:
    """One mesh with its micro-batches, all estimated.

    `peak_bytes` is that of the plan on the fullest GPU; `floor_bytes` the lowest that a plan reaches, where
    none fits. `reason` says why none fits; it is empty where one does. `waiting_share`: the part of a step in
    which a GPU waits for others, in exchanges of parameters or for its turn in a pipeline.
    """

    mesh: Mesh
    micro_batch: int
    micro_batches: int
    peak_bytes: int = 0
    unplanned_peak_bytes: int = 0
    floor_bytes: int = 0
    step_seconds: float = 0.0
    recompute_share: float = 0.0
    waiting_share: float = 0.0
    samples_per_second: float = 0.0
    reason: str = ""

    @property
    def fits(self) -> bool:
        return not self.reason


PARAMETERS = "parameters and optimizer state"

FindStage = Callable[[Mesh, int, str], StagePlanner]
"""The planner of a part of a model (`whole`, `first`, `last`) on a mesh, for a micro-batch."""


def estimate(
    model: DividedModel, job: Job, mesh: Mesh, find: FindStage, *, micro_batch: int, number: int
) -> MeshRow:
    """Plan the stages of one mesh within the budget, and estimate its step."""
    row = MeshRow(mesh=mesh, micro_batch=micro_batch, micro_batches=number)
    always = always_bytes(model, mesh)
    if always > job.budget_bytes:
        return replace(row, floor_bytes=always, reason=PARAMETERS)
    stages = [
        (find(mesh, micro_batch, part), stage_load(model, mesh, part, number=number))
        for part in ((WHOLE,) if mesh.pipeline == 1 else (FIRST, LAST))
    ]
    plans = [planner.best(job.budget_bytes, load) for planner, load in stages]
    chosen = [plan for plan in plans if plan is not None]
    if len(chosen) < len(plans):
        floor = max(planner.lowest(load).peak_bytes for planner, load in stages)
        return replace(row, floor_bytes=floor, reason="activations, at the lowest plan")
    seconds, compute = step_seconds(model, job, mesh, chosen, micro_batch=micro_batch, number=number)
    slowest = max(chosen, key=lambda plan: pass_seconds(plan, 1))
    return replace(
        row,
        peak_bytes=max(plan.peak_bytes for plan in chosen),
        unplanned_peak_bytes=max(plan.unplanned_peak_bytes for plan in chosen),
        step_seconds=seconds,
        recompute_share=slowest.recompute_seconds * number / seconds,
        waiting_share=max(0.0, 1 - compute / seconds),
        samples_per_second=job.batch / seconds,
    )


def always_bytes(model: DividedModel, mesh: Mesh) -> int:
    """A lower bound of every peak: this GPU's parameters, and two values of optimizer state for each."""
    own = model.blocks * model.block_parameters // mesh.pipeline
    shards = mesh.parameter_ranks * mesh.tensor
    whole = longest_stage(model, mesh) * model.block_parameters // mesh.tensor if mesh.pipeline > 1 else 0
    return STORED_BYTES * own // shards + GATHERED_BYTES * whole


def stage_load(model: DividedModel, mesh: Mesh, part: str, *, number: int) -> StageLoad:
    """What a stage has besides a lone step: micro-batches in flight, and what is live between them."""
    blocks = longest_stage(model, mesh)
    block = model.block_parameters // mesh.tensor
    own = blocks * block + other_parameters(model, mesh, part)
    if mesh.pipeline == 1:
        # gradients of earlier micro-batches
        return StageLoad(
            blocks=blocks, extra_bytes=GRADIENT_BYTES * own // mesh.parameter_ranks if number > 1 else 0
        )
    in_flight = min(number, mesh.pipeline) if part == FIRST else 1
    return StageLoad(blocks=blocks, in_flight=in_flight, extra_bytes=GATHERED_BYTES * own)
