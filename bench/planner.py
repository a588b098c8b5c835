"""How good and how fast `auto` is: recorded steps, published graphs, small instances, planning times.

    python bench/planner.py steps PROFILE.json...     # recompute, bound and gap at shares of the peak
    python bench/planner.py curve PROFILE.json...     # time of one budget and of a curve of 50
    python bench/planner.py graphs GRAPH.json...      # cost increase of abstract graphs
    python bench/planner.py layered NODES...          # the same for random layered graphs of any size
    python bench/planner.py small COUNT               # against every schedule of small random steps
    python bench/planner.py layers LAYERS...          # planning time of transformers of many layers

Steps are what `lowtide profile TARGET -b N -o DIR` writes. Times are of one core's own time, so that they
mean something on a busy machine. Prints Markdown tables.
"""

import argparse
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from random import Random

from lowtide.errors import BudgetTooSmall
from lowtide.facts.serial import load_step
from lowtide.planning.abstract import AbstractGraph, load_graph, solve_graph
from lowtide.planning.planner import Planner

sys.path.append(str(Path(__file__).parent.parent / "tests" / "helpers"))

SHARES = (80, 60, 50, 40, 30)
GRAPH_SHARES = (90, 80, 70, 60, 50)


def show(columns: tuple[str, ...], rows: Iterator[tuple[object, ...]]) -> None:
    print("| " + " | ".join(columns) + " |")
    print("|---" * len(columns) + "|")
    for row in rows:
        print("| " + " | ".join(map(str, row)) + " |", flush=True)


