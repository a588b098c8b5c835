"""Files between the stages: the same bytes for the same facts, and one line for what cannot be read."""

import copy
import json
from collections.abc import Iterator
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from strategies import steps
from synthetic import chain, resnet

from lowtide.errors import LowtideError
from lowtide.facts import Graph, Offload, Reserve, Run, Solution, Step, TransferSpeed
from lowtide.facts.serial import (
    ALWAYS,
    IN_FILES,
    load_step,
    save_step,
    solution_from_dict,
    solution_to_dict,
    step_from_dict,
    step_to_dict,
)
from lowtide.planning.planner import Planner
from lowtide.plans import Plan, load_plan
from lowtide.profiles import Profile, load_profile


def planned(step: Step) -> Solution:
    planner = Planner(step)
    return planner.solve(budget_bytes=planner.floor().floor_bytes)


@settings(max_examples=50, deadline=None)
@given(steps())
def test_every_step_comes_back_as_it_was(step: Step) -> None:
    assert step_from_dict(json.loads(json.dumps(step_to_dict(step)))) == step


@settings(max_examples=25, deadline=None)
@given(steps(offload=True))
def test_every_step_with_offload_comes_back_as_it_was(step: Step) -> None:
    assert step_from_dict(json.loads(json.dumps(step_to_dict(step)))) == step


@settings(max_examples=25, deadline=None)
@given(steps())
def test_every_plan_comes_back_as_it_was(step: Step) -> None:
    solution = planned(step)
    assert solution_from_dict(json.loads(json.dumps(solution_to_dict(solution)))) == solution


def test_all_fields_travel() -> None:
    graph = Graph(
        fingerprint="abc",
        in_model=True,
        returned=(0, 2),
        missing=(1,),
        schedule=(Run(3), Run(1, "again"), Run(4)),
        tangent_bytes=8,
        inputs=("x float32[2x3]",),
        releases=((1, 2),),
    )
    link = TransferSpeed(
        store="disk:/x", write_bytes_per_second=1e9, read_bytes_per_second=2e9, latency_seconds=1e-3
    )
    identity = (("torch", "2"), ("batch", "x float32[2x3]"))
    step = Step(
        **{name: getattr(chain(length=4), name) for name in ("nodes", "storages")},
        fingerprint="f",
        device="cuda",
        copy_bytes_per_second=1.5e9,
        notes=("one", "two"),
        graphs=(graph,),
        identity=identity,
        rules=(("again", "run again"),),
        transfer_speed=link,
    )
    assert step_from_dict(step_to_dict(step)) == step
    solution = Solution(
        **{
            **{name: getattr(planned(chain(length=4)), name) for name in Solution.__dataclass_fields__},
            "graphs": (graph,),
            "identity": identity,
            "notes": ("a note",),
            "offload": Offload(transfer_speed=link, store_bytes=7, transfer_seconds=0.5, stall_seconds=0.25),
            "reserve": Reserve(optimizer_state_bytes=1, loss_bytes=3, loss_kept_bytes=4, batch_bytes=5),
        }
    )
    assert solution_from_dict(solution_to_dict(solution)) == solution


def test_nothing_is_written_of_offload_where_there_is_none() -> None:
    step = chain(length=4)
    written = json.dumps([step_to_dict(step), solution_to_dict(planned(step))])
    for word in ("link", "movable", "releases", "released_after", "fetched_before", "offload"):
        assert f'"{word}"' not in written


def test_the_same_profile_gives_the_same_bytes(tmp_path: Path) -> None:
    for number in (1, 2):
        profile = Profile(resnet(blocks=(1, 2, 1, 1)))
        profile.save(tmp_path / f"profile-{number}.json")
        again = load_profile(tmp_path / f"profile-{number}.json")
        assert again == profile
        again.plan(again.floor_bytes).save(tmp_path / f"plan-{number}.json")
    for name in ("profile", "plan"):
        one, other = ((tmp_path / f"{name}-{number}.json").read_bytes() for number in (1, 2))
        assert one == other and one.endswith(b"\n")
    plan = load_plan(tmp_path / "plan-1.json")
    plan.save(tmp_path / "plan-3.json")
    assert (tmp_path / "plan-3.json").read_bytes() == (tmp_path / "plan-1.json").read_bytes()
    assert plan == Plan(planned(resnet(blocks=(1, 2, 1, 1))))


