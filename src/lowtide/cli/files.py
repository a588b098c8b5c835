"""The files between commands: `profile.json` and `plan.json`, each with the target it was made for."""

from dataclasses import asdict
from pathlib import Path
from typing import Any

from lowtide.errors import LowtideError
from lowtide.facts.serial import (
    load_json,
    save_json,
    solution_from_dict,
    solution_to_dict,
    step_from_dict,
    step_to_dict,
)
from lowtide.plans import Plan
from lowtide.profiles import Profile
from lowtide.zoo.targets import TargetSpec

PROFILE = "profile.json"
PLAN = "plan.json"
NODES = "node_stats.csv"
ACTIVATIONS = "activation_stats.csv"
DECISIONS = "ac_decisions.csv"
VERIFICATION = "verification.json"
TARGET = "target"


def save_profile(path: Path, profile: Profile, spec: TargetSpec | None) -> None:
    save_json(path, step_to_dict(profile.step) | _target(spec))


def load_profile(path: Path) -> tuple[Profile, TargetSpec | None]:
    data = load_json(path)
    return Profile(step_from_dict(data)), _spec(path, data)


def save_plan(path: Path, plan: Plan, spec: TargetSpec | None) -> None:
    save_json(path, solution_to_dict(plan.solution) | _target(spec))


def load_plan(path: Path) -> tuple[Plan, TargetSpec | None]:
    data = load_json(path)
    return Plan(solution_from_dict(data)), _spec(path, data)


def _target(spec: TargetSpec | None) -> dict[str, Any]:
    return {} if spec is None else {TARGET: asdict(spec)}


def _spec(path: Path, data: dict[str, Any]) -> TargetSpec | None:
    if TARGET not in data:
        return None
    try:
        return TargetSpec(**data[TARGET])
    except TypeError as error:
        raise LowtideError(f"'{path}' names a target that cannot be read: make the file again") from error
