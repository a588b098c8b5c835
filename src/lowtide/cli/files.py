"""The files between commands: `profile.json` and `plan.json`, each with the target it was made for."""

from dataclasses import asdict
from pathlib import Path
from typing import Any

from lowtide.errors import LowtideError
from lowtide.facts import Solution, Step
from lowtide.serial import (
    load_json,
    save_json,
    solution_from_dict,
    solution_to_dict,
    step_from_dict,
    step_to_dict,
)
from lowtide.targets import TargetSpec

PROFILE = "profile.json"
PLAN = "plan.json"
TARGET = "target"


def is_file(source: str) -> bool:
    """Whether a command's SOURCE is a file of ours rather than a TARGET."""
    return source.endswith(".json")


def save_profile(path: Path, step: Step, spec: TargetSpec | None) -> None:
    save_json(path, step_to_dict(step) | _target(spec))


def load_profile(path: Path) -> tuple[Step, TargetSpec | None]:
    data = load_json(path)
    return step_from_dict(data), _spec(path, data)


def save_plan(path: Path, solution: Solution, spec: TargetSpec | None) -> None:
    save_json(path, solution_to_dict(solution) | _target(spec))


def load_plan(path: Path) -> tuple[Solution, TargetSpec | None]:
    data = load_json(path)
    return solution_from_dict(data), _spec(path, data)


def _target(spec: TargetSpec | None) -> dict[str, Any]:
    return {} if spec is None else {TARGET: asdict(spec)}


def _spec(path: Path, data: dict[str, Any]) -> TargetSpec | None:
    if TARGET not in data:
        return None
    try:
        return TargetSpec(**data[TARGET])
    except TypeError as error:
        raise LowtideError(f"'{path}' names a target that cannot be read: make the file again") from error
