"""The step of one GPU of a mesh: stages of many blocks that follow from four, and what divides what."""

from dataclasses import replace
from functools import cache

import pytest

from lowtide.experiments.decoder_search import divided, search_decoder
from lowtide.experiments.mesh_steps import CapturedPart, capture_part
from lowtide.facts.gpus import GPUS
from lowtide.facts.meshes import Mesh
from lowtide.planning.mesh_seconds import Job
from lowtide.planning.repeated_graphs import RepeatedGraphsPlanner
from lowtide.planning.schedules import eager_timeline
from lowtide.planning.stages import CAPTURED_BLOCKS, StageLoad, peak_of_timeline
from lowtide.planning.variants import without_dominated
from lowtide.zoo.decoder_parts import DecoderPart, PartSize
from lowtide.zoo.decoders import DECODERS, DecoderSize

pytestmark = pytest.mark.slow

GPU = GPUS["h100-80g"]
TINY = DecoderSize(
    name="tiny", width=256, blocks=8, heads=8, key_heads=4, hidden=512, words=512, length=128, is_gated=True
)
PART = PartSize(model=TINY, length=TINY.length, blocks=CAPTURED_BLOCKS)

SCALARS = 1e-3
"""The optimizer's counters of steps are counted as if they divided as parameters do."""


@cache
def captured(size: PartSize = PART) -> CapturedPart:
    return capture_part(size, 2, gpu=GPU)


@pytest.mark.long
@pytest.mark.sample(1)
@pytest.mark.parametrize("tensor", [1, 2])
def test_a_stage_that_follows_from_four_blocks_is_that_of_all_its_blocks(tensor: int):
    stage = captured(replace(PART, tensor=tensor)).planner(8)
    whole = RepeatedGraphsPlanner(
        without_dominated(captured(replace(PART, tensor=tensor, blocks=TINY.blocks)).step(8))
    )
    load = StageLoad(blocks=TINY.blocks)
    plan = stage.lowest(load)
    assert plan.unplanned_peak_bytes == pytest.approx(whole.baseline.peak_bytes, rel=SCALARS)
    assert plan.peak_bytes == pytest.approx(whole.floor().floor_bytes, rel=0.02)
    for budget_bytes in (2 * plan.peak_bytes, (plan.unplanned_peak_bytes + plan.peak_bytes) // 2):
        ours, theirs = stage.best(budget_bytes, load), whole.best(budget_bytes)
        assert ours is not None and theirs is not None
        assert ours.peak_bytes <= budget_bytes
        assert ours.recompute_seconds == pytest.approx(theirs.added_seconds, rel=0.05, abs=1e-9)


def test_the_peak_of_a_finished_schedule_grows_as_a_longer_step_does():
    few, many = captured().step(8), captured(replace(PART, blocks=TINY.blocks)).step(8)
    found = peak_of_timeline(
        few, eager_timeline(few), captured().planner(8).blocks, StageLoad(blocks=TINY.blocks)
    )
    assert found == pytest.approx(eager_timeline(many).peak_bytes, rel=SCALARS)


def _unplanned(size: PartSize, load: StageLoad) -> int:
    stage = captured(size).planner(1)
    return stage.peak(stage.planner.unplanned, load)


def test_every_dimension_lessens_what_a_gpu_holds():
    load = StageLoad(blocks=TINY.blocks)
    peaks = [
        _unplanned(size, load)
        for size in (PART, replace(PART, tensor=2), replace(PART, tensor=4), replace(PART, context=2))
    ]
    assert peaks[0] > peaks[1] > peaks[2] and peaks[0] > peaks[3]


def test_more_micro_batches_in_flight_hold_more():
    first = captured(replace(PART, is_last=False)).planner(2)
    peaks = [first.lowest(StageLoad(blocks=4, in_flight=number)).unplanned_peak_bytes for number in (1, 2, 4)]
    assert peaks[0] < peaks[1] and peaks[2] - peaks[1] == 2 * (peaks[1] - peaks[0])


def test_collectives_are_never_recomputed():
    step = captured(replace(PART, tensor=2)).step(1)
    exchanges = [node for node in step.nodes if node.op.startswith("lowtide_mesh.")]
    assert exchanges and all(node.recompute is None for node in exchanges)


def test_parameters_are_counted_as_they_are_built():
    for name, billions in (("llama3-8b", 8.03), ("llama3-70b", 70.55), ("llama3-405b", 405.9)):
        assert DECODERS[name].parameters / 1e9 == pytest.approx(billions, abs=0.06)
    for size in (TINY, replace(TINY, is_gated=False, key_heads=8)):
        model = DecoderPart(PartSize(model=size, length=128, blocks=4))
        assert sum(p.numel() for p in model.parameters()) == replace(size, blocks=4).parameters


@pytest.mark.long
def test_a_decoder_is_searched_on_all_axes():
    job = Job(gpu=GPU, gpus=2, batch=2, budget_bytes=1 << 30)
    rows = search_decoder(TINY, job, length=TINY.length, fastest=1000).rows
    meshes = {row.mesh for row in rows}
    assert meshes == {Mesh(shards=2), Mesh(tensor=2), Mesh(pipeline=2)}
    assert all(row.fits and 0 < row.peak_bytes <= 1 << 30 for row in rows)
    assert divided(TINY, length=128).parameters == TINY.parameters
