"""Compile the library. Stands on the standard library alone: wheels are built by it, too."""

import hashlib
import os
import subprocess
import tempfile
from pathlib import Path

SOURCE = Path(__file__).with_name("native.c")
FLAGS = ("-O3", "-std=c11", "-shared", "-fPIC")


def library_name(source: Path = SOURCE) -> str:
    """The file name of the library: another one for every other source."""
    return f"native-{hashlib.sha256(source.read_bytes()).hexdigest()[:12]}.lib"


def build(folder: Path, source: Path = SOURCE) -> Path:
    """Compile the library into `folder`; a half-written one is never seen. OSError where that fails."""
    compiler = os.environ.get("CC") or "cc"
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        made = Path(scratch) / "native.lib"
        command = [*compiler.split(), *FLAGS, "-o", str(made), str(source), "-lm"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            said = done.stderr.strip().splitlines()
            raise OSError(f"{' '.join(command)}: {said[-1] if said else done.returncode}")
        return made.replace(folder / library_name(source))
