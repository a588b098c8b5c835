"""Every example runs as it is, at a tiny size."""

import importlib.util
import os
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore::UserWarning")]

ROOT = Path(__file__).parent.parent
EXAMPLES = ROOT / "examples"
ALONE = {
    "resnet_images.py": ("transformers", ["--steps", "2"]),
    "bert_trainer.py": ("accelerate", []),
    "gpt2_bf16.py": ("transformers", ["--layers", "1", "--steps", "2"]),
    "unet_lightning.py": ("lightning", []),
}
TRAINERS = ("bert_trainer.py", "unet_lightning.py")
TOGETHER = {"ddp.py": "lowtide.api", "fsdp2.py": "lowtide.torchside.sharded"}
"""Examples for several processes, each with the module that it needs of lowtide."""


def is_there(name: str) -> bool:
    return importlib.util.find_spec(name) is not None


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in TRAINERS else pytest.mark.long) for name in ALONE]
)
def test_an_example(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    package, arguments = ALONE[name]
    pytest.importorskip(package)
    monkeypatch.setattr(sys, "argv", [name, *arguments])
    monkeypatch.chdir(tmp_path)
    runpy.run_path(str(EXAMPLES / name), run_name="__main__")
    assert "loss" in capsys.readouterr().out


@pytest.mark.long
@pytest.mark.parametrize("name", TOGETHER)
def test_an_example_for_two_processes(name: str) -> None:
    if not is_there(TOGETHER[name]):
        pytest.skip(f"this version has no {TOGETHER[name]}")
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--standalone",
            "--nproc-per-node=2",
            EXAMPLES / name,
        ],
        env=os.environ | {"PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert all(f"rank {rank}, step 2: loss" in done.stdout for rank in (0, 1))


def test_examples_are_short_and_listed() -> None:
    names = {path.name for path in EXAMPLES.glob("*.py")}
    assert names == {*ALONE, *TOGETHER}
    listed = (EXAMPLES / "README.md").read_text()
    for name in names:
        assert f"[{name}]" in listed
        assert len((EXAMPLES / name).read_text().splitlines()) < 60
