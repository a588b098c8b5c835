"""The benchmarks take hours and are not run here: what they import and replace is there."""

import importlib
from pathlib import Path

import pytest

from lowtide import remat
from lowtide.ops import passes

BENCH = Path(__file__).parents[1] / "bench"


@pytest.mark.parametrize("name", sorted(path.stem for path in BENCH.glob("*.py")))
def test_a_benchmark_finds_what_it_imports(name: str) -> None:
    importlib.import_module(name)


def test_levers_can_be_switched_off() -> None:
    from levers_off.switches import without

    rules, all_passes = remat.REMAT_RULES, passes.PASSES
    with without(("packed", "slices", "pieces")):
        assert len(remat.REMAT_RULES) == len(rules) - 7
        assert len(passes.PASSES) == len(all_passes) - 3
    assert (rules, all_passes) == (remat.REMAT_RULES, passes.PASSES)


def test_waits_for_transfers_can_be_timed() -> None:
    from levers_measure import _waits

    with _waits() as waits:
        assert waits == []
