import json
from itertools import pairwise

import pytest
from report_cases import make_case

from lowtide.report.chrome_trace import chrome_trace, write_trace


@pytest.fixture(scope="module")
def case():
    return make_case(5)


@pytest.fixture(scope="module")
def events(case):
    return chrome_trace(case.step, {"without": case.before, "with": case.after})["traceEvents"]


def test_every_run_is_a_slice_on_the_thread_of_its_region(case, events):
    threads = {
        (e["pid"], e["tid"]): e["args"]["name"]
        for e in events
        if e["ph"] == "M" and e["name"] == "thread_name"
    }
    for pid, timeline in ((1, case.before), (2, case.after)):
        slices = [e for e in events if e["ph"] == "X" and e["pid"] == pid]
        assert [s["args"]["rank"] for s in slices] == list(timeline.order)
        assert {threads[pid, s["tid"]] for s in slices} == {s["cat"] for s in slices}
    assert sum(e["ph"] == "X" and e["cat"] == "recompute" for e in events) == (
        len(case.after.order) - len(case.step.nodes)
    )


def test_slices_follow_each_other_without_overlap(case, events):
    slices = [e for e in events if e["ph"] == "X" and e["pid"] == 2]
    for one, two in pairwise(slices):
        assert one["ts"] + one["dur"] == pytest.approx(two["ts"], abs=2e-3)
        assert one["dur"] > 0
    longest = case.after.seconds * 1e6 + len(slices) * 2e-3
    assert case.after.seconds * 1e6 - 1 < slices[-1]["ts"] + slices[-1]["dur"] < longest


def test_counters_reach_the_peak_and_add_up(case, events):
    for pid, timeline in ((1, case.before), (2, case.after)):
        counters = [e for e in events if e["ph"] == "C" and e["pid"] == pid]
        totals = [e["args"]["bytes"] for e in counters if e["name"] == "memory: total"]
        assert max(totals) == timeline.peak_bytes
        values = {}
        for event in counters:
            values[event["name"]] = event["args"]["bytes"]
        assert sum(values.values()) == 2 * values["memory: total"]
        assert values["memory: total"] == timeline.bytes_held[-1]


def test_the_file_is_plain_json(case, tmp_path):
    path = write_trace(tmp_path / "trace.json", case.step, {"without": case.before})
    trace = json.loads(path.read_text())
    assert {e["ph"] for e in trace["traceEvents"]} == {"M", "X", "C"}
    assert all(isinstance(e["ts"], float | int) for e in trace["traceEvents"] if e["ph"] != "M")
