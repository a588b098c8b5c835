"""Commands on the accelerator: `--on` for built-in targets and the user's own, and in fresh processes."""

import csv
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from lowtide.cli.exit_codes import Exit

FACTORY = """
import torch
from torch import nn

def make(batch_size):
    body = [nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)) for _ in range(3)]
    model = nn.Sequential(*body, nn.Linear(64, 1))
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.01)  # has state before its first step
    batch = {"input": torch.randn(128 * batch_size, 64)}
    return model, batch, optimizer, lambda y: y.square().mean()

def closes_over(batch_size):
    labels = torch.zeros(32 * batch_size, 1)
    return nn.Linear(64, 1), torch.randn(32 * batch_size, 64), None, lambda y: (y - labels).square().mean()

def told(batch_size, device="cpu"):
    labels = torch.zeros(32 * batch_size, 1, device=device)
    return nn.Linear(64, 1), torch.randn(32 * batch_size, 64), None, lambda y: (y - labels).square().mean()

def itself(batch_size):
    where = torch.accelerator.current_accelerator()
    return nn.Linear(64, 1).to(where), torch.randn(32 * batch_size, 64, device=where)
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "mine.py"
    path.write_text(FACTORY)
    return path


def test_run(run_lowtide: Any, device: torch.device, file: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    arguments = ("--budget", "80%", "--timed-runs", "0", "-o", str(out), "--json", "-q", "--on", device.type)
    code, stdout, stderr = run_lowtide("run", f"{file}:make", "-b", "8", *arguments)
    data = json.loads(stdout)
    assert code == 0, stderr
    assert data["verification"]["exact"] and data["verification"]["fits"]
    for part in ("profile", "plan", "verification"):
        assert data[part]["device"].startswith(device.type)
        assert f", on {device.type}" in data[part]["target"]
    assert json.loads((out / "plan.json").read_text())["target"]["device"] == device.type
    with (out / "ac_decisions.csv").open() as decisions:
        assert {row["device"].partition(":")[0] for row in csv.DictReader(decisions)} == {device.type}
    assert torch.get_device_module(device).get_device_name(device) in (out / "report.html").read_text()
    code, _, stderr = run_lowtide("verify", str(out / "plan.json"), "--on", "cpu")
    assert code == Exit.USAGE and f"is for a step on {device.type}" in stderr


def test_where_a_factory_puts_its_model(run_lowtide: Any, device: torch.device, file: Path) -> None:
    where = ("--on", str(device))
    for name, options, kind in (
        ("itself", (), device.type),
        ("itself", ("--on", "cpu"), "cpu"),
        ("told", where, device.type),
        ("told", (), "cpu"),
    ):
        code, stdout, stderr = run_lowtide("profile", f"{file}:{name}", "-b", "2", *options, "--json", "-q")
        assert code == 0, stderr
        assert json.loads(stdout)["device"].partition(":")[0] == kind
    code, _, stderr = run_lowtide("profile", f"{file}:closes_over", "-b", "2", *where, "-q")
    assert code == Exit.ERROR and len(stderr.splitlines()) == 1 and "device" in stderr


@pytest.mark.parametrize(
    "arguments",
    [
        ("sweep", "-b", "4", "--budget", "80%", "--predict"),
        ("tradeoff", "-b", "4", "--points", "3", "--measure", "0"),
        pytest.param(("sweep", "-b", "4", "--budget", "80%", "--timed-runs", "0"), marks=pytest.mark.long),
        pytest.param(("tradeoff", "-b", "4", "--points", "3", "--measure", "1"), marks=pytest.mark.long),
        pytest.param(("compare", "-b", "4", "--memory-budgets", "0"), marks=pytest.mark.long),
    ],
    ids=lambda arguments: f"{arguments[0]} {arguments[-1]}",
)
def test_an_experiment(
    run_lowtide: Any, device: torch.device, file: Path, tmp_path: Path, arguments: tuple[str, ...]
) -> None:
    name, *options = arguments
    target = (f"{file}:make", "--on", device.type, "--json", "-q", "-o", str(tmp_path / name))
    code, stdout, stderr = run_lowtide(name, *target, *options)
    assert code == 0, stderr
    assert json.loads(stdout)["device"].partition(":")[0] == device.type
    with (tmp_path / name / f"{name}.csv").open() as table:
        assert {row["device"].partition(":")[0] for row in csv.DictReader(table)} == {device.type}


@pytest.mark.parametrize("check", [False, pytest.param(True, marks=pytest.mark.long)])
def test_fit(run_lowtide: Any, device: torch.device, file: Path, check: bool) -> None:
    options = ("--budget", "6MiB", "--most", "16", "--json", "-q", *(() if check else ("--no-check",)))
    code, stdout, stderr = run_lowtide("fit", f"{file}:make", "--on", device.type, *options)
    data = json.loads(stdout)
    assert code == 0, stderr
    assert data["device"].partition(":")[0] == device.type
    assert [found["exact"] for found in data["checks"] if found["planned"]] == [True] * check


def test_this_process_keeps_nothing_on_the_device(run_lowtide: Any, device: torch.device) -> None:
    size = ("tiny-gpt2", "-b", "8", "--on", str(device))
    before = torch.accelerator.memory_allocated(device)
    assert run_lowtide("profile", *size, "-q")[0] == 0
    assert torch.accelerator.memory_allocated(device) - before < 1 << 16
    assert torch.accelerator.memory_reserved(device) <= 4 << 20
