"""Files that cannot be written, or only half: the old one stays, and the next run works."""

import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from synthetic import chain

from lowtide.errors import LowtideError
from lowtide.facts.files import write_atomic
from lowtide.facts.serial import load_step, save_step

SAVE_FOREVER = """
import sys
from synthetic import chain
from lowtide.facts.serial import save_step
print("saving", flush=True)
while True:
    save_step(sys.argv[1], chain(length=3))
    save_step(sys.argv[1], chain(length=900))
"""


@contextmanager
def room_for(nbytes: int) -> Iterator[None]:
    """The system refuses to let a file grow larger, as it does where a disk is full."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)


def test_a_full_disk_leaves_what_was_there(tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    save_step(path, chain(length=3))
    before = path.read_bytes()
    with (
        room_for(len(before)),
        pytest.raises(LowtideError, match=r"cannot write .*profile\.json: ") as caught,
    ):
        save_step(path, chain(length=900))
    assert "\n" not in str(caught.value)
    assert path.read_bytes() == before and list(tmp_path.iterdir()) == [path]
    save_step(path, chain(length=900))
    assert load_step(path) == chain(length=900)


def test_a_file_has_the_mode_of_any_new_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The umask belongs to all threads: while it is changed, even for a moment, another thread's files have
    wrong modes."""
    before = os.umask(0o027)
    monkeypatch.setattr(os, "umask", lambda mask: pytest.fail("the umask was changed"))
    try:
        path = write_atomic(tmp_path / "plan.json", "{}")
    finally:
        monkeypatch.undo()
        os.umask(before)
    assert path.stat().st_mode & 0o777 == 0o640


@pytest.mark.parametrize("folder", ["/proc/lowtide", "{file}/below"])
def test_a_folder_that_cannot_be_written(folder: str, tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("mine")
    with pytest.raises(LowtideError, match="cannot write"):
        write_atomic(Path(folder.format(file=file)) / "plan.json", "{}")
    assert file.read_text() == "mine"


@pytest.mark.parametrize("seconds", [0.03, 0.11])
def test_a_writer_that_is_killed_leaves_a_whole_file(seconds: float, tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen(
        [sys.executable, "-c", SAVE_FOREVER, str(path)], env=environment, stdout=subprocess.PIPE
    ) as writer:
        assert writer.stdout is not None and writer.stdout.readline()
        while not path.exists():
            time.sleep(0.01)
        time.sleep(seconds)
        writer.kill()
    assert load_step(path) in (chain(length=3), chain(length=900))
    save_step(path, chain(length=5))
    assert load_step(path) == chain(length=5)
