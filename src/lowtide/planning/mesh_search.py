"""Which mesh of GPUs, and which plan on it, trains a model fastest: all of them, estimated.

    64 GPUs ── meshes ── micro-batches ── plan of each stage ── seconds of a step ── samples per second
    dp 64, dp 8x8, dp 8 tp 8, ...      the cheapest within the budget

A capture takes seconds and there are hundreds of candidates, so that the likeliest come first: in the order
of `lower_bound`, until none of the others can be expected to be among the fastest. What a captured step takes
beyond its bound is nearly the same share for all meshes; the smallest so far is expected of the others.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from heapq import nsmallest

from lowtide.facts.meshes import Mesh
from lowtide.planning.mesh_estimates import FindStage, MeshRow, always_bytes, estimate
from lowtide.planning.mesh_seconds import DividedModel, Job, lower_bound

FEWEST_TOKENS = 8192
"""A sequence is not divided into shorter parts."""
LARGEST_MICRO_BATCH = 16
FASTEST = 10
"""So many rows are wanted."""
SLACK = 0.97
"""Of the smallest share that a captured step takes beyond its bound, what is expected of the others."""


@dataclass(frozen=True, slots=True)
class MeshSearch:
    """The rows of candidates that were looked at, the fastest first, and how many candidates there are."""

    rows: list[MeshRow]
    candidates: int


def meshes(model: DividedModel, job: Job) -> Iterator[Mesh]:
    """All meshes of the job's GPUs that the model can be divided among, in a fixed order."""
    node = job.gpu.gpus_per_node
    for tensor in _divisors(min(node, job.gpus)):
        if model.heads % tensor or model.length % tensor:
            continue
        for pipeline in powers(job.gpus // tensor):
            if pipeline > 1 and model.blocks < 2 * pipeline:
                continue
            for context in powers(job.gpus // tensor // pipeline):
                if context > 1 and model.length // context < FEWEST_TOKENS:
                    continue
                data, left = divmod(job.gpus, tensor * pipeline * context)
                if left or job.batch % data:
                    continue
                for shards in shard_counts(data, inner=tensor * context, node=node):
                    yield Mesh(
                        replicas=data // shards,
                        shards=shards,
                        context=context,
                        tensor=tensor,
                        pipeline=pipeline,
                    )


def shard_counts(data: int, *, inner: int, node: int) -> list[int]:
    """How many of `data` groups share parameters: all, or those of one node, or of eight."""
    counts = {data}
    for gpus in (node, 8 * node):
        shards = gpus // inner
        if 1 < shards < data and data % shards == 0:
            counts.add(shards)
    return sorted(counts)


def micro_batches(mesh: Mesh, job: Job) -> Iterator[tuple[int, int]]:
    """Samples of a micro-batch, and how many follow one another: in a pipeline, as many as stages or more."""
    samples = job.batch // mesh.data
    for size in powers(min(samples, LARGEST_MICRO_BATCH)):
        if samples % size == 0 and (mesh.pipeline == 1 or samples // size >= mesh.pipeline):
            yield size, samples // size


@dataclass(frozen=True, slots=True)
class _Candidate:
    mesh: Mesh
    micro_batch: int
    number: int
    least_seconds: float
    is_smallest: bool


def search(
    model: DividedModel,
    job: Job,
    find: FindStage,
    *,
    fastest: int = FASTEST,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> MeshSearch:
    """Rows of candidates: those that fit first, the fastest first.

    Of a mesh that does not fit with its smallest micro-batch there is one row that says why.
    """
    candidates = sorted(_candidates(model, job), key=lambda c: (c.least_seconds, c.mesh, c.micro_batch))
    rows: list[MeshRow] = []
    least: dict[Mesh, int] = {}
    share = 1.0
    for done, candidate in enumerate(candidates):
        progress(done, len(candidates))
        mesh, size = candidate.mesh, candidate.micro_batch
        if size >= least.get(mesh, size + 1):
            continue  # a smaller micro-batch does not fit
        is_sure = always_bytes(model, mesh) > job.budget_bytes
        times = nsmallest(fastest, (row.step_seconds for row in rows if row.fits))
        if not is_sure and len(times) == fastest and candidate.least_seconds * share > times[-1]:
            continue
        row = estimate(model, job, mesh, find, micro_batch=size, number=candidate.number)
        if row.fits:
            shares = [share] if share > 1.0 else []
            share = max(1.0, min([*shares, SLACK * row.step_seconds / candidate.least_seconds]))
        else:
            least[mesh] = size
        if row.fits or candidate.is_smallest:
            rows.append(row)
    progress(len(candidates), len(candidates))
    return MeshSearch(in_order(rows), len(candidates))


def _candidates(model: DividedModel, job: Job) -> Iterator[_Candidate]:
    for mesh in meshes(model, job):
        for place, (size, number) in enumerate(micro_batches(mesh, job)):
            least = lower_bound(model, job, mesh, micro_batch=size, number=number)
            yield _Candidate(mesh, size, number, least, is_smallest=not place)


def in_order(rows: list[MeshRow]) -> list[MeshRow]:
    """Those that fit first, the fastest first; of the others, those that need least."""
    return sorted(rows, key=_order)


def _order(row: MeshRow) -> tuple[bool, float, int, Mesh, int]:
    return not row.fits, -row.samples_per_second, row.floor_bytes, row.mesh, row.micro_batch


def _divisors(number: int) -> list[int]:
    return [divisor for divisor in range(1, number + 1) if number % divisor == 0]


def powers(most: int) -> Iterator[int]:
    """1, 2, 4, ... up to `most`."""
    power = 1
    while power <= most:
        yield power
        power *= 2