def test_large_steps_are_compact(tmp_path: Path) -> None:
    step = resnet()
    save_step(tmp_path / "profile.json", step)
    assert load_step(tmp_path / "profile.json") == step
    assert (tmp_path / "profile.json").stat().st_size < 200 * len(step.nodes)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, "there is no file"),
        (b"", "cannot read"),
        (b'{"format": "lowtide-', "cannot read"),
        (b"\xff\xfe\x00", "cannot read"),
        (b"[1, 2]", "expected an object, found list"),
        (b"{}", "found None: make the file again"),
        (b'{"format": "lowtide-step/0"}', "found 'lowtide-step/0': make the file again"),
    ],
)
@pytest.mark.parametrize("load", [load_profile, load_plan])
def test_what_is_no_file_of_ours(content: bytes | None, words: str, load: Any, tmp_path: Path) -> None:
    path = tmp_path / "file.json"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(LowtideError, match=words) as caught:
        load(path)
    assert "\n" not in str(caught.value)


def test_a_plan_is_not_a_profile(tmp_path: Path) -> None:
    Plan(planned(chain(length=4))).save(tmp_path / "plan.json")
    with pytest.raises(LowtideError, match=r"plan.json' is a plan, and a profile is wanted"):
        load_profile(tmp_path / "plan.json")


def lacking(data: dict[str, Any], kind: type) -> dict[str, Any]:
    """The same as an older version wrote it: without the keys that came later."""
    always = {
        IN_FILES.get(spec.name, spec.name)
        for spec in fields(kind)
        if spec.default is MISSING or spec.name in ALWAYS
    }
    return {key: value for key, value in data.items() if key in {"format", *always}}


def damages(data: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Every key dropped, every value of another type, and so every column of every table."""
    for key, value in data.items():
        if key != "format":
            yield {name: data[name] for name in data if name != key}
            yield {**data, key: {"columns": 5}}
        if isinstance(value, dict) and value.get("rows"):
            for column in range(len(value["columns"])):
                damaged = copy.deepcopy(data)
                damaged[key]["rows"][0][column] = {}
                yield damaged
            yield {**data, key: {**value, "columns": [*value["columns"][:-1], "unknown"]}}


def test_damaged_profiles() -> None:
    data = step_to_dict(chain(length=4))
    old = lacking(data, Step)
    assert step_from_dict(old) == chain(length=4) and "holds_outputs" not in old
    for damaged in damages(old):
        with pytest.raises(LowtideError, match=r"damaged data of the format 'lowtide-step/2'.*make the file"):
            step_from_dict(damaged)
    columns = data["nodes"]["columns"]
    for column, value in (
        ("rank", 7),
        ("reads", [99]),
        ("makes", [99]),
        ("region", "middle"),
        ("recipes", [[]]),
        ("seconds", -1.0),
        ("seconds", float("nan")),
        ("workspace_bytes", 2**51),
        ("workspace_bytes", True),
    ):
        damaged = copy.deepcopy(data)
        damaged["nodes"]["rows"][2][columns.index(column)] = value
        with pytest.raises(LowtideError, match="damaged data") as caught:
            step_from_dict(damaged)
        assert "\n" not in str(caught.value)


def test_a_damaged_field_is_named() -> None:
    data = step_to_dict(chain(length=4))
    data["storages"]["rows"][1][1] = "many"
    with pytest.raises(LowtideError, match=r"ValueError: Storage\.nbytes is 'many'"):
        step_from_dict(data)


def test_damaged_plans() -> None:
    data = solution_to_dict(planned(chain(length=4)))
    for damaged in damages(lacking(data, Solution)):
        with pytest.raises(LowtideError, match=r"damaged data of the format 'lowtide-plan/2'.*make the file"):
            solution_from_dict(damaged)


def test_plans_from_before_bounds_were_known_are_read() -> None:
    data = solution_to_dict(planned(chain(length=4)))
    found = solution_from_dict(lacking(data, Solution))
    assert (found.lower_bound_seconds, found.floor_bound_bytes) == (None, None)
    assert solution_from_dict(data).lower_bound_seconds is not None


def test_an_interrupted_save_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "profile.json"
    save_step(path, chain(length=3))
    before = path.read_bytes()

    def stop(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Path, "replace", stop)
    with pytest.raises(KeyboardInterrupt):
        save_step(path, chain(length=9))
    assert path.read_bytes() == before
    assert [file.name for file in tmp_path.iterdir()] == ["profile.json"]
