"""A sample of the coverage table (`bench/coverage.py`)."""

import pytest

from coverage_cases.case import Case
from coverage_cases.constructions import CONSTRUCTIONS
from coverage_cases.examine import differences, examine, results, twin
from coverage_cases.forwards import FORWARDS
from coverage_cases.loops import LOOPS
from coverage_cases.outcome import GOOD, OVER

pytestmark = pytest.mark.slow

SAMPLE = (
    *("deep-residual", "alpha-dropout", "group-norm", "convolutions", "depthwise", "lstm"),
    *("tied-weights", "masked-attention", "rotary", "experts", "own-checkpoint", "einsum"),
    *("running-mean", "vector-quantized", "fourier", "bfloat16"),
    *("adam-fused", "clip-norm", "autocast-bfloat16", "grad-scaler", "smaller-last-batch"),
    *("inference-mode-between", "low-rank-adapters", "gan", "several-losses", "autograd-grad"),
    *("gradient-hooks", "numpy-in-forward", "never-drops-layers", "asks-whether-compiled"),
    *("accumulation", "forward-hooks", "exception-in-forward", "drops-layers"),
)
CASES = {case.name: case for case in (*CONSTRUCTIONS, *LOOPS, *FORWARDS)}


@pytest.mark.parametrize("name", SAMPLE)
def test_exact_and_within_the_budget(name: str) -> None:
    row = examine(CASES[name])
    assert row.outcome == GOOD, row


def test_accumulated_gradients_are_exact_and_warned_of() -> None:
    row = examine(CASES["accumulation-not-told"])
    assert row.outcome in (GOOD, OVER), row  # whether the gradients set the peak is up to the machine
    assert "gradients are there before the forward pass" in row.words


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
