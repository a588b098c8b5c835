"""Cases for whatever accelerator torch shows: a GPU by `make test-accelerator`, the stand-in by `make test`.

A process without an accelerator collects none of them; `tests/test_accelerator.py` starts processes that have
the stand-in. `report.py` runs all files, and asks by an environment variable for a line about each case.
"""

import json
import os
from collections.abc import Generator, Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch
from accelerator_cases import FIGURES

collect_ignore_glob = [] if torch.accelerator.is_available() else ["test_*.py"]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Append what became of a case, with its peaks, to the file that `ACCELERATOR_CASES` names, if any."""
    report = yield
    path = os.environ.get("ACCELERATOR_CASES")
    if path and (report.when == "call" or not report.passed):
        case = {"name": item.name, "outcome": report.outcome, "figures": list(FIGURES), "why": _why(report)}
        with Path(path).open("a") as file:
            file.write(json.dumps(case) + "\n")
    if report.when == "teardown":
        FIGURES.clear()
    return report


def _why(report: pytest.TestReport) -> str:
    """The first line of an error, or the reason of a skip."""
    if report.skipped and isinstance(report.longrepr, tuple):
        return report.longrepr[2].removeprefix("Skipped: ")
    crash = getattr(report.longrepr, "reprcrash", None)
    return str(crash.message if crash is not None else report.longrepr or "").partition("\n")[0]


@pytest.fixture(scope="session")
def device() -> torch.device:
    """The accelerator, with its index."""
    found = torch.accelerator.current_accelerator()
    assert found is not None
    return torch.device(found.type, torch.accelerator.current_device_index())


@pytest.fixture
def standin() -> Iterator[ModuleType]:
    """The stand-in, for cases that need its switches; all of them are off again afterwards."""
    module = getattr(torch, "standin", None)
    if module is None:
        pytest.skip("needs a switch that only the stand-in accelerator has")
    yield module
    module.reset()


@pytest.fixture(autouse=True)
def races() -> Iterator[None]:
    """No two streams of the stand-in use one block without an event that orders them."""
    module = getattr(torch, "standin", None)
    if module is not None:
        module.take_races()
    yield
    if module is not None:
        found = module.take_races()
        assert not found, "\n".join(found)
