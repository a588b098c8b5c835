"""Whatever the layers: the same results to the last bit, and the peak that was promised."""

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from models import Design, designs
from training import differences, measured_peak, train, twin

from lowtide.api import profile
from lowtide.zoo.targets import Target

pytestmark = pytest.mark.slow

SLACK = 0.01
SCALARS_BYTES = 2048

# no shrinking: a failing design is small enough to read, and each try takes seconds
SAME_EVERY_TIME = settings(
    deadline=None,
    derandomize=True,
    database=None,
    phases=(Phase.explicit, Phase.generate),
    suppress_health_check=list(HealthCheck),
)


def check(design: Design, *, points: int = 2) -> None:
    """Exact and as predicted at so many budgets, from the lowest reachable peak upward."""
    torch.manual_seed(0)
    model = design.build()
    target = Target("random", model, design.batch(), torch.optim.Adam(model.parameters(), lr=1e-3))
    expected = train(twin(target))
    found = profile(target.model, target.batch, optimizer=target.optimizer)
    low, high = found.floor_bytes, max(found.peak_bytes, found.floor_bytes)
    for point in range(points):
        plan = found.plan(low + (high - low) * point // points)
        planned = target if point == points - 1 else twin(target)
        plan.apply(planned.model)
        assert differences(expected, train(planned)) == [], point
        measured = measured_peak(planned)
        assert measured <= plan.peak_bytes <= plan.budget_bytes, point
        assert measured >= plan.peak_bytes * (1 - SLACK) - SCALARS_BYTES, point


@settings(SAME_EVERY_TIME, max_examples=3)
@given(designs(images=False))
def test_random_models_of_rows(design: Design) -> None:
    check(design)


@pytest.mark.long
@settings(SAME_EVERY_TIME, max_examples=3)
@given(designs(images=True))
def test_random_models_of_images(design: Design) -> None:
    check(design)


@pytest.mark.long
@settings(SAME_EVERY_TIME, max_examples=100, print_blob=True)
@given(designs(images=False, max_layers=16) | designs(images=True, max_layers=16))
def test_many_random_models(design: Design) -> None:
    """300 pairs of a model and a budget. A failure names its design, and the blob that brings it back."""
    check(design, points=3)
