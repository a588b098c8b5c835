"""The Trainer on two processes, as torchrun starts them."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.long]

HERE = Path(__file__).parent


def test_two_processes_train_as_without_it(tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    paths = [HERE.parent.parent / "src", HERE, HERE.parent / "helpers"]
    done = subprocess.run(
        [*torchrun, HERE / "run_trainer.py", tmp_path],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(map(str, paths)), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert all(f"rank {rank} is as without it" in done.stdout for rank in (0, 1))
    assert done.stderr.count("lowtide: predicted peak") == 1, "one of the processes tells"
