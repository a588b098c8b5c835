"""The files that `docs/architecture.md` tells of are the files that a traced training step visits."""

import json
import os
import subprocess
import sys

import pytest
from life_of_a_step import BEGIN, END, PAGE, section, stays

pytestmark = pytest.mark.slow

MOST_FILES = 157
MOST_ENTRIES = 65


@pytest.fixture(scope="module")
def visited(tmp_path_factory):
    script = "import json, life_of_a_step; print(json.dumps(life_of_a_step.visited()))"
    environment = {"LOWTIDE_CACHE_DIR": str(tmp_path_factory.mktemp("costs"))}
    return json.loads(run(script, environment).splitlines()[-1])


def run(script: str, environment: dict[str, str]) -> str:
    folder = str(PAGE.parents[1] / "tests" / "helpers")
    paths = os.pathsep.join(filter(None, (folder, os.environ.get("PYTHONPATH"))))
    done = subprocess.run(
        [sys.executable, "-c", script],
        env={**os.environ, **environment, "PYTHONPATH": paths},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_page_tells_of_the_files_that_a_step_visits(visited):
    page = PAGE.read_text().split(BEGIN)[1].split(END)[0]
    told = {line for line in page.splitlines() if line.startswith("|")}
    rows = {line for line in section(visited).splitlines() if line.startswith("|")}
    # the first file of a stay names its room; which one is first depends on what was measured
    assert {row.split("|", 2)[2] for row in rows} == {row.split("|", 2)[2] for row in told}, (
        "run `python tests/helpers/life_of_a_step.py --write`"
    )


def test_the_way_through_the_house_is_short(visited):
    assert len(visited) <= MOST_FILES
    assert len(list(stays(visited))) <= MOST_ENTRIES
