"""Facts to JSON and back, compact and versioned."""

import json
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from lowtide.errors import LowtideError
from lowtide.facts import (
    Action,
    Decision,
    Graph,
    Kind,
    Link,
    Node,
    Offload,
    Recipe,
    Region,
    Reserve,
    Run,
    Schedule,
    Solution,
    Step,
    Storage,
)
from lowtide.facts.checked import check_types
from lowtide.facts.consistency import check_step
from lowtide.facts.files import write_atomic

STEP_FORMAT = "lowtide-step/2"
SOLUTION_FORMAT = "lowtide-plan/2"

LATER = (
    "step_in_backward",
    "holds_outputs",
    "optimizer_piece_bytes",
    "executor",
    "lower_bound_seconds",
    "floor_bound_bytes",
    "offload",
    "gradient_orders",
)
"""Fields of a solution that older files do not have."""

OFFLOADING = ("releases", "released_after", "fetched_before")
"""Columns that are written only where something is offloaded."""


def step_to_dict(step: Step) -> dict[str, Any]:
    """Tables with one list of columns each, since names repeated 4,000 times are most of the bytes."""
    return {
        "format": STEP_FORMAT,
        "fingerprint": step.fingerprint,
        "device": step.device,
        "copy_bytes_per_second": step.copy_bytes_per_second,
        "notes": list(step.notes),
        "graphs": _table(step.graphs, Graph),
        "identity": [list(pair) for pair in step.identity],
        "methods": [list(pair) for pair in step.methods],
        "holds_outputs": step.holds_outputs,
        **({} if step.link is None else {"link": asdict(step.link)}),
        **({"pieces": [list(pair) for pair in step.pieces]} if step.pieces else {}),
        **(
            {"gradient_orders": [list(pair) for pair in step.gradient_orders]} if step.gradient_orders else {}
        ),
        "nodes": _table(step.nodes, Node),
        "storages": _table(step.storages, Storage),
    }


def step_from_dict(data: dict[str, Any]) -> Step:
    with _reading(data, STEP_FORMAT):
        step = _step(data)
        check_types(step)
        check_step(step)
        return step


def _step(data: dict[str, Any]) -> Step:
    return Step(
        nodes=tuple(_node(row) for row in _rows(data["nodes"])),
        storages=tuple(Storage(**{**row, "kind": Kind(row["kind"])}) for row in _rows(data["storages"])),
        fingerprint=data["fingerprint"],
        device=data["device"],
        copy_bytes_per_second=data["copy_bytes_per_second"],
        notes=tuple(data["notes"]),
        graphs=_graphs(data["graphs"]),
        identity=_pairs(data["identity"]),
        methods=_pairs(data["methods"]),
        holds_outputs=bool(data.get("holds_outputs", True)),
        link=Link(**data["link"]) if "link" in data else None,
        pieces=tuple((int(piece), int(inside)) for piece, inside in data.get("pieces", ())),
        gradient_orders=_pairs(data.get("gradient_orders", ())),
    )


def solution_to_dict(solution: Solution) -> dict[str, Any]:
    result: dict[str, Any] = {"format": SOLUTION_FORMAT}
    for spec in fields(Solution):
        value = getattr(solution, spec.name)
        if spec.name == "offload" and value is None:
            continue
        if spec.name == "decisions":
            value = _table(value, Decision)
        elif spec.name == "schedule":
            value = _runs(value.runs)
        elif spec.name == "graphs":
            value = _table(value, Graph)
        elif spec.name in ("reserve", "offload"):
            value = asdict(value)
        result[spec.name] = value
    return result


def solution_from_dict(data: dict[str, Any]) -> Solution:
    with _reading(data, SOLUTION_FORMAT):
        solution = _solution(data)
        check_types(solution)
        return solution


def _solution(data: dict[str, Any]) -> Solution:
    values = {spec.name: data[spec.name] for spec in fields(Solution) if spec.name not in LATER}
    values |= {name: data[name] for name in LATER if name in data}
    values["decisions"] = tuple(
        Decision(**{**row, "action": Action(row["action"])}) for row in _rows(data["decisions"])
    )
    values["schedule"] = Schedule(runs=_runs_from(data["schedule"]))
    values["notes"] = tuple(data["notes"])
    values["graphs"] = _graphs(data["graphs"])
    values["identity"] = _pairs(data["identity"])
    values["gradient_orders"] = _pairs(data.get("gradient_orders", ()))
    values["reserve"] = Reserve(**data["reserve"])
    if "offload" in data:
        values["offload"] = Offload(**{**data["offload"], "link": Link(**data["offload"]["link"])})
    return Solution(**values)


