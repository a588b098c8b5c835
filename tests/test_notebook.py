"""The example notebook is stored with what it shows, runs from top to bottom, and shows its pictures."""

import ast
import json
from pathlib import Path
from typing import Any

import pytest

from lowtide.errors import CannotMoveToFreshProcess
from lowtide.verification import verify_plan

pytestmark = pytest.mark.slow

NOTEBOOK = Path(__file__).parents[1] / "examples" / "first_look.ipynb"


def run_cell(source: str, names: dict[str, Any]) -> Any:
    """What a notebook would show: the value of a last line that is an expression."""
    body = ast.parse(source).body
    shown = body.pop() if body and isinstance(body[-1], ast.Expr) else None
    exec(compile(ast.Module(body, []), "cell", "exec"), names)
    return None if shown is None else eval(compile(ast.Expression(shown.value), "cell", "eval"), names)


def test_the_stored_outputs_are_those_of_a_run_without_errors_and_progress() -> None:
    """`python bench/notebook.py` stores them."""
    text = NOTEBOOK.read_text()
    cells = [cell for cell in json.loads(text)["cells"] if cell["cell_type"] == "code"]
    assert [cell["execution_count"] for cell in cells] == list(range(1, len(cells) + 1))
    outputs = [output for cell in cells for output in cell["outputs"]]
    cards = [
        "".join(output["data"]["text/html"]) for output in outputs if "text/html" in output.get("data", {})
    ]
    assert len(cards) == 3 and all("<svg" in card for card in cards)
    assert all(output["output_type"] != "error" and output.get("name") != "stderr" for output in outputs)
    assert "equal to eager training to the last bit" in text


def test_the_notebook(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """In one process: what fresh ones find is tested elsewhere."""

    def stay_here(*_: Any, **__: Any) -> None:
        raise CannotMoveToFreshProcess("a test")

    monkeypatch.setattr(verify_plan, "run_fresh", stay_here)
    monkeypatch.chdir(tmp_path)
    cells = json.loads(NOTEBOOK.read_text())["cells"]
    names: dict[str, Any] = {"__name__": "notebook"}
    shown = [run_cell("".join(cell["source"]), names) for cell in cells if cell["cell_type"] == "code"]
    cards = [value._repr_html_() for value in shown if hasattr(value, "_repr_html_")]
    assert len(cards) == 3
    for card in cards:
        assert card.count("<svg") == 1 and "<script" not in card
    assert names["verification"].exact and "equal to eager" in names["verification"].summary()
    page = (tmp_path / "verified.html").read_text()
    assert "Memory over the step" in page and "Resident peak" in page
    plan = names["plan"]
    assert plan.summary().count("\n") >= 4 and len(repr(plan)) < 200
    assert "Decisions" in plan.report(tmp_path / "plan.html").read_text()
    assert "Memory over the step" in names["profile"].report(tmp_path / "profile.html").read_text()
