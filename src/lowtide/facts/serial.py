"""Facts to JSON and back, compact and versioned.

Are the fields of a record what its class says? For records that come from a file.

Does a step that comes from a file make sense? Else it would be noticed deep inside a planner only.
"""

import json
import types
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, fields, is_dataclass
from enum import Enum
from functools import cache
from itertools import pairwise
from math import isfinite
from pathlib import Path
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

from lowtide.errors import LowtideError
from lowtide.facts import (
    Action,
    Decision,
    Graph,
    GraphRun,
    Kind,
    Node,
    Offload,
    Region,
    Remat,
    Reserve,
    Run,
    Schedule,
    Solution,
    Step,
    Storage,
    TransferSpeed,
)
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
"""Keys of a solution that older files do not have."""

OFFLOADING = ("releases", "released_after", "fetched_before")
"""Columns that are written only where something is offloaded."""

R = TypeVar("R", Run, GraphRun)

IN_FILES = {
    "remats": "recipes",
    "rules": "methods",
    "transfer_speed": "link",
    "optimizer_chunks": "pieces",
    "optimizer_chunk_bytes": "optimizer_piece_bytes",
    "gradient_strides": "gradient_orders",
}
"""Names of fields that files know by an older name."""


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
        "methods": [list(pair) for pair in step.rules],
        "holds_outputs": step.holds_outputs,
        **({} if step.transfer_speed is None else {"link": asdict(step.transfer_speed)}),
        **({"pieces": [list(pair) for pair in step.optimizer_chunks]} if step.optimizer_chunks else {}),
        **(
            {"gradient_orders": [list(pair) for pair in step.gradient_strides]}
            if step.gradient_strides
            else {}
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
        rules=_pairs(data["methods"]),
        holds_outputs=bool(data.get("holds_outputs", True)),
        transfer_speed=TransferSpeed(**data["link"]) if "link" in data else None,
        optimizer_chunks=tuple((int(piece), int(inside)) for piece, inside in data.get("pieces", ())),
        gradient_strides=_pairs(data.get("gradient_orders", ())),
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
            value = in_files(value)
        result[IN_FILES.get(spec.name, spec.name)] = value
    return result


def in_files(record: Any) -> dict[str, Any]:
    """A record of numbers as an object, by the names that files know."""
    return asdict(
        record, dict_factory=lambda pairs: {IN_FILES.get(name, name): value for name, value in pairs}
    )


def solution_from_dict(data: dict[str, Any]) -> Solution:
    with _reading(data, SOLUTION_FORMAT):
        solution = _solution(data)
        check_types(solution)
        return solution


def _solution(data: dict[str, Any]) -> Solution:
    keys = {spec.name: IN_FILES.get(spec.name, spec.name) for spec in fields(Solution)}
    values = {name: data[key] for name, key in keys.items() if key in data or key not in LATER}
    values["decisions"] = tuple(
        Decision(**{**row, "action": Action(row["action"])}) for row in _rows(data["decisions"])
    )
    values["schedule"] = Schedule(runs=_runs_from(data["schedule"], Run))
    values["notes"] = tuple(data["notes"])
    values["graphs"] = _graphs(data["graphs"])
    values["identity"] = _pairs(data["identity"])
    values["gradient_strides"] = _pairs(data.get("gradient_orders", ()))
    values["reserve"] = Reserve(**data["reserve"])
    if "offload" in data:
        values["offload"] = Offload(
            transfer_speed=TransferSpeed(**data["offload"]["link"]),
            **{name: value for name, value in data["offload"].items() if name != "link"},
        )
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


def _runs(runs: Iterable[Run | GraphRun]) -> list[Any]:
    """First runs as numbers, for they are most of a schedule; others as (rank or position, rule)."""
    return [run[0] if run.is_first else list(run) for run in runs]


def _runs_from(data: list[Any], kind: type[R]) -> tuple[R, ...]:
    return tuple(
        kind(int(item)) if isinstance(item, int) else kind(int(item[0]), str(item[1])) for item in data
    )


def _table(records: tuple[Any, ...], kind: type) -> dict[str, Any]:
    # what is false everywhere is left out
    columns = [
        spec.name
        for spec in fields(kind)
        if not (spec.default is False or spec.name in OFFLOADING)
        or any(getattr(record, spec.name) for record in records)
    ]
    return {
        "columns": [IN_FILES.get(name, name) for name in columns],
        "rows": [[_plain(getattr(record, name)) for name in columns] for record in records],
    }


def _plain(value: Any) -> Any:
    if isinstance(value, Remat):
        return [_plain(getattr(value, spec.name)) for spec in fields(Remat)]
    if isinstance(value, tuple):
        is_schedule = any(isinstance(item, Run | GraphRun) for item in value)
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
            schedule=_runs_from(row["schedule"], GraphRun),
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
            **{name: value for name, value in row.items() if name != "recipes"},
            "region": Region(row["region"]),
            "kind": Kind(row["kind"]),
            "reads": tuple(row["reads"]),
            "holds": tuple(row["holds"]),
            "makes": tuple(row["makes"]),
            "eager_reads": tuple(row.get("eager_reads", ())),
            "remats": tuple(_remat(values) for values in row["recipes"]),
        }
    )


