"""The search over meshes of GPUs, with stages whose plans are written down here."""

import pytest

from lowtide.facts.gpus import GPUS
from lowtide.facts.meshes import Mesh
from lowtide.planning.link_seconds import LinkedGroup
from lowtide.planning.mesh_estimates import MeshRow, always_bytes, stage_load
from lowtide.planning.mesh_search import meshes, micro_batches, search, shard_counts
from lowtide.planning.mesh_seconds import FIRST, LAST, WHOLE, DividedModel, Job, lower_bound, step_seconds
from lowtide.planning.stages import StageLoad, StagePlan

GIB = 1 << 30
MODEL = DividedModel(
    blocks=32, heads=8, length=8192, width=4096, block_parameters=218_000_000, other_parameters=1_050_000_000
)


def job(gpus: int = 64, batch: int = 256, budget_bytes: int = 70 * GIB) -> Job:
    return Job(gpu=GPUS["h100-80g"], gpus=gpus, batch=batch, budget_bytes=budget_bytes)


class Stage:
    """A stage that keeps `saved_bytes` of each block and sample, and can recompute all of them."""

    def __init__(self, mesh: Mesh, micro_batch: int, *, saved_bytes: int = GIB) -> None:
        self.block_bytes = saved_bytes * micro_batch // mesh.tensor
        exchange = LinkedGroup(GPUS["h100-80g"], mesh.tensor).gather_seconds(
            MODEL.length * MODEL.width * 2 * micro_batch
        )
        self.seconds = 0.02 * micro_batch / mesh.tensor + 4 * exchange

    def plan(self, load: StageLoad, share: float) -> StagePlan:
        peak = load.extra_bytes + int(load.blocks * self.block_bytes * load.in_flight * share)
        return StagePlan(
            peak_bytes=peak,
            unplanned_peak_bytes=peak,
            block_forward_seconds=self.seconds,
            block_backward_seconds=(3 - share) * self.seconds,
            other_forward_seconds=0.0,
            other_backward_seconds=0.0,
            recompute_seconds=(1 - share) * self.seconds * load.blocks,
            optimizer_seconds=0.0,
        )

    def best(self, budget_bytes: int, load: StageLoad) -> StagePlan | None:
        plans = [self.plan(load, share) for share in (1.0, 0.5, 0.1)]
        return next((plan for plan in plans if plan.peak_bytes <= budget_bytes), None)

    def lowest(self, load: StageLoad) -> StagePlan:
        return self.plan(load, 0.1)


def find(mesh: Mesh, micro_batch: int, part: str) -> Stage:
    return Stage(mesh, micro_batch)


def test_a_mesh_has_all_gpus_and_a_name():
    assert Mesh(replicas=2, shards=32, tensor=8).gpus == 512
    assert Mesh(replicas=2, shards=32, tensor=8).label == "dp 2x32 tp 8"
    assert Mesh(shards=4, context=2, pipeline=4).label == "dp 4 pp 4 cp 2"


@pytest.mark.parametrize("gpus", [1, 6, 8, 24, 64, 4096])
def test_every_mesh_uses_all_gpus_and_divides_what_can_be_divided(gpus: int):
    found = list(meshes(MODEL, job(gpus, batch=gpus * 4)))
    assert found and len(found) == len(set(found))
    for mesh in found:
        assert mesh.gpus == gpus and MODEL.heads % mesh.tensor == 0
        assert mesh.tensor <= 8 and 2 * mesh.pipeline <= max(2, MODEL.blocks)
        for size, number in micro_batches(mesh, job(gpus, batch=gpus * 4)):
            assert size * number * mesh.data == gpus * 4
            assert mesh.pipeline == 1 or number >= mesh.pipeline


def test_parameters_are_shared_by_all_or_by_some_nodes():
    assert shard_counts(64, inner=1, node=8) == [8, 64]
    assert shard_counts(8, inner=8, node=8) == [8]
    assert shard_counts(1024, inner=1, node=8) == [8, 64, 1024]


def test_the_fastest_that_fits_comes_first_and_others_say_why():
    found = search(MODEL, job(batch=64), find)
    fitting = [row for row in found.rows if row.fits]
    assert fitting and all(row.peak_bytes <= 70 * GIB for row in fitting)
    speeds = [row.samples_per_second for row in fitting]
    assert speeds == sorted(speeds, reverse=True)
    assert all(row.reason and row.floor_bytes > 70 * GIB for row in found.rows if not row.fits)


def test_leaving_out_slow_candidates_does_not_change_the_fastest():
    for batch in (64, 256):
        few, all_rows = (search(MODEL, job(batch=batch), find, fastest=n).rows for n in (3, 1000))
        assert len(few) < len(all_rows)
        assert few[:3] == all_rows[:3]


def test_what_cannot_hold_its_parameters_is_not_captured():
    def never(mesh: Mesh, micro_batch: int, part: str) -> Stage:
        raise AssertionError

    found = search(MODEL, job(1, batch=1), never)
    assert [(row.mesh, row.reason) for row in found.rows] == [(Mesh(), "parameters and optimizer state")]


def test_nothing_is_estimated_faster_than_its_bound():
    for row in search(MODEL, job(), find, fastest=1000).rows:
        least = lower_bound(MODEL, job(), row.mesh, micro_batch=row.micro_batch, number=row.micro_batches)
        plan = Stage(row.mesh, row.micro_batch).plan(StageLoad(blocks=1), 1.0)
        seconds, compute = step_seconds(
            MODEL, job(), row.mesh, [plan], micro_batch=row.micro_batch, number=row.micro_batches
        )
        assert least > 0 and 0 < compute <= seconds


def test_the_first_stage_waits_for_as_many_micro_batches_as_there_are_stages():
    mesh = Mesh(shards=8, pipeline=8)
    assert stage_load(MODEL, mesh, FIRST, number=32).in_flight == 8
    assert stage_load(MODEL, mesh, LAST, number=32).in_flight == 1
    assert stage_load(MODEL, mesh, FIRST, number=32).blocks == 4


def test_gradients_of_earlier_micro_batches_are_counted():
    mesh = Mesh(shards=64)
    assert stage_load(MODEL, mesh, WHOLE, number=1).extra_bytes == 0
    assert stage_load(MODEL, mesh, WHOLE, number=4).extra_bytes == 4 * MODEL.parameters // 64


def test_more_shards_hold_less():
    held = [always_bytes(MODEL, Mesh(replicas=64 // shards, shards=shards)) for shards in (8, 64)]
    assert held[0] > held[1] > 0


def test_a_row_is_frozen():
    row = MeshRow(mesh=Mesh(), micro_batch=1, micro_batches=1)
    assert row.fits and hash(row)
