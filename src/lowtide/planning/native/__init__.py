"""The inner loops of planning, in C: annealing and minimum cuts. This file compiles them.

Compiled, because a move of the search takes microseconds there and a hundred times as long in Python; a
plain library behind ctypes, so that one build serves every version of Python. A wheel contains the library;
a checkout builds it when first needed, which takes a second and a C compiler. Without the library, planning
is refused.

- `library`: finds the library, or builds it, and calls it
- `native.c`: the library's source, which includes the files below
- `state.h`, `sequence.c`, `touches.c`: a sequence of runs and its live bytes
- `changes.c`, `evict.c`, `reorder.c`: runs put in and taken out, and the moves of the search made of these
- `begin.c`, `anneal.c`: from an order of ops to a better one
- `min_cut.c`: minimum cuts

`build` uses the standard library alone: wheels are built by it, too (hatch_build.py).
"""

import hashlib
import os
import subprocess
import tempfile
from pathlib import Path

SOURCE = Path(__file__).with_name("native.c")
"""Includes all other C files beside it."""
FLAGS = ("-O3", "-std=c11", "-shared", "-fPIC")


def library_name(source: Path = SOURCE) -> str:
    """The file name of the library: another one for every other source, whichever of its files differs."""
    digest = hashlib.sha256()
    for path in sorted(source.parent.glob("*.[ch]")):
        digest.update(hashlib.sha256(path.name.encode()).digest())
        digest.update(hashlib.sha256(path.read_bytes()).digest())
    return f"native-{digest.hexdigest()[:12]}.lib"


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
            why = next((line for line in said if "error" in line), said[-1] if said else done.returncode)
            raise OSError(f"{' '.join(command)}: {why}")
        return made.replace(folder / library_name(source))
