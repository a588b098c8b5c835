"""Steps and solutions as JSON and back: compact, versioned, and checked when read.

Nodes, storages, graphs and decisions are tables with one list of columns each, since names repeated 4,000
times are most of the bytes:

    "storages": {"columns": ["id", "nbytes", ...], "rows": [[0, 4096, ...], ...]}

The types of the dataclasses drive both directions. `_reader` makes a value of a type from JSON and refuses
any other value, so that a damaged file ends in one line and not deep inside a planner. A library for typed
decoding would need hooks for tables, runs, remats and ranges, and facts stand on the standard library.
"""

import json
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import MISSING, Field, fields, is_dataclass
from enum import Enum
from functools import cache
from itertools import pairwise
from math import isfinite
from pathlib import Path
from typing import Any, Union, get_args, get_origin, get_type_hints

from lowtide.errors import LowtideError
from lowtide.facts import (
    Decision,
    Graph,
    GraphRun,
    Node,
    Offload,
    Region,
    Remat,
    Run,
    Schedule,
    Solution,
    Step,
    Storage,
)
from lowtide.facts.files import write_atomic

STEP_FORMAT = "lowtide-step/2"
SOLUTION_FORMAT = "lowtide-plan/2"

IN_FILES = {
    "remats": "recipes",
    "rules": "methods",
    "transfer_speed": "link",
    "optimizer_chunks": "pieces",
    "optimizer_chunk_bytes": "optimizer_piece_bytes",
    "gradient_strides": "gradient_orders",
}
"""Fields that have another name in files."""

ALWAYS = {
    *("fingerprint", "device", "copy_bytes_per_second", "notes", "graphs", "identity", "rules", "reserve"),
    *("static_bytes", "eager", "reads", "holds", "makes", "remats", "schedule", "tangent_bytes", "inputs"),
}
"""Fields with a default that every file has nevertheless. Older files lack some of the others."""

WHERE_SET = {
    Step: (
        *("transfer_speed", "optimizer_chunks", "gradient_strides", "stacks", "first_break", "offload_what"),
        *("resting_chunks", "calls", "pipeline"),
    ),
    Node: ("stack", "own_checkpoint"),
    Solution: ("offload", "reserved", "resting", "calls", "pipeline"),
    Offload: ("what", "resting_bytes", "read_bytes", "written_bytes"),
    Graph: ("releases", "handed_over", "fetches"),
    Storage: ("host_bytes", "rests", "update_bytes"),
    Decision: ("released_after", "fetched_before"),
}
"""Fields, besides flags, that are written only where some record has a value for them."""

TABLES = (Node, Storage, Graph, Decision)

LARGEST = 2**50
"""More bytes than any machine has, and few enough to be added up."""

Reader = Callable[[Any], Any]


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


def save_step(path: str | Path, step: Step) -> None:
    save_json(Path(path), step_to_dict(step))


def load_step(path: str | Path) -> Step:
    return step_from_dict(load_json(Path(path)), path=Path(path))


def step_to_dict(step: Step) -> dict[str, Any]:
    return {"format": STEP_FORMAT, **to_dict(step)}


def solution_to_dict(solution: Solution) -> dict[str, Any]:
    return {"format": SOLUTION_FORMAT, **to_dict(solution)}


def step_from_dict(data: dict[str, Any], *, path: Path | None = None) -> Step:
    """The step of `data`, which come from a file at `path`, if any."""
    with _reading(data, STEP_FORMAT, path):
        step: Step = _read_record(Step, data)
        check_step(step)
        return step


def solution_from_dict(data: dict[str, Any], *, path: Path | None = None) -> Solution:
    """The solution of `data`, which come from a file at `path`, if any."""
    with _reading(data, SOLUTION_FORMAT, path):
        solution: Solution = _read_record(Solution, data)
        return solution


FILES = {
    STEP_FORMAT: ("a profile", "profile.json", "lowtide profile TARGET -b N -o DIR"),
    SOLUTION_FORMAT: ("a plan", "plan.json", "lowtide plan PROFILE.json --budget SIZE -o DIR"),
}
"""By format: what it is, its usual file name, and the command that writes one."""


