"""The simulated allocator follows the rules that torch documents for its own."""

import random
from dataclasses import replace

import pytest
from synthetic import transformer

from lowtide.facts import Kind
from lowtide.planning.allocator import MIB, Allocator, expandable_segments, reserved_for, rounded
from lowtide.planning.planner import Planner
from lowtide.planning.simulate import baseline_runs, simulate


@pytest.mark.parametrize(("asked", "given"), [(0, 0), (1, 512), (512, 512), (513, 1024)])
def test_requests_are_rounded(asked, given):
    assert rounded(asked) == given
    allocator = Allocator()
    allocator.allocate(asked)
    assert allocator.allocated_bytes == given


@pytest.mark.parametrize(
    ("asked", "segment"),
    [
        (1, 2 * MIB),
        (MIB, 2 * MIB),
        (MIB + 1, 20 * MIB),
        (10 * MIB - 512, 20 * MIB),
        (10 * MIB, 10 * MIB),
        (21 * MIB, 22 * MIB),
    ],
)
def test_segments_have_the_sizes_of_torchs_allocator(asked, segment):
    allocator = Allocator()
    allocator.allocate(asked)
    assert allocator.reserved_bytes == segment


def test_a_large_block_is_not_cut_where_little_would_be_left():
    allocator = Allocator()
    allocator.allocate(11 * MIB)  # of a segment of 12
    assert allocator.allocated_bytes == 12 * MIB
    other = Allocator()
    other.allocate(5 * MIB)  # of a segment of 20
    assert other.allocated_bytes == 5 * MIB


def test_free_neighbours_are_joined_and_used_again():
    allocator = Allocator()
    blocks = [allocator.allocate(5 * MIB) for _ in range(4)]
    assert allocator.reserved_bytes == 20 * MIB
    for block in (blocks[0], blocks[2], blocks[1]):
        allocator.release(block)
    allocator.allocate(15 * MIB)
    assert allocator.reserved_bytes == 20 * MIB


def test_a_gap_that_is_too_small_leaves_more_reserved():
    allocator = Allocator()
    blocks = [allocator.allocate(5 * MIB) for _ in range(4)]
    allocator.release(blocks[0])
    allocator.release(blocks[2])
    allocator.allocate(10 * MIB)  # 10 are free, in two pieces
    assert allocator.reserved_bytes == 30 * MIB
    assert allocator.allocated_bytes == 20 * MIB


def test_blocks_never_overlap_and_all_come_back():
    draw = random.Random(0)
    allocator, living = Allocator(), []
    for _ in range(2000):
        if living and draw.random() < 0.5:
            allocator.release(living.pop(draw.randrange(len(living))))
        else:
            living.append(allocator.allocate(draw.choice((100, 9000, MIB, 3 * MIB, 12 * MIB))))
        assert allocator.allocated_bytes == sum(block.nbytes for block in living)
        assert allocator.allocated_bytes <= allocator.reserved_bytes
    for block in living:
        allocator.release(block)
    assert allocator.allocated_bytes == 0


def test_a_plan_that_holds_less_reserves_less():
    step = transformer(layers=3, width=256, heads=4, batch=8, length=128)
    plain = simulate(step, baseline_runs(step))
    held = reserved_for(step, plain)
    assert plain.peak_bytes <= held.allocated_bytes <= held.reserved_bytes
    planner = Planner(step)
    planned = simulate(step, planner.solve(budget_bytes=planner.floor().floor_bytes).schedule.runs)
    assert reserved_for(step, planned).reserved_bytes < held.reserved_bytes


def test_an_expandable_segment_grows_by_pages():
    allocator = Allocator(expandable=True)
    first = allocator.allocate(12 * MIB)
    assert (allocator.reserved_bytes, allocator.allocated_bytes) == (20 * MIB, 12 * MIB)
    allocator.allocate(15 * MIB)  # 8 at the end and one page more
    assert (allocator.reserved_bytes, allocator.allocated_bytes) == (40 * MIB, 27 * MIB)
    allocator.release(first)
    allocator.allocate(11 * MIB)  # not at the end, which can grow
    assert allocator.reserved_bytes == 40 * MIB
    allocator.allocate(40 * MIB)
    assert allocator.reserved_bytes == 80 * MIB
    allocator.allocate(1)
    assert allocator.reserved_bytes == 82 * MIB


def test_expandable_segments_have_no_gaps_where_blocks_grow():
    """Each request is larger than all that is free: a segment stays behind each time, or one grows."""
    plain, growing = Allocator(), Allocator(expandable=True)
    for nbytes in range(40, 140, 20):
        for allocator in (plain, growing):
            allocator.release(allocator.allocate(nbytes * MIB))
    assert plain.reserved_bytes == sum(range(40, 140, 20)) * MIB and growing.reserved_bytes == 120 * MIB


def test_expandable_blocks_all_come_back():
    draw = random.Random(1)
    allocator, living = Allocator(expandable=True), []
    for _ in range(2000):
        if living and draw.random() < 0.5:
            allocator.release(living.pop(draw.randrange(len(living))))
        else:
            living.append(allocator.allocate(draw.choice((100, 9000, MIB, 3 * MIB, 12 * MIB, 33 * MIB))))
        assert allocator.allocated_bytes == sum(block.nbytes for block in living) <= allocator.reserved_bytes
    for block in living:
        allocator.release(block)
    before = allocator.reserved_bytes
    allocator.allocate(before - 100 * MIB)  # all of the large segment is one block again
    assert allocator.reserved_bytes == before


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, False),
        ({"PYTORCH_ALLOC_CONF": "expandable_segments:True"}, True),
        ({"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:128, expandable_segments:True"}, True),
        ({"PYTORCH_ALLOC_CONF": "expandable_segments:False"}, False),
        (
            {
                "PYTORCH_ALLOC_CONF": "max_split_size_mb:1",
                "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True",
            },
            False,
        ),
    ],
)
def test_the_environment_decides_whether_segments_expand(environment, expected):
    assert expandable_segments(environment) is expected


def test_steps_go_on_until_no_more_is_reserved():
    """The first step makes the optimizer's state between other blocks."""
    step = transformer(layers=3, width=256, heads=4, batch=8, length=128)
    found = [reserved_for(step, simulate(step, baseline_runs(step)), expandable=e) for e in (False, True)]
    assert all(each.allocated_bytes <= each.least_bytes <= each.reserved_bytes for each in found)
    state = sum(s.nbytes for s in step.storages if s.kind is Kind.OPTIMIZER_STATE)
    stateless = replace(step, storages=tuple(_without_state(s) for s in step.storages))
    less = reserved_for(stateless, simulate(stateless, baseline_runs(stateless)))
    assert less.reserved_bytes <= found[0].reserved_bytes and (
        state == 0 or less.reserved_bytes < found[0][2]
    )


def _without_state(storage):
    return replace(storage, nbytes=0) if storage.kind is Kind.OPTIMIZER_STATE else storage
