"""Steps on paper: those of sizes that nobody captured, where small ones lack ways that large ones have."""

from dataclasses import replace
from fractions import Fraction

import pytest
import torch
from torch import nn

import lowtide
from lowtide.experiments.fit import Vary, find_fit
from lowtide.experiments.interpolate_step import form_of, sizes_alike, step_at, with_ways_of
from lowtide.zoo.targets import Target

pytestmark = pytest.mark.slow

WIDTH, LENGTH = 64, 128


class Gated(nn.Module):
    """Its pointwise ops run in slices where values are large."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(3)])

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
            x = x.sigmoid() * x.tanh()
        return x.square().mean()


def target(size):
    torch.manual_seed(0)
    return Target("gated", Gated(), torch.randn(size, LENGTH, WIDTH))


def profile(size):
    made = target(size)
    return lowtide.profile(made.model, made.batch)


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    """How large is large depends on how many there are."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def steps():
    return {size: profile(size).step for size in (8, 128, 256)}


def inside(step):
    return [remat.workspace_bytes for node in step.nodes for remat in node.remats]


def methods(step):
    return [tuple(remat.rule for remat in node.remats) for node in step.nodes]


def test_small_sizes_lack_ways_and_tell_of_large_ones_all_the_same(steps):
    assert methods(steps[8]) != methods(steps[128]) == methods(steps[256])
    assert form_of(steps[8]) == form_of(steps[128])
    chosen = {size: steps[size] for size in (8, 128)}
    large, small = step_at(256, chosen, degree=1), step_at(16, chosen, degree=1)
    assert methods(large) == methods(steps[256]) and methods(small) == methods(steps[8])
    assert [s.nbytes for s in large.storages] == [s.nbytes for s in steps[256].storages]


def test_a_way_that_a_size_lacks_holds_what_it_does_where_it_is_known(steps):
    kept = [{remat.rule for remat in node.remats} for node in steps[8].nodes]
    bare = replace(
        steps[128],
        nodes=tuple(
            replace(node, remats=tuple(r for r in node.remats if r.rule in few))
            for node, few in zip(steps[128].nodes, kept, strict=True)
        ),
    )
    told = with_ways_of(bare, steps[256], Fraction(1, 2))
    assert methods(bare) != methods(told) == methods(steps[128])
    assert inside(told) == inside(steps[128])


def test_two_sizes_are_enough_where_only_ways_differ(steps):
    captured = []

    def source(size):
        captured.append(size)
        return target(size)

    found = find_fit(source, budget="80MiB", vary=Vary(), check=False)
    assert found.largest > found.largest_plain > 8 and len(captured) == 2


def test_a_parabola_is_drawn_through_three_sizes_where_some_form_has_them():
    forms = {64: 1, 208: 1, 512: 2, 808: 2, 1216: 2}
    assert sizes_alike(264, forms, degree=2) == [512, 808, 1216]
    assert sizes_alike(264, forms, degree=1) == [208, 64]
    assert sizes_alike(264, {64: 1, 208: 1, 512: 2}, degree=2) == [208, 64]
