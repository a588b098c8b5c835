import gc
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings
from impatience import be_impatient

from lowtide.cli import app
from lowtide.profiling.op_trials import Trial

# A busy machine is no failure.
settings.register_profile("without a clock", deadline=None)
settings.load_profile("without a clock")

IS_NOISY = Trial.noisy


@pytest.fixture(scope="session", autouse=True)
def temporary_home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Nothing of the user's is read or written: this run has a home of its own, in all its processes.

    The workers of one run share it: the costs that one has measured, the others need not.
    """
    run = tmp_path_factory.getbasetemp()
    home = (run.parent if "PYTEST_XDIST_WORKER" in os.environ else run) / "home"
    home.mkdir(exist_ok=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HOME", str(home))
        patch.setenv("XDG_CACHE_HOME", str(home / ".cache"))
        patch.setenv("LOWTIDE_CACHE_DIR", str(home / "costs"))
        yield home


@pytest.fixture(scope="session", autouse=True)
def idle_machine() -> Iterator[None]:
    """Tests keep their own machine busy: what they time is good enough for them, and is remembered."""
    with pytest.MonkeyPatch.context() as patch:
        be_impatient(patch.setattr)
        yield


@pytest.fixture(autouse=True)
def busy_machine(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.node.get_closest_marker("busy") is not None:
        monkeypatch.setattr(Trial, "noisy", IS_NOISY)


@pytest.fixture(autouse=True)
def young_heap() -> Iterator[None]:
    """Whatever looks for garbage, looks at what this test has made: torch leaves a million objects behind."""
    yield
    gc.collect()
    gc.freeze()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Of a test marked `sample(number)`, so many cases are run, evenly spread; the others are long."""
    grids: dict[str, list[pytest.Item]] = {}
    for item in items:
        if item.get_closest_marker("sample") is not None and item.get_closest_marker("long") is None:
            grids.setdefault(item.nodeid.partition("[")[0], []).append(item)
    for cases in grids.values():
        marker = cases[0].get_closest_marker("sample")
        assert marker is not None
        number = min(len(cases), *marker.args)
        chosen = {place * len(cases) // number for place in range(number)}
        for place, item in enumerate(cases):
            if place not in chosen:
                item.add_marker(pytest.mark.long)


@pytest.fixture
def run_lowtide(monkeypatch, capsys):
    """Run the command line in this process: `code, stdout, stderr = run_lowtide("models", "--json")`."""

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["lowtide", *arguments])
        with pytest.raises(SystemExit) as caught:
            app.main()
        return (caught.value.code or 0, *capsys.readouterr())

    return run
