"""The benchmarks take hours and are not run here: what they import is there."""

import importlib
from pathlib import Path

import pytest

BENCH = Path(__file__).parents[1] / "bench"


@pytest.mark.parametrize("name", sorted(path.stem for path in BENCH.glob("*.py")))
def test_a_benchmark_finds_what_it_imports(name: str) -> None:
    importlib.import_module(name)
