"""The packed live ranges: at every time point they add up to the timeline, kind by kind."""

from dataclasses import replace
from typing import Any

from hypothesis import given, settings
from report_cases import make_case, unpack
from strategies import steps

from lowtide.facts import Step
from lowtide.planning.schedules import eager_timeline
from lowtide.planning.simulate import Timeline, simulate
from lowtide.profiles import Profile
from lowtide.report.live_tensors import pack_blocks, pack_storages
from lowtide.report.style import STACK


def live_bytes(stored: dict[str, Any], run: dict[str, Any], at: int) -> list[int]:
    """Bytes by kind at a position, as `templates/live.js` adds them up."""
    kinds, sizes = unpack(stored["kind"]), unpack(run["bytes"])
    found = [0] * len(STACK)
    for storage in unpack(stored["static"]):
        found[kinds[storage]] += sizes[storage]
    blocks = zip(*(unpack(run[key]) for key in ("storage", "start", "end")), strict=True)
    for storage, start, end in blocks:
        if start <= at <= end:
            found[kinds[storage]] += sizes[storage]
    found[-1] += unpack(run["inside"])[at]
    return found


@settings(max_examples=15, deadline=None)
@given(steps())
def test_live_ranges_add_up_to_the_timeline(step: Step) -> None:
    larger = (replace(s, extra_eager_bytes=0 if s.static else 7) for s in step.storages)
    step = replace(step, storages=tuple(larger))  # eager's own versions are larger
    profile = Profile(step)
    planned = simulate(step, profile.plan(f"{max(profile.floor_bytes, 1)}B").solution.schedule.runs)
    stored = pack_storages(step)
    for timeline, is_baseline in ((eager_timeline(step), True), (planned, False)):
        run = pack_blocks(step, timeline, is_baseline=is_baseline)
        for at in range(len(timeline.runs)):
            assert live_bytes(stored, run, at) == by_kind(timeline, at)


def by_kind(timeline: Timeline, at: int) -> list[int]:
    return [int(timeline.bytes_by_kind[kind][at]) for kind in STACK]


def test_names_and_call_stacks_are_stored_once() -> None:
    case = make_case(4)
    stacks = ((), ("models/main.py:5", "models/residual.py:9"), ("models/main.py:5",))
    nodes = tuple(replace(node, stack=node.rank % 3) for node in case.step.nodes)
    stored = pack_storages(replace(case.step, nodes=nodes, stacks=stacks))
    names = [case.step.nodes[n].name if n >= 0 else stored["names"][-1 - n] for n in unpack(stored["name"])]
    assert names == [storage.name for storage in case.step.storages]
    assert stored["lines"]["table"] == ["models/main.py:5", "models/residual.py:9"]
    assert unpack(stored["depths"]) == [0, 2, 1]
    assert unpack(stored["stack"]) == [node.rank % 3 for node in case.step.nodes]
