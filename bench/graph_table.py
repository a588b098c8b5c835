"""Cost increase of the abstract planner on published rematerialization graphs.

Prints a Markdown table: extra cost in % at 90, 80 and 70 % of the baseline peak, and seconds.
The graphs themselves are not part of this repository.
"""

import argparse
import time

from lowtide.errors import BudgetTooSmall
from lowtide.planning.abstract import load_graph, solve_graph

SHARES = (90, 80, 70)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("graphs", nargs="+", metavar="GRAPH.json")
    options = parser.parse_args()
    print("| graph | nodes | " + " | ".join(f"{share} %" for share in SHARES) + " | seconds |")
    print("|---|---|" + "---|" * (len(SHARES) + 1))
    for path in options.graphs:
        graph = load_graph(path)
        cells, seconds = [], []
        for share in SHARES:
            start = time.perf_counter()
            try:
                solution = solve_graph(graph, budget_bytes=graph.peak_bytes * share // 100)
                cells.append(f"{100 * solution.extra_cost / solution.total_cost:.2f}")
            except BudgetTooSmall:
                cells.append("–")
            seconds.append(f"{time.perf_counter() - start:.0f}")
        print(
            f"| {graph.name} | {len(graph.nbytes)} | {' | '.join(cells)} | {' / '.join(seconds)} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
