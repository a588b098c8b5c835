"""No network, and nothing runs but what the user named."""

import json
import os
import pickle
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import lowtide

pytestmark = pytest.mark.slow

OFFLINE = """
import socket
def refuse(*_): raise SystemExit("somebody asked for the network")
socket.getaddrinfo = refuse
plain = socket.socket.connect
def connect(self, address):
    return plain(self, address) if self.family == socket.AF_UNIX else refuse()
socket.socket.connect = connect
"""


def small() -> tuple[nn.Module, torch.Tensor]:
    return nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8)), torch.ones(64, 8)


def test_nothing_asks_for_the_network(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise AssertionError("somebody asked for the network")

    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    monkeypatch.setattr(socket.socket, "connect", refuse)
    model, batch = small()
    lowtide.checkpoint(model, batch, budget="1MB")
    model(batch).sum().backward()


@pytest.mark.long
def test_no_command_and_no_child_asks_for_the_network(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(OFFLINE)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])}
    words = [
        "run",
        "tiny-gpt2",
        "-b",
        "2",
        "--budget",
        "90%",
        "--timed-runs",
        "1",
        "-o",
        str(tmp_path / "out"),
    ]
    done = subprocess.run(
        [sys.executable, "-m", "lowtide", *words],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    page = (tmp_path / "out" / "report.html").read_text()
    assert "default-src &#39;none&#39;" in page


def test_reading_a_file_runs_nothing(run_lowtide: Any, tmp_path: Path) -> None:
    ran = tmp_path / "ran"
    (tmp_path / "evil.py").write_text(f"open({str(ran)!r}, 'w')\ndef make(n): pass\n")
    model, batch = small()
    path = tmp_path / "profile.json"
    lowtide.profile(model, batch).save(path)
    spec = {"text": f"{tmp_path / 'evil.py'}:make", "batch_size": 2}
    path.write_text(json.dumps(json.loads(path.read_text()) | {"target": spec}))
    assert run_lowtide("plan", str(path), "--budget", "100%", "-o", str(tmp_path / "out"))[0] == 0
    assert run_lowtide("tradeoff", str(path), "--measure", "0")[0] == 0
    assert not ran.exists()


class _Evil:
    def __reduce__(self) -> Any:
        return exec, ("raise SystemExit('it ran')",)


@pytest.mark.parametrize("command", ["plan", "verify", "solve"])
def test_a_pickle_is_no_file_of_ours(command: str, run_lowtide: Any, tmp_path: Path) -> None:
    path = tmp_path / "file.json"
    path.write_bytes(pickle.dumps(_Evil()))
    words = [command, str(path), *([] if command == "verify" else ["--budget", "60%"])]
    code, _, stderr = run_lowtide(*words)
    assert code == 1 and stderr.startswith("error: cannot read")
