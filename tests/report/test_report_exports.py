"""CSV files keep their columns, and the trace has every run and every byte."""

import csv
import json
from itertools import pairwise

import pytest
from report_cases import compare_rows, make_case, sweep_rows

from lowtide.facts.files import write_atomic
from lowtide.report import exports
from lowtide.report.exports import chrome_trace, write_trace

# The columns that scripts rely on, in their order; ours may only follow them.
FIXED = {
    "node": "rank,node_name,node_type,gtype,median_run_time_s,median_peak_mem_bytes,"
    "median_active_mem_bytes,device",
    "activation": "activation_name,creation_rank,last_fw_use_rank,first_bw_use_rank,last_bw_use_rank,"
    "median_mem_size_bytes,inactive_time_s,swap_time_s,recomp_time_s,recomp_memory_bytes,recompute_ratio",
    "decision": "activation_name,decision,median_mem_size_bytes,recomp_time_s,creation_rank,"
    "first_bw_use_rank",
}


@pytest.fixture(scope="module")
def case():
    return make_case(6)


def read(path):
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def test_node_stats(case, tmp_path):
    path = exports.write_node_stats(tmp_path / "node_stats.csv", case.step, case.before)
    assert path.read_text().startswith(FIXED["node"] + ",")
    rows = read(path)
    assert len(rows) == len(case.step.nodes)
    assert max(int(row["median_peak_mem_bytes"]) for row in rows) == case.before.peak_bytes
    assert {row["gtype"] for row in rows} == {"forward", "backward", "optimizer"}
    conv = next(row for row in rows if row["node_name"] == "convolution_0")
    # batch 3 MiB + weight 12,000 + output 8 MiB + workspace 4 MiB
    assert int(conv["median_active_mem_bytes"]) == (3 + 8 + 4) * 2**20 + 12000
    assert conv["module"] == "encoder.stages.0.layers.0.conv"
    assert float(conv["median_run_time_s"]) == 7e-3


def test_activation_stats(case, tmp_path):
    path = exports.write_activation_stats(tmp_path / "activation_stats.csv", case.activations)
    assert path.read_text().startswith(FIXED["activation"] + ",")
    first = read(path)[0]
    assert first["activation_name"] == case.activations[0].name
    assert float(first["inactive_time_s"]) == pytest.approx(case.activations[0].inactive_seconds)


def test_decisions(case, tmp_path):
    path = exports.write_decisions(tmp_path / "ac_decisions.csv", case.solution.decisions)
    assert path.read_text().startswith(FIXED["decision"] + ",")
    assert [row["decision"] for row in read(path)] == [d.action.value for d in case.solution.decisions]


def test_sweep_leaves_unknown_cells_empty(tmp_path):
    rows = read(exports.write_sweep(tmp_path / "sweep.csv", sweep_rows()))
    assert [row["status"] for row in rows] == [
        "measured",
        "measured",
        "measured",
        "predicted only",
        "failed: cannot fit in 2.3 GiB, the lowest reachable peak is 3.1 GiB",
    ]
    assert rows[3]["planned_measured_peak_bytes"] == rows[3]["exact"] == rows[4]["reduction"] == ""
    assert rows[0]["exact"] == "true"
    assert float(rows[0]["overhead"]) == pytest.approx(0.075)


def test_compare_and_tradeoff(case, tmp_path):
    rows = read(exports.write_compare(tmp_path / "compare.csv", compare_rows()))
    assert [row["verdict"] for row in rows][2:4] == [
        "wrong: 72 of 73 gradients",
        "crashed: RuntimeError: no <decomposition>",
    ]
    points = read(exports.write_tradeoff(tmp_path / "t.csv", case.tradeoff, step_seconds=case.step.seconds))
    assert float(points[-1]["overhead"]) == pytest.approx(0.3)
    assert int(points[-1]["num_recomputed"]) == len(case.tradeoff[-1].recomputed)


def test_names_with_commas_and_lines_stay_one_cell(tmp_path):
    case = make_case(2, module='a,"b"\nc{layer}')
    rows = read(exports.write_node_stats(tmp_path / "n.csv", case.step, case.before))
    assert len(rows) == len(case.step.nodes)
    assert any(row["module"] == 'a,"b"\nc1.conv' for row in rows)


def test_an_interrupted_write_leaves_the_old_file(tmp_path, monkeypatch):
    path = write_atomic(tmp_path / "deep" / "file.txt", "old")

    def interrupted(self, target):
        raise KeyboardInterrupt

    monkeypatch.setattr("pathlib.Path.replace", interrupted)
    with pytest.raises(KeyboardInterrupt):
        write_atomic(path, "new")
    assert path.read_text() == "old"
    assert [p.name for p in path.parent.iterdir()] == ["file.txt"]


def test_what_is_estimated_for_a_gpu_says_so_in_every_row(tmp_path):
    case, device = make_case(3), "a100-40g (estimated)"
    written = (
        exports.write_activation_stats(tmp_path / "a.csv", case.activations, device=device),
        exports.write_decisions(tmp_path / "d.csv", case.solution.decisions, device=device),
        exports.write_tradeoff(tmp_path / "t.csv", case.tradeoff, step_seconds=1.0, device=device),
    )
    for path in written:
        rows = read(path)
        assert rows and all(row["device"] == device for row in rows)
    assert "device" not in read(exports.write_decisions(tmp_path / "d.csv", case.solution.decisions))[0]


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
        assert values["memory: total"] == timeline.live_bytes[-1]


def test_the_file_is_plain_json(case, tmp_path):
    path = write_trace(tmp_path / "trace.json", case.step, {"without": case.before})
    trace = json.loads(path.read_text())
    assert {e["ph"] for e in trace["traceEvents"]} == {"M", "X", "C"}
    assert all(isinstance(e["ts"], float | int) for e in trace["traceEvents"] if e["ph"] != "M")
