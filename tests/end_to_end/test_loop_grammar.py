"""Loops that users write around a planned model, drawn from a grammar: exact, within the budget, or told."""

import os
from collections import Counter

import pytest
from loop_grammar import WRONG, LoopCase, code_of, drawn, outcome_of, shortest

from lowtide.runtime import backend

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings(
        "ignore:Full backward hook is firing:UserWarning", "ignore:.*lr_scheduler.*:UserWarning"
    ),
]

FIRST = int(os.environ.get("LOWTIDE_SEED", "0"))
"""The number of the first loop: LOWTIDE_SEED=300 draws others."""


def check(seed: int) -> str:
    """The kind of a loop's outcome; fails with the code of the shortest loop that is wrong like it."""
    case = drawn(seed)
    found = outcome_of(case)
    if found.kind == WRONG:
        short = shortest(case)
        pytest.fail(f"loop {seed}: {found.why}\n{case}\nshortest: {short}\n{code_of(short)}", pytrace=False)
    return found.kind


@pytest.mark.sample(5)
@pytest.mark.parametrize("seed", range(20))
def test_a_loop(seed: int) -> None:
    check(seed)


@pytest.mark.long
@pytest.mark.parametrize("tenth", range(10))
def test_many_loops(tenth: int) -> None:
    first = FIRST + 30 * tenth
    kinds = Counter(check(seed) for seed in range(first, first + 30))
    print(f"loops {first} to {first + 29}: {dict(kinds)}")


def test_a_sum_in_another_order_is_found_and_shortened(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backend, "with_receivers", lambda function, _places: function)
    wrong = LoopCase(model="reuse", around="penalty", also="clipping", optimizer="adamw", budget="middle")
    assert "differs from eager" in outcome_of(wrong).why
    assert shortest(wrong) == LoopCase(model="reuse", around="penalty")


def test_a_budget_that_is_exceeded_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lowtide.runtime.replan.Replanner.counts_loop", property(lambda _self: False))
    wrong = LoopCase(loss="more than given", budget="floor")
    assert "without a word" in outcome_of(wrong).why
