"""Run a program on two processes as users do, and leave none of them behind."""

import os
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parent.parent.parent
SECONDS = 600


class Ended(NamedTuple):
    status: int
    out: str
    err: str


def torchrun(program: Path, *arguments: str | Path, paths: tuple[Path, ...] = ()) -> Ended:
    """`program` on two processes, with `paths` to import from; a free port is torchrun's own choice.

    The processes are in sessions of their own: only torchrun can end them, so that it is asked to.
    """
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    found = os.pathsep.join(map(str, (ROOT / "src", *paths)))
    environ = os.environ | {"PYTHONPATH": found, "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive"}
    with subprocess.Popen(
        [*command, program, *arguments],
        env=environ,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as started:
        try:
            out, err = started.communicate(timeout=SECONDS)
        except BaseException:
            started.terminate()
            try:
                started.communicate(timeout=60)
            finally:
                started.kill()
            raise
    return Ended(started.returncode, out, err)
