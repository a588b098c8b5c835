"""Every example runs as it is, at a tiny size."""

import runpy
import sys
from pathlib import Path

import pytest
from torchrun import ROOT, torchrun

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::UserWarning", "ignore:.*LeafSpec.*:FutureWarning"),
]

EXAMPLES = ROOT / "examples"
ALONE = {
    "resnet_images.py": ("transformers", ["--steps", "2"]),
    "bert_trainer.py": ("accelerate", []),
    "gpt2_bf16.py": ("transformers", ["--layers", "1", "--steps", "2"]),
    "unet_lightning.py": ("lightning", []),
}
TRAINERS = ("bert_trainer.py", "unet_lightning.py")
TOGETHER = ("ddp.py", "fsdp2.py", "pipeline.py", "tensor_parallel.py")
"""Examples for several processes."""


@pytest.mark.sample(1)
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
    done = torchrun(EXAMPLES / name)
    assert done.status == 0, done.err
    assert all(f"rank {rank}, step 2: loss" in done.out for rank in (0, 1))


def test_examples_are_short_and_listed() -> None:
    names = {path.name for path in EXAMPLES.glob("*.py")}
    assert names == {*ALONE, *TOGETHER}
    listed = (EXAMPLES / "README.md").read_text()
    for name in names:
        assert f"[{name}]" in listed
        assert len((EXAMPLES / name).read_text().splitlines()) < 60
