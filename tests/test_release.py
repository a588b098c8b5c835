"""What is released: an sdist that builds, and a wheel that runs with its base dependencies alone."""

import os
import re
import subprocess
import sys
import tarfile
import zipfile
from email.message import Message
from email.parser import Parser
from pathlib import Path

import pytest
from synthetic import chain

import lowtide
from lowtide.planning.native import library_name
from lowtide.profiles import Profile

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[1]
EXTRAS = ("models", "transformers", "lightning", "peft", "accelerate", "plots", "docs", "dev")
BUILDERS = ("hatchling>=1.27", "hatch-fancy-pypi-readme>=25.1", "auditwheel>=6.2")
OPTIONAL = ("transformers", "accelerate", "lightning", "pytorch_lightning", "peft", "matplotlib", "sphinx")
WITHOUT_EXTRAS = f"""
import sys
class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {OPTIONAL!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
sys.meta_path.insert(0, Missing())
"""


def run(*words: str | Path, **environment: str) -> str:
    done = subprocess.run(
        [str(word) for word in words],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, f"{words}\n{done.stdout}{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the sdist, and the wheel that was built from it."""
    folder = tmp_path_factory.mktemp("release")
    tools = folder / "tools"
    found = subprocess.run(
        [sys.executable, "-m", "pip", "install", "-q", "--target", tools, *BUILDERS],
        capture_output=True,
        check=False,
    )
    if found.returncode:
        pytest.skip(f"needs pip, and an index or a cache with {', '.join(BUILDERS)}")
    path = os.pathsep.join([str(tools), *sys.path])
    run(
        sys.executable,
        "-m",
        "hatchling",
        "build",
        "-t",
        "sdist",
        "-d",
        folder,
        PYTHONPATH=path,
        PWD=str(ROOT),
    )
    (sdist,) = folder.glob("*.tar.gz")
    source = folder / "source"
    with tarfile.open(sdist) as archive:
        archive.extractall(source, filter="data")
    (tree,) = source.iterdir()
    run(
        *(
            sys.executable,
            "-m",
            "pip",
            "wheel",
            "-q",
            "--no-deps",
            "--no-build-isolation",
            "-w",
            folder,
            tree,
        ),
        PYTHONPATH=path,
    )
    return folder


def wheel_of(dist: Path) -> Path:
    (wheel,) = dist.glob("*.whl")
    return wheel


def test_the_version_is_the_changelogs() -> None:
    headings = [line for line in (ROOT / "CHANGELOG.md").read_text().splitlines() if line.startswith("## ")]
    released = [heading for heading in headings if heading != "## Unreleased"]
    assert released[0].split()[1] == lowtide.__version__


def test_what_is_in_the_wheel(dist: Path) -> None:
    wheel = wheel_of(dist)
    assert wheel.name.startswith(f"lowtide-{lowtide.__version__}-py3-none-")
    names = zipfile.ZipFile(wheel).namelist()
    package = {
        str(path.relative_to(ROOT / "src"))
        for path in (ROOT / "src" / "lowtide").rglob("*")
        if path.is_file() and path.suffix in {".py", ".html", ".js", ".css", ".c", ".h"}
    }
    assert package <= set(names), package - set(names)
    assert f"lowtide/planning/native/{library_name()}" in names, "the planner's compiled part"
    assert all(name.startswith(("lowtide/", "lowtide-")) for name in names)


def metadata_of(wheel: Path) -> Message:
    archive = zipfile.ZipFile(wheel)
    (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
    return Parser().parsestr(archive.read(name).decode())


def test_a_package_index_gets_links_that_lead_somewhere(dist: Path) -> None:
    metadata = metadata_of(wheel_of(dist))
    links = re.findall(r"\]\(([^)\s]+)\)", metadata.get_payload())
    assert len(links) > 20 and [link for link in links if not link.startswith(("https://", "#"))] == []
    (homepage,) = (url for url in metadata.get_all("Project-URL", []) if url.startswith("Homepage"))
    assert homepage.split()[-1] in metadata.get_payload(), "links of the README lead to the project's page"


def test_the_wheel_has_the_licences_of_what_it_contains(dist: Path) -> None:
    metadata = metadata_of(wheel_of(dist))
    vendored = {str(path.relative_to(ROOT)) for path in (ROOT / "src").rglob("LICENSE*")}
    assert vendored and {"LICENSE", *vendored} == set(metadata.get_all("License-File", []))
    assert metadata["License-Expression"] == "Apache-2.0 AND MIT"


def test_auditwheel_finds_a_tag_that_a_package_index_takes(dist: Path) -> None:
    tools = str(dist / "tools")
    said = run(sys.executable, "-m", "auditwheel", "show", wheel_of(dist), PYTHONPATH=tools)
    assert "manylinux_2_" in said


def test_the_citation_is_of_this_version() -> None:
    assert f"\nversion: {lowtide.__version__}\n" in (ROOT / "CITATION.cff").read_text()


def test_the_wheel_runs_without_extras_and_without_a_compiler(dist: Path, tmp_path: Path) -> None:
    clean = tmp_path / "clean"
    run(sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", clean, wheel_of(dist))
    (clean / "sitecustomize.py").write_text(WITHOUT_EXTRAS)
    profile = tmp_path / "profile.json"
    Profile(chain(length=12)).save(profile)
    command = (sys.executable, "-P", "-m", "lowtide")
    environment = {"PYTHONPATH": str(clean), "CC": "/nowhere/cc", "XDG_CACHE_HOME": str(tmp_path)}
    assert lowtide.__version__ in run(*command, "--version", **environment)
    where = run(sys.executable, "-P", "-c", "import lowtide; print(lowtide.__file__)", **environment)
    assert Path(where.strip()).is_relative_to(clean)
    run(*command, "plan", profile, "--budget", "90%", "-o", tmp_path / "out", **environment)
    assert (tmp_path / "out" / "plan.json").exists()
    assert "tiny-gpt2" in run(*command, "models", **environment)


@pytest.mark.long
@pytest.mark.parametrize("extra", ["", *EXTRAS])
def test_an_empty_environment(extra: str, dist: Path, tmp_path: Path) -> None:
    python = tmp_path / "env" / "bin" / "python"
    run(sys.executable, "-m", "venv", tmp_path / "env")
    wheel = f"lowtide[{extra}] @ {wheel_of(dist).as_uri()}" if extra else str(wheel_of(dist))
    run(python, "-m", "pip", "install", "-q", wheel, PYTHONPATH="")
    target = "tiny-gpt2" if extra in ("models", "transformers") else "tiny-transformer"
    words = ("run", target, "-b", "4", "--budget", "95%", "--timed-runs", "1", "-o", tmp_path / "out")
    run(python, "-m", "lowtide", *words, PYTHONPATH="", CC="/nowhere/cc")
    assert (tmp_path / "out" / "report.html").exists()
