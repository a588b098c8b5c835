"""`lowtide solve`: an abstract graph from its file to a schedule, without torch."""

import json
import subprocess
import sys

import pytest

from lowtide.cli.exit_codes import Exit

# A chain 0..5 whose ends are joined: node 0 is large and waits for the last node to read it.
CHAIN = {
    "name": "chain",
    "nodes": [{"id": i, "bytes": (100, 40, 40, 40, 40, 10)[i], "cost": 1 if i == 0 else 5} for i in range(6)],
    "edges": [[0, 1], [1, 2], [2, 3], [3, 4], [4, 5], [0, 5]],
}


@pytest.fixture
def graph(tmp_path):
    path = tmp_path / "chain.json"
    path.write_text(json.dumps(CHAIN))
    return path


def peak_of(order):
    """Peak and cost of an order, by the rules that the command's help states."""
    nodes = {node["id"]: node for node in CHAIN["nodes"]}
    latest, last_read = {}, list(range(len(order)))
    for step, node in enumerate(order):
        for parent in (a for a, b in CHAIN["edges"] if b == node):
            last_read[latest[parent]] = step
        latest[node] = step
    assert set(latest) == set(nodes)
    held = [
        sum(nodes[order[made]]["bytes"] for made in range(now + 1) if last_read[made] >= now)
        for now in range(len(order))
    ]
    return max(held), sum(nodes[node]["cost"] for node in order)


def test_solve_writes_a_schedule_that_is_as_good_as_it_says(run_lowtide, graph, tmp_path):
    plain, total = peak_of(range(6))
    out = tmp_path / "schedule.json"
    code, stdout, stderr = run_lowtide("solve", str(graph), "--budget", "160", "-o", str(out), "--json")
    data = json.loads(stdout)
    order = json.loads(out.read_text())["order"]
    assert code == 0 and str(out) in stderr and order == data["order"]
    assert peak_of(order) == (data["peak_bytes"], total + data["extra_cost"])
    assert data["peak_bytes"] <= 160 < plain == data["baseline_peak_bytes"]
    assert data["extra_cost"] == 1, "node 0 is the cheapest to run again"


def test_solve_tells_people(run_lowtide, graph):
    code, stdout, stderr = run_lowtide("solve", str(graph), "--budget", "100%")
    assert code == 0 and stderr == ""
    assert "chain, 6 nodes" in stdout and "+0.000 %" in stdout


def test_solve_does_not_fit(run_lowtide, graph, tmp_path):
    out = tmp_path / "schedule.json"
    code, stdout, stderr = run_lowtide("solve", str(graph), "--budget", "10%", "-o", str(out))
    assert code == Exit.DOES_NOT_FIT and stdout == "" and stderr.count("\n") == 1 and not out.exists()


def test_solve_keeps_a_file_unless_forced(run_lowtide, graph, tmp_path):
    out = tmp_path / "schedule.json"
    out.write_text("precious")
    arguments = ("solve", str(graph), "--budget", "100%", "-o", str(out))
    code, _, stderr = run_lowtide(*arguments)
    assert code == Exit.ERROR and "--force" in stderr and out.read_text() == "precious"
    assert run_lowtide(*arguments, "--force")[0] == 0


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "cannot read"),
        ("[]", "expected an object"),
        ('{"nodes": []}', "'edges' is missing"),
        ('{"nodes": [{"id": 0, "bytes": "x", "cost": 1}], "edges": []}', "not a graph"),
        ('{"nodes": [3], "edges": []}', "not a graph"),
        ('{"nodes": [], "edges": []}', "has no nodes"),
    ],
)
def test_what_is_no_graph_is_told_in_one_line(run_lowtide, tmp_path, text, words):
    path = tmp_path / "bad.json"
    path.write_text(text)
    code, stdout, stderr = run_lowtide("solve", str(path), "--budget", "1KiB")
    assert code == Exit.ERROR and stdout == "" and words in stderr and stderr.count("\n") == 1


def test_solve_does_not_import_torch(graph):
    code = (
        f"import sys; sys.argv = ['lowtide', 'solve', {str(graph)!r}, '--budget', '100%']\n"
        "from lowtide.cli import main\n"
        "try: main()\n"
        "finally: assert 'torch' not in sys.modules"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, check=False).returncode == 0