def steps(paths: list[str]) -> None:
    """Of the peak above what is always there; recompute and bound in % of the step."""

    def rows() -> Iterator[tuple[object, ...]]:
        for path in paths:
            start = time.process_time()
            planner = Planner(load_step(path))
            static, peak = planner.table.static_bytes, planner.baseline.peak_bytes
            cells = [_cell(planner, static + (peak - static) * share // 100) for share in SHARES]
            floor = 100 * (planner.floor().floor_bytes - static) / (peak - static)
            least = 100 * (planner.bounds.floor_bytes - static) / (peak - static)
            said = "proven" if planner.floor().floor_bytes == planner.bounds.floor_bytes else f"≥ {least:.1f}"
            took = time.process_time() - start
            yield Path(path).parent.name, *cells, f"{floor:.1f} % ({said})", f"{took:.1f} s"

    show(("step", *(f"{share} %" for share in SHARES), "floor", "planned in"), rows())


def curve(paths: list[str]) -> None:
    """One core's seconds for one budget (60 % of the peak above what is always there), and for 50."""

    def rows() -> Iterator[tuple[object, ...]]:
        for path in paths:
            step = load_step(path)
            start = time.process_time()
            planner = Planner(step)
            static, peak = planner.table.static_bytes, planner.baseline.peak_bytes
            _cell(planner, static + (peak - static) * 60 // 100)
            one = time.process_time() - start
            planner.tradeoff(points=50)
            yield (
                Path(path).parent.name,
                len(step.nodes),
                f"{one:.1f}",
                f"{time.process_time() - start:.1f}",
            )

    show(("step", "nodes", "one budget", "50 budgets"), rows())


def _cell(planner: Planner, budget_bytes: int) -> str:
    try:
        found = planner.solve(budget_bytes=budget_bytes)
    except BudgetTooSmall:
        return "–"
    bound = 100 * (found.lower_bound_seconds or 0.0) / found.step_seconds
    return f"{100 * found.overhead:.2f} (≥ {bound:.2f})"


def graphs(paths: list[str]) -> None:
    show(
        ("graph", "nodes", *(f"{s} %" for s in GRAPH_SHARES), "seconds"),
        map(_graph_row, map(load_graph, paths)),
    )


def _graph_row(graph: AbstractGraph) -> tuple[object, ...]:
    cells, seconds = [], []
    for share in GRAPH_SHARES:
        start = time.process_time()
        try:
            solution = solve_graph(graph, budget_bytes=graph.peak_bytes * share // 100)
            cells.append(f"{100 * solution.extra_cost / solution.total_cost:.2f}")
        except BudgetTooSmall as error:
            cells.append(f"– ({100 * error.floor_bytes / graph.peak_bytes:.1f} % reached)")
        seconds.append(f"{time.process_time() - start:.1f}")
    return graph.name, len(graph.nbytes), *cells, " / ".join(seconds)


def layered_graph(size: int, *, seed: int = 0) -> AbstractGraph:
    """A random layered graph: layers of up to eight nodes, each read by some of the next ones."""
    random = Random(seed)
    layers: list[list[int]] = []
    parents: list[tuple[int, ...]] = []
    while len(parents) < size:
        width = min(random.randint(1, 8), size - len(parents))
        before = [node for layer in layers[-3:] for node in layer]
        layer = []
        for _ in range(width):
            layer.append(len(parents))
            parents.append(tuple(sorted(random.sample(before, min(len(before), random.randint(1, 4))))))
        layers.append(layer)
    return AbstractGraph(
        name=f"layered-{size}-{seed}",
        nbytes=tuple(random.randint(1, 100) for _ in parents),
        costs=tuple(random.randint(1, 100) for _ in parents),
        parents=tuple(parents),
    )


def layered(sizes: list[str]) -> None:
    made = (layered_graph(int(size)) for size in sizes)
    show(("graph", "nodes", *(f"{s} %" for s in GRAPH_SHARES), "seconds"), map(_graph_row, made))


def small(counts: list[str]) -> None:
    """Against an exact search: plans that are optimal, budgets wrongly refused, bounds that are tight."""
    columns = (
        "steps",
        "instances",
        "optimal",
        "wrongly refused",
        "bound tight",
        "bound wrong",
        "floor proven",
    )
    kinds = {"all kinds of ops": {}, "values kept as their sign": {"signs": True}}
    show(columns, (_small_row(words, int(counts[0]), kind) for words, kind in kinds.items()))


def _small_row(words: str, count: int, kind: dict[str, bool]) -> tuple[object, ...]:
    from exact import least_peak, least_seconds, random_step

    plans = optimal = refused = wrong_bounds = tight = floors = proven = 0
    for seed in range(count):
        step = random_step(Random(seed), **kind)
        planner = Planner(step)
        low, high = least_peak(step), planner.baseline.peak_bytes
        floors += 1
        proven += planner.bounds.floor_bytes == low
        wrong_bounds += planner.bounds.floor_bytes > low
        for budget in sorted({low, *(low + (high - low) * i // 3 for i in (1, 2)), max(low, high - 1)}):
            best = least_seconds(step, budget)
            bound = planner.bounds.seconds(budget)
            plans += 1
            wrong_bounds += bound > best + 1e-9
            tight += bound >= best - 1e-6
            try:
                optimal += planner.solve(budget_bytes=budget).recompute_seconds <= best + 1e-9
            except BudgetTooSmall:
                refused += 1
    return words, plans, optimal, refused, tight, wrong_bounds, f"{proven} of {floors}"


def layers(counts: list[str]) -> None:
    """Synthetic transformers: one budget at 60 % of the peak above what is always there."""
    from synthetic import transformer

    def rows() -> Iterator[tuple[object, ...]]:
        for count in map(int, counts):
            step = transformer(layers=count)
            start = time.process_time()
            planner = Planner(step)
            static, peak = planner.table.static_bytes, planner.baseline.peak_bytes
            cell = _cell(planner, static + (peak - static) * 60 // 100)
            yield count, len(step.nodes), cell, f"{time.process_time() - start:.1f}"

    show(("layers", "nodes", "recompute %", "seconds"), rows())


def main() -> None:
    what = {
        "steps": steps,
        "curve": curve,
        "graphs": graphs,
        "layered": layered,
        "small": small,
        "layers": layers,
    }
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=what)
    parser.add_argument("arguments", nargs="+")
    options = parser.parse_args()
    what[options.what](options.arguments)


if __name__ == "__main__":
    main()
