"""Recompute time of every planner at shares of the plain step's peak, for recorded steps.

usage: plan_table.py [--csv FILE] STEP.json...

A step is what `lowtide.facts.serial.save_step` writes. Prints one Markdown table per step: recompute time
as % of the step, a dash where the planner does not reach the budget.
"""

import argparse
import csv
import time
from pathlib import Path

from lowtide.errors import BudgetTooSmall
from lowtide.facts.serial import load_step
from lowtide.planning.planner import Planner
from lowtide.units import format_size

SHARES = (80, 60, 50, 40)
PLANNERS = ("mu-two", "auto", "every-block", "sqrt")


def rows(path: Path) -> list[dict[str, object]]:
    planner = Planner(load_step(path))
    start = time.perf_counter()
    floor = planner.floor()
    planning_seconds = time.perf_counter() - start
    static = planner.table.static_bytes
    found: list[dict[str, object]] = []
    for whole, base in (("peak", 0), ("peak above what is always there", static)):
        for share in SHARES:
            budget = base + (planner.baseline.peak_bytes - base) * share // 100
            row: dict[str, object] = {
                "step": path.stem,
                "nodes": len(planner.step.nodes),
                "plain_peak_bytes": planner.baseline.peak_bytes,
                "always_bytes": static,
                "floor_bytes": floor.floor_bytes,
                "planning_seconds": round(planning_seconds, 2),
                "share_of": whole,
                "share_percent": share,
                "budget_bytes": budget,
            }
            for name in PLANNERS:
                try:
                    solution = planner.solve(budget_bytes=budget, planner=name)
                    row[name] = f"{100 * solution.overhead:.2f}"
                except BudgetTooSmall:
                    row[name] = "–"
            found.append(row)
    return found


def show(found: list[dict[str, object]]) -> None:
    first = found[0]
    sizes = {key: format_size(int(str(first[key]))) for key in first if key.endswith("_bytes")}
    print(
        f"\n### {first['step']}: {first['nodes']} nodes, plain peak {sizes['plain_peak_bytes']}, of which "
        f"{sizes['always_bytes']} always; floor {sizes['floor_bytes']}; "
        f"planned in {first['planning_seconds']} s\n"
    )
    print("| budget | " + " | ".join(PLANNERS) + " |")
    print("|---|" + "---|" * len(PLANNERS))
    for row in found:
        size = format_size(int(str(row["budget_bytes"])))
        cells = " | ".join(str(row[planner]) for planner in PLANNERS)
        print(f"| {row['share_percent']} % of {row['share_of']}: {size} | {cells} |")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--csv", type=Path)
    parser.add_argument("steps", type=Path, nargs="+")
    options = parser.parse_args()
    everything = []
    for path in options.steps:
        found = rows(path)
        show(found)
        everything += found
    if options.csv:
        with options.csv.open("w", newline="") as file:
            writer = csv.DictWriter(file, fieldnames=list(everything[0]))
            writer.writeheader()
            writer.writerows(everything)


if __name__ == "__main__":
    main()