def _remat(values: list[Any]) -> Remat:
    rule, action, reads, holds, makes, seconds, workspace = values
    return Remat(
        rule=rule,
        action=Action(action),
        reads=tuple(reads),
        holds=tuple(holds),
        makes=tuple(makes),
        seconds=seconds,
        workspace_bytes=workspace,
    )


MOST = 2**50
"""More bytes than any machine has, and few enough to be added up."""

Check = Callable[[Any], bool]


def check_types(record: Any) -> None:
    """ValueError for the first field whose value is not of its type, or is a number beyond all measure."""
    kind: type = type(record)
    for name, fits in _checks(kind):
        if not fits(getattr(record, name)):
            raise ValueError(f"{kind.__name__}.{name} is {getattr(record, name)!r:.80}")


@cache
def _checks(kind: type) -> tuple[tuple[str, Check], ...]:
    hints = get_type_hints(kind)
    names = [spec.name for spec in fields(kind)] if is_dataclass(kind) else list(hints)
    return tuple((name, _check_of(hints[name])) for name in names)


def _check_of(hint: Any) -> Check:
    if hint is int:
        return lambda value: type(value) is int and abs(value) <= MOST
    if hint is float:
        return lambda value: type(value) in (int, float) and isfinite(value) and 0 <= value <= MOST
    if hint in (str, bool) or (isinstance(hint, type) and issubclass(hint, Enum)):
        return lambda value: isinstance(value, hint)
    if get_origin(hint) in (Union, types.UnionType):
        options = [_check_of(option) for option in get_args(hint) if option is not types.NoneType]
        return lambda value: value is None or any(fits(value) for fits in options)
    if get_origin(hint) is tuple:
        return _tuple_check(get_args(hint))
    return _record_check(hint)


def _tuple_check(hints: tuple[Any, ...]) -> Check:
    if hints[-1] is Ellipsis:
        fits = _check_of(hints[0])
        return lambda value: isinstance(value, tuple) and all(map(fits, value))
    each = [_check_of(hint) for hint in hints]
    return lambda value: (
        isinstance(value, tuple) and all(fits(item) for fits, item in zip(each, value, strict=True))
    )


def _record_check(kind: type) -> Check:
    """A record inside of another one; it names its own field."""

    def fits(value: Any) -> bool:
        if not isinstance(value, kind):
            return False
        check_types(value)
        return True

    return fits


def check_step(step: Step) -> None:
    """ValueError where nodes, storages and graphs of a step contradict each other."""
    if any(storage.id != position for position, storage in enumerate(step.storages)):
        raise ValueError("storages are out of order")
    if any(storage.nbytes < 0 for storage in step.storages):
        raise ValueError("a storage has less than no bytes")
    for position, node in enumerate(step.nodes):
        _check_node(step, position, node)
    order = list(Region)
    if any(order.index(one.region) > order.index(other.region) for one, other in pairwise(step.nodes)):
        raise ValueError("the regions are out of order")
    _check_makers(step)
    num_segments = max((node.segment for node in step.nodes), default=-1) + 1
    if step.graphs and num_segments != len(step.graphs):
        raise ValueError(f"there are {len(step.graphs)} graphs, and nodes of {num_segments}")


def _check_node(step: Step, position: int, node: Node) -> None:
    if node.rank != position or not all(0 <= read < position for read in node.reads):
        raise ValueError(f"node {position} is out of order")
    again = [read for remat in node.remats for read in remat.reads]
    if not all(0 <= read < len(step.nodes) for read in (*again, *node.eager_reads)):
        raise ValueError(f"node {position} is made again from what is not there")
    if not node.on_demand and any(step.nodes[read].on_demand for read in node.reads):
        raise ValueError(f"node {position} reads what need not run")
    _check_holds(step, position, node)
    for remat in node.remats:
        _check_holds(step, position, remat)


def _check_holds(step: Step, position: int, source: Node | Remat) -> None:
    """A value refers to what it makes, and to what it shares with a value that it reads."""
    if not all(0 <= storage < len(step.storages) for storage in (*source.holds, *source.makes)):
        raise ValueError(f"node {position} holds a storage that is not there")
    found = {*source.makes, *(s for read in source.reads for s in step.nodes[read].holds)}
    if any(s not in found and not step.storages[s].static for s in source.holds):
        raise ValueError(f"node {position} holds a storage that it neither makes nor reads")


def _check_makers(step: Step) -> None:
    """A block is made once; but for parameters that processes gather (segment -1), which come and go."""
    if any(node.segment < 0 for node in step.nodes):
        return
    made = [s for node in step.nodes for s in _blocks(step, node.makes)]
    if len(made) != len(set(made)):
        raise ValueError("a storage is made twice")


def _blocks(step: Step, storages: Iterable[int]) -> list[int]:
    return [s for s in storages if not step.storages[s].static]
