"""The simulated allocator follows the rules that torch documents for its own."""

import random

import pytest
from synthetic import transformer

from lowtide.planning.allocator import MIB, Allocator, reserved_for, rounded
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
