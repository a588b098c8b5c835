"""The search over data-parallel meshes of any target: FSDP2, or replicas of it, with micro-batches.

How the layers of a user's model could be divided is not known, so that only samples and parameters are: a
step is that of `lowtide.profile(..., ranks=, device=)` for each micro-batch and number of shards.
"""

from collections.abc import Callable
from dataclasses import replace

from lowtide.errors import BudgetTooSmall
from lowtide.facts import Region
from lowtide.facts.meshes import Mesh
from lowtide.planning.link_seconds import LinkedGroup
from lowtide.planning.mesh_estimates import MeshRow
from lowtide.planning.mesh_search import LARGEST_MICRO_BATCH, MeshSearch, in_order, powers, shard_counts
from lowtide.planning.mesh_seconds import Job
from lowtide.profiles import Profile

FindProfile = Callable[[int, int], tuple[Profile, int, int]]
"""For a micro-batch and a number of shards: the profile, and the bytes of all parameters and of gradients."""


def search_target(
    job: Job, find: FindProfile, *, progress: Callable[[int, int], None] = lambda done, total: None
) -> MeshSearch:
    """A row for each mesh and micro-batch, the fastest first; none behind one that does not fit."""
    samples, left = divmod(job.batch, job.gpus)
    if left:
        return MeshSearch([], 0)
    counts = shard_counts(job.gpus, inner=1, node=job.gpu.gpus_per_node)
    sizes = [size for size in powers(min(samples, LARGEST_MICRO_BATCH)) if samples % size == 0]
    rows: list[MeshRow] = []
    for place, shards in enumerate(counts):
        for done, size in enumerate(sizes):
            progress(place * len(sizes) + done, len(counts) * len(sizes))
            row = _row(job, Mesh(replicas=job.gpus // shards, shards=shards), find, size, samples // size)
            if row.fits or not done:
                rows.append(row)
            if not row.fits:
                break
    return MeshSearch(in_order(rows), len(counts) * len(sizes))


def _row(job: Job, mesh: Mesh, find: FindProfile, size: int, number: int) -> MeshRow:
    profile, parameter_bytes, gradient_bytes = find(size, mesh.shards)
    # gradients of earlier micro-batches are there from the start
    between = gradient_bytes // mesh.shards if number > 1 else 0
    row = MeshRow(mesh=mesh, micro_batch=size, micro_batches=number)
    try:
        plan = profile.plan(max(1, job.budget_bytes - between))
    except BudgetTooSmall as error:
        reason = "the step, at the lowest plan"
        return replace(row, floor_bytes=error.floor_bytes + between, reason=reason)
    seconds = dict.fromkeys(Region, 0.0)
    for node in profile.nodes:
        seconds[node.region] += 0.0 if node.on_demand else node.seconds
    shards, replicas = LinkedGroup(job.gpu, mesh.shards), LinkedGroup(job.gpu, mesh.replicas, mesh.shards)
    gathered = shards.gather_seconds(parameter_bytes)
    reduced = shards.gather_seconds(gradient_bytes) + replicas.reduce_seconds(gradient_bytes / mesh.shards)
    forward = max(seconds[Region.FORWARD], gathered)
    backward = max(seconds[Region.BACKWARD] + plan.recompute_seconds, gathered + reduced)
    step = number * (forward + backward) + seconds[Region.OPTIMIZER]
    compute = number * (profile.step_seconds - seconds[Region.OPTIMIZER] + plan.recompute_seconds)
    return replace(
        row,
        peak_bytes=plan.peak_bytes + between,
        unplanned_peak_bytes=profile.peak_bytes + between,
        step_seconds=step,
        recompute_share=number * plan.recompute_seconds / step,
        waiting_share=max(0.0, 1 - (compute + seconds[Region.OPTIMIZER]) / step),
        samples_per_second=job.batch / step,
    )
