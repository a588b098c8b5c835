"""A sample of the coverage table (`bench/coverage.py`)."""

import pytest

from coverage_cases.case import Case
from coverage_cases.constructions import CONSTRUCTIONS
from coverage_cases.examine import differences, examine, results, twin
from coverage_cases.forwards import FORWARDS
from coverage_cases.loops import LOOPS
from coverage_cases.outcome import GOOD

pytestmark = pytest.mark.slow

SAMPLE = (
    *("deep-residual", "alpha-dropout", "group-norm", "depthwise", "masked-attention", "rotary", "experts"),
    *("running-mean", "vector-quantized", "fourier", "adam-fused", "clip-norm", "inference-mode-between"),
    *("low-rank-adapters", "several-losses", "autograd-grad", "never-drops-layers", "drops-layers"),
)
TESTED_ELSEWHERE = (
    *("convolutions", "lstm", "tied-weights", "own-checkpoint", "einsum", "bfloat16", "autocast-bfloat16"),
    *("grad-scaler", "smaller-last-batch", "gan", "gradient-hooks", "forward-hooks"),
    *("numpy-in-forward", "asks-whether-compiled", "accumulation", "exception-in-forward"),
)
"""With other models, in the tests of constructs, situations, mixed precision, recurrent layers, numpy,
eager's paths, accumulation and failing calls."""
CASES = {case.name: case for case in (*CONSTRUCTIONS, *LOOPS, *FORWARDS)}


@pytest.mark.sample(5)
@pytest.mark.parametrize(
    "name", [*SAMPLE, *(pytest.param(name, marks=pytest.mark.long) for name in TESTED_ELSEWHERE)]
)
def test_exact_and_within_the_budget(name: str) -> None:
    row = examine(CASES[name])
    assert row.outcome == GOOD, row


def test_accumulated_gradients_are_exact_and_counted() -> None:
    row = examine(CASES["accumulation-not-told"])
    assert row.outcome == GOOD, row


def test_a_difference_would_be_seen() -> None:
    training = CASES["mlp"].build()
    expected = results(twin(training))
    assert differences(expected, results(twin(training))) == []
    other = twin(training)
    next(other.model.parameters()).data.view(-1)[0] += 1e-6
    assert differences(expected, results(other))


def test_every_case_has_a_name_of_its_own() -> None:
    def names(cases: list[Case]) -> list[str]:
        return [case.name for case in cases]

    loops = LOOPS + FORWARDS
    assert len(set(names(CONSTRUCTIONS) + names(loops))) == len(CONSTRUCTIONS) + len(loops)
    assert len(CONSTRUCTIONS) >= 40
    assert len(loops) >= 60
