"""The clients of `bench/clients`: each file is whole and its library pinned; the two cheapest train here."""

import ast
from pathlib import Path

import pytest
import torch

from client_runs.client_page import markdown
from client_runs.client_row import ClientRow
from client_runs.compare import Client, first_difference, judge
from client_runs.journal import digest
from client_runs.trained import Trained, train_client
from client_suite import CLIENTS, every_client
from coverage_cases.outcome import GOOD, OVER

MOST_LINES = 80
LEAST_CLIENTS = 30

PINNED = dict(
    line.split("==")
    for line in (CLIENTS / "requirements.txt").read_text().splitlines()
    if not line.startswith("#")
)


@pytest.mark.parametrize("client", every_client(), ids=lambda client: client.name)
def test_a_client_is_whole_and_its_library_pinned(client: Client) -> None:
    source = (CLIENTS / f"{client.name}.py").read_text()
    tree = ast.parse(source)
    (train,) = (each for each in tree.body if isinstance(each, ast.FunctionDef) and each.name == "train")
    assert ast.get_docstring(tree) and client.loop
    assert [argument.arg for argument in train.args.args] == ["run"]
    assert ("run.plan(" in source) + ("run.callbacks(" in source) == 1 and "run.steps" in source
    assert len(source.splitlines()) <= MOST_LINES
    assert PINNED[client.library]


def test_nothing_is_installed_for_nobody() -> None:
    clients = every_client()
    assert set(PINNED) == {client.library for client in clients} and len(clients) >= LEAST_CLIENTS


@pytest.mark.slow
@pytest.mark.parametrize(
    "name, library", [("accelerate_loop", "accelerate"), ("lightning_trainer", "lightning")]
)
def test_a_client_trains_within_its_budget_as_without_a_plan(
    name: str, library: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip(library)
    monkeypatch.chdir(tmp_path)
    eager = train_client(name)
    above = eager.peak_bytes - eager.beside_bytes
    planned = train_client(name, above)
    if not planned.budget_bytes:  # a callback told its floor
        planned = train_client(name, above, planned.floor_bytes)
    row = ClientRow(name, library, "", "")
    judge(row, eager, planned)
    assert row.outcome == GOOD, row
    assert row.peak_bytes < above and row.compared > 20 and row.num_graphs == 1


def test_one_bit_is_a_difference() -> None:
    one, other = torch.zeros(3, dtype=torch.bfloat16), torch.zeros(3, dtype=torch.bfloat16)
    assert digest([one, None]) == digest([other, None]) != digest([None, one])
    other.view(torch.int16)[1] ^= 1
    same = Trained(entries=[("loss 1", digest([one])), ("gradients 1", digest([one]))])
    differs = Trained(entries=[("loss 1", digest([one])), ("gradients 1", digest([other]))])
    assert not first_difference(same, same)
    assert first_difference(same, differs) == "1 of 2 differ, first gradients 1"


def test_a_peak_above_the_budget_is_told() -> None:
    row = ClientRow("a_loop", "a", "1.0", "a model", day="2026-11-18")
    trained = Trained(entries=[("loss 1", "")], peak_bytes=300, beside_bytes=50)
    planned = Trained(entries=[("loss 1", "")], peak_bytes=270, budget_bytes=200, predicted_bytes=190)
    judge(row, trained, planned)
    assert (row.outcome, row.peak_bytes) == (OVER, 220)
    assert "| a_loop | exact, over the budget | 20 B over (10.0%); without a warning |" in markdown([row])
