import builtins
import itertools
from dataclasses import replace

import pytest
from report_cases import compare_rows, make_case, sweep_rows

from lowtide.errors import LowtideError
from lowtide.report import plots
from lowtide.report.pareto_plot import plot_pareto
from lowtide.report.results import CompareRow, PlannerCurve, Results

matplotlib = pytest.importorskip("matplotlib", reason="needs matplotlib (pip install lowtide[plots])")
pyplot = pytest.importorskip("matplotlib.pyplot")

NAMES = {
    "node_run_time",
    "node_peak_memory",
    "memory_by_rank",
    "peak_breakdown",
    "timeline_before_after",
    "activation_sizes",
    "tradeoff",
    "peak_by_batch_size",
    "latency_by_batch_size",
    "methods",
}


@pytest.fixture(scope="module")
def case():
    return make_case(5)


def everything(case):
    return {
        "step": case.step,
        "before": case.before,
        "after": case.after,
        "activations": case.activations,
        "budget_bytes": case.solution.budget_bytes,
        "tradeoff": case.tradeoff,
        "sweep": sweep_rows(),
        "compare": compare_rows(),
        "name": "bert-base, batch 16",
    }


def written_texts(figure):
    figure.canvas.draw()
    return [text.get_text() for text in figure.findobj(matplotlib.text.Text) if text.get_text()]


def test_all_plots_in_both_formats(case, tmp_path):
    settings, backend = dict(matplotlib.rcParams), matplotlib.get_backend()
    paths = plots.write_plots(tmp_path, **everything(case))
    assert {p.stem for p in paths} == NAMES
    assert len(paths) == 2 * len(NAMES)
    for path in paths:
        start = path.read_bytes()[:200]
        assert start.startswith(b"\x89PNG") if path.suffix == ".png" else b"<?xml" in start
    # Nothing of the caller's matplotlib is touched.
    assert (dict(matplotlib.rcParams), matplotlib.get_backend()) == (settings, backend)
    assert pyplot.get_fignums() == []


def test_every_plot_says_of_what_it_is(case, tmp_path):
    for path in plots.write_plots(tmp_path, **everything(case), formats=["svg"]):
        assert "bert-base, batch 16" in path.read_text().replace("<!-- ", ""), path.name


def test_methods_have_their_peak_time_and_what_is_wrong():
    rows = [row for row in compare_rows() if row.peak_bytes is not None]
    texts = written_texts(plots.plot_methods(compare_rows()))
    assert {row.method for row in rows} <= set(texts)
    wrong = [row for row in rows if not row.exact]
    assert sum("(" in text and "×" in text for text in texts) == len(
        [r for r in wrong if r.time_ratio is not None]
    )


def pareto_curves(case):
    proven = [replace(point, lower_bound_seconds=0.8 * point.recompute_seconds) for point in case.tradeoff]
    worse = [
        replace(point, recompute_seconds=2 * point.recompute_seconds, peak_bytes=point.peak_bytes + 1)
        for point in case.tradeoff
    ]
    return [
        PlannerCurve(planner="auto", points=tuple(proven)),
        PlannerCurve(planner="mine", points=tuple(worse)),
    ]


def test_planners_stand_above_the_bound_and_noise_is_not_drawn(case):
    rows = [
        CompareRow(method="mine ≤ 9 B", verdict=Results.EXACT, peak_bytes=500, time_ratio=1.2, noise=0.01),
        CompareRow(method="rival", verdict=Results.WRONG, peak_bytes=600, time_ratio=1.1, noise=0.01),
        CompareRow(method="one run", verdict=Results.EXACT, peak_bytes=700, time_ratio=5.0),
    ]
    figure = plot_pareto(pareto_curves(case), step_seconds=case.step.seconds, measured=rows, budgets=[450])
    texts = written_texts(figure)
    assert {"auto (simulated)", "mine (simulated)", "mine (measured)", "budget 450 B"} <= set(texts)
    assert "no plan is below (proven)" in texts and "rival (wrong)" in texts
    assert not any("one run" in text for text in texts)
    lines = {line.get_label(): line for line in figure.axes[0].get_lines()}
    bound = lines["no plan is below (proven)"].get_ydata()
    assert all(later <= earlier for earlier, later in itertools.pairwise(bound))


def test_the_same_data_give_the_same_bytes(case, tmp_path):
    some = {"step": case.step, "before": case.before, "after": case.after}
    for name in ("one", "two"):
        plots.write_plots(tmp_path / name, **some)
    for path in (tmp_path / "one").iterdir():
        assert path.read_bytes() == (tmp_path / "two" / path.name).read_bytes()


def test_only_what_the_data_allow(case, tmp_path):
    assert {p.stem for p in plots.write_plots(tmp_path, step=case.step, formats=["svg"])} == {"node_run_time"}
    assert plots.write_plots(tmp_path) == []


def test_bars_say_the_reduction_and_the_budget():
    figure = plots.plot_peak_by_batch_size(sweep_rows())
    texts = written_texts(figure)
    assert texts.count("−38.0 %") == 4
    assert "budget 2.34 GiB" in texts
    assert "with the plan (simulated)" in texts
    assert "64\nfailed" in texts
    assert any("(GiB)" in text for text in texts)


def test_bars_stand_at_the_peaks():
    row = sweep_rows()[0]
    figure = plots.plot_peak_by_batch_size([row])
    heights = [patch.get_height() * 2**30 for patch in figure.axes[0].patches]
    assert heights == pytest.approx(list(row.peaks))


def test_budgets_may_differ_by_batch_size():
    rows = [replace(row, budget_bytes=row.batch_size * 10**9) for row in sweep_rows()]
    assert "budget" in written_texts(plots.plot_peak_by_batch_size(rows))


def test_latency_leaves_out_what_was_not_measured():
    texts = written_texts(plots.plot_latency_by_batch_size(sweep_rows()))
    assert texts.count("+7.5 %") == 3
    assert "32" not in texts
    plots.plot_latency_by_batch_size(sweep_rows()[3:])


def test_latency_lines_agree_with_the_time_added_above_them():
    rows = [replace(row, noise=0.2) for row in sweep_rows()[:3]]
    figure = plots.plot_latency_by_batch_size(rows)
    before, after = (bars.lines[0].get_ydata() for bars in figure.axes[0].containers)
    assert [one / other - 1 for one, other in zip(after, before, strict=True)] == [
        pytest.approx(row.overhead) for row in rows
    ]
    assert not figure.axes[0].patches
    assert written_texts(figure).count("+7.5 %\n(noise: ± 20.0 %)") == 3


def test_timeline_marks_both_peaks_and_all_regions(case):
    figure = plots.plot_before_after(case.step, case.before, case.after, budget_bytes=10**8)
    texts = written_texts(figure)
    assert {"forward", "backward", "optimizer"} <= set(texts)
    for timeline in (case.before, case.after):
        assert f"{timeline.peak_bytes / 2**20:.1f} MiB" in texts


def test_missing_matplotlib_says_what_to_install(case, monkeypatch):
    real = builtins.__import__

    def without(name, *args, **kwargs):
        if name.startswith("matplotlib"):
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(LowtideError, match=r"pip install lowtide\[plots\]"):
        plots.plot_node_seconds(case.step)