@contextmanager
def _reading(data: dict[str, Any], expected: str, path: Path | None) -> Iterator[None]:
    """LowtideError of one line for data of another format, and for damaged data."""
    found = data.get("format")
    if found != expected and found in FILES:
        name, file, command = FILES[expected]
        subject = "this" if path is None else f"'{path}'"
        raise LowtideError(
            f"{subject} is {FILES[found][0]}, and {name} is wanted, such as the {file} of `{command}`"
        )
    if found != expected:
        raise LowtideError(f"expected data of the format '{expected}', found {found!r}: make the file again")
    try:
        yield
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        what = f"{type(error).__name__}: {error}".splitlines()[0]
        raise LowtideError(
            f"damaged data of the format '{expected}' ({what}): make the file again"
        ) from error


def to_dict(record: Any) -> dict[str, Any]:
    """A record as a JSON object, with the keys that files have."""
    kind = type(record)
    hints = get_type_hints(kind)
    found = {}
    for spec in fields(kind):
        value = getattr(record, spec.name)
        if value != spec.default or spec.name not in WHERE_SET.get(kind, ()):
            (item, *_) = get_args(hints[spec.name]) or (None,)
            found[_key(spec.name)] = _table(value, item) if item in TABLES else _plain(value)
    return found


def _key(name: str) -> str:
    return IN_FILES.get(name, name)


def _table(records: tuple[Any, ...], kind: type) -> dict[str, Any]:
    names = [spec.name for spec in fields(kind) if _is_column(spec, kind, records)]
    return {
        "columns": [_key(name) for name in names],
        "rows": [[_plain(getattr(record, name)) for name in names] for record in records],
    }


def _is_column(spec: Field[Any], kind: type, records: tuple[Any, ...]) -> bool:
    is_rare = spec.default is False or spec.name in WHERE_SET.get(kind, ())
    return not is_rare or any(getattr(record, spec.name) for record in records)


def _plain(value: Any) -> Any:
    if isinstance(value, Run | GraphRun):  # most are first runs
        return value[0] if value.is_first else list(value)
    if isinstance(value, tuple):
        return [_plain(item) for item in value]
    if isinstance(value, Remat):
        return [_plain(getattr(value, spec.name)) for spec in fields(Remat)]
    if isinstance(value, Schedule):
        return _plain(value.runs)
    return to_dict(value) if is_dataclass(value) else value


def check_types(record: Any) -> None:
    """ValueError for the first field whose value is not of its type, or is a number beyond all measure."""
    kind: type = type(record)
    _read_record(kind, {key: getattr(record, name) for name, key, _, _ in _fields(kind)})


def _read_record(kind: type, values: Mapping[str, Any]) -> Any:
    found = {}
    for name, key, read, is_optional in _fields(kind):
        if key in values:
            try:
                found[name] = read(values[key])
            except TypeError as error:
                raise ValueError(f"{kind.__name__}.{name} is {values[key]!r:.80}") from error
        elif not is_optional:
            raise KeyError(key)
    return kind(**found)


@cache
def _fields(kind: type) -> tuple[tuple[str, str, Reader, bool], ...]:
    """(name, key in files, reader, whether a file may lack it) of each field."""
    hints = get_type_hints(kind)
    optional = {spec.name for spec in fields(kind) if spec.default is not MISSING} - ALWAYS
    return tuple(
        (spec.name, _key(spec.name), _reader(hints[spec.name]), spec.name in optional)
        for spec in fields(kind)
    )