def save_json(path: Path, data: dict[str, Any]) -> None:
    """Write `data`, the same bytes for the same data; the old file stays until the new one is whole."""
    write_atomic(path, json.dumps(data, separators=(",", ":"), sort_keys=True) + "\n")


def load_json(path: Path) -> dict[str, Any]:
    try:
        data = json.loads(path.read_text())
    except FileNotFoundError:
        raise LowtideError(f"there is no file '{path}'") from None
    except (OSError, RecursionError, ValueError) as error:  # no JSON, no text, or no name of a file
        raise LowtideError(f"cannot read '{path}': {error}") from error
    if not isinstance(data, dict):
        raise LowtideError(f"'{path}' holds no lowtide data: expected an object, found {type(data).__name__}")
    return data


def load_step(path: str | Path) -> Step:
    return step_from_dict(load_json(Path(path)))


def save_step(path: str | Path, step: Step) -> None:
    save_json(Path(path), step_to_dict(step))


@contextmanager
def _reading(data: dict[str, Any], expected: str) -> Iterator[None]:
    """Tell in one line what is no data of this format, or was once and is damaged."""
    found = data.get("format")
    if found != expected:
        raise LowtideError(f"expected data of the format '{expected}', found {found!r}: make the file again")
    try:
        yield
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        what = f"{type(error).__name__}: {error}".splitlines()[0]
        raise LowtideError(
            f"damaged data of the format '{expected}' ({what}): make the file again"
        ) from error


def _runs(runs: Iterable[Run]) -> list[Any]:
    """First runs as numbers, for they are most of a schedule; others as (node, method)."""
    return [run.node if run.is_first else list(run) for run in runs]


def _runs_from(data: list[Any]) -> tuple[Run, ...]:
    return tuple(
        Run(int(item)) if isinstance(item, int) else Run(int(item[0]), str(item[1])) for item in data
    )


def _table(records: tuple[Any, ...], kind: type) -> dict[str, Any]:
    # what is false everywhere is left out
    columns = [
        spec.name
        for spec in fields(kind)
        if not (spec.default is False or spec.name in OFFLOADING)
        or any(getattr(record, spec.name) for record in records)
    ]
    return {"columns": columns, "rows": [[_plain(getattr(r, c)) for c in columns] for r in records]}


def _plain(value: Any) -> Any:
    if isinstance(value, Recipe):
        return [_plain(getattr(value, spec.name)) for spec in fields(Recipe)]
    if isinstance(value, tuple):
        is_schedule = any(isinstance(item, Run) for item in value)
        return _runs(value) if is_schedule else [_plain(item) for item in value]
    return value


def _rows(table: dict[str, Any]) -> list[dict[str, Any]]:
    return [dict(zip(table["columns"], row, strict=True)) for row in table["rows"]]


def _graphs(table: dict[str, Any]) -> tuple[Graph, ...]:
    return tuple(
        Graph(
            fingerprint=row["fingerprint"],
            in_model=row["in_model"],
            returned=tuple(row["returned"]),
            missing=tuple(row["missing"]),
            schedule=_runs_from(row["schedule"]),
            tangent_bytes=row["tangent_bytes"],
            inputs=tuple(row["inputs"]),
            # plans made before these were known are still read
            structure=row.get("structure", ""),
            later_bytes=row.get("later_bytes", 0),
            num_outputs=row.get("num_outputs", 0),
            num_mutated=row.get("num_mutated", 0),
            releases=tuple((op, after) for op, after in row.get("releases", ())),
            apart=tuple(row.get("apart", ())),
        )
        for row in _rows(table)
    )


def _pairs(pairs: list[list[str]]) -> tuple[tuple[str, str], ...]:
    return tuple((what, value) for what, value in pairs)


def _node(row: dict[str, Any]) -> Node:
    return Node(
        **{
            **row,
            "region": Region(row["region"]),
            "kind": Kind(row["kind"]),
            "reads": tuple(row["reads"]),
            "holds": tuple(row["holds"]),
            "makes": tuple(row["makes"]),
            "eager_reads": tuple(row.get("eager_reads", ())),
            "recipes": tuple(_recipe(values) for values in row["recipes"]),
        }
    )


def _recipe(values: list[Any]) -> Recipe:
    method, action, reads, holds, makes, seconds, workspace = values
    return Recipe(
        method=method,
        action=Action(action),
        reads=tuple(reads),
        holds=tuple(holds),
        makes=tuple(makes),
        seconds=seconds,
        workspace_bytes=workspace,
    )
