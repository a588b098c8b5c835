"""The Trainer on two processes, as torchrun starts them."""

from pathlib import Path

import pytest
from torchrun import torchrun

pytestmark = [pytest.mark.slow, pytest.mark.long]

HERE = Path(__file__).parent


def test_two_processes_find_out_together_what_lightning_holds() -> None:
    pytest.importorskip("lightning.pytorch")
    done = torchrun(HERE / "run_lightning.py", paths=(HERE, HERE.parent / "helpers"))
    assert done.status == 0, done.err
    assert all(f"rank {rank} is as without it" in done.out for rank in (0, 1))


def test_two_processes_train_as_without_it(tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    done = torchrun(HERE / "run_trainer.py", tmp_path, paths=(HERE, HERE.parent / "helpers"))
    assert done.status == 0, done.err
    assert all(f"rank {rank} is as without it" in done.out for rank in (0, 1))
    assert done.err.count("lowtide: predicted peak") == 1, "one of the processes tells"