@cache
def _reader(hint: Any) -> Reader:
    """A function from JSON to a value of type `hint`; TypeError for a value of another type."""
    arguments = get_args(hint)
    if get_origin(hint) in (Union, types.UnionType):
        read = _reader(arguments[0])
        return lambda value: None if value is None else read(value)
    if get_origin(hint) is tuple:
        return _tuple_reader(*arguments)
    if hint in (Run, GraphRun):
        return lambda value: _read_run(hint, value)
    if hint is Schedule:
        runs = _tuple_reader(Run, ...)
        return lambda value: Schedule(runs=runs(value))
    if hint is Remat:
        names = [_key(spec.name) for spec in fields(Remat)]
        return lambda value: _read_record(Remat, dict(zip(names, value, strict=True)))
    if isinstance(hint, type) and is_dataclass(hint):
        return lambda value: _read_record(hint, _known(hint, value))
    if issubclass(hint, Enum):
        make: Reader = hint
        return make
    return {int: _read_int, float: _read_float}.get(hint, lambda value: _read_instance(hint, value))


def _tuple_reader(first: Any, *others: Any) -> Reader:
    if others != (...,):
        each = [_reader(hint) for hint in (first, *others)]
        return lambda value: tuple(read(item) for read, item in zip(each, _items(value), strict=True))
    if first in TABLES:
        return lambda value: tuple(_read_rows(first, value["columns"], value["rows"]))
    read = _reader(first)
    return lambda value: tuple(map(read, _items(value)))


def _read_rows(kind: type, columns: list[str], rows: list[list[Any]]) -> Iterator[Any]:
    _known(kind, dict.fromkeys(columns))
    for row in rows:
        yield _read_record(kind, dict(zip(columns, row, strict=True)))


def _known(kind: type, values: dict[str, Any]) -> dict[str, Any]:
    """ValueError for keys that no field has."""
    unknown = values.keys() - {key for _, key, _, _ in _fields(kind)}
    if unknown:
        raise ValueError(f"{kind.__name__} has no {min(unknown)!r:.80}")
    return values


def _items(value: Any) -> Iterable[Any]:
    return value if isinstance(value, tuple) else _read_instance(list, value)


def _read_run(kind: type, value: Any) -> Any:
    number, rule = (value, "") if type(value) is int else value
    return kind(_read_int(number), _read_instance(str, rule))


def _read_int(value: Any) -> int:
    if type(value) is not int or abs(value) > LARGEST:
        raise TypeError
    return value


def _read_float(value: Any) -> Any:
    if type(value) not in (int, float) or not isfinite(value) or not 0 <= value <= LARGEST:
        raise TypeError
    return value


def _read_instance(kind: type, value: Any) -> Any:
    if not isinstance(value, kind):
        raise TypeError
    return value


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
    is_sharded = any(node.segment < 0 for node in step.nodes)  # gathered parameters come and go
    made = [s for node in step.nodes for s in node.makes if not step.storages[s].static]
    if not is_sharded and len(made) != len(set(made)):
        raise ValueError("a storage is made twice")
    num_segments = max((node.segment for node in step.nodes), default=-1) + 1
    if step.graphs and num_segments != len(step.graphs):
        raise ValueError(f"there are {len(step.graphs)} graphs, and nodes of {num_segments}")


def _check_node(step: Step, position: int, node: Node) -> None:
    if node.rank != position or not all(0 <= read < position for read in node.reads):
        raise ValueError(f"node {position} is out of order")
    if not 0 <= node.stack < max(1, len(step.stacks)):
        raise ValueError(f"node {position} has a call stack that does not exist")
    again = [read for remat in node.remats for read in remat.reads]
    if not all(0 <= read < len(step.nodes) for read in (*again, *node.eager_reads)):
        raise ValueError(f"node {position} is rematerialized from a node that does not exist")
    if not node.on_demand and any(step.nodes[read].on_demand for read in node.reads):
        raise ValueError(f"node {position} always runs and reads a node that runs on demand")
    sources: tuple[Node | Remat, ...] = (node, *node.remats)
    for source in sources:
        if not all(0 <= storage < len(step.storages) for storage in (*source.holds, *source.makes)):
            raise ValueError(f"node {position} refers to a storage that does not exist")
        found = {*source.makes, *(s for read in source.reads for s in step.nodes[read].holds)}
        if any(s not in found and not step.storages[s].static for s in source.holds):
            raise ValueError(f"node {position} refers to a storage that it neither makes nor reads")
