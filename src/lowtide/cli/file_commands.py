"""Commands that need a file at most, and no torch.

- `lowtide explain`: what a plan does with one activation, and why
- `lowtide solve`: the planner alone on an abstract graph
- `lowtide models`: the built-in targets
"""

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import RenderableType

from lowtide.cli.command import command
from lowtide.cli.options import Force
from lowtide.cli.terminal import Terminal, table
from lowtide.errors import LowtideError
from lowtide.report.style import size
from lowtide.zoo.targets import CATALOG

if TYPE_CHECKING:
    from lowtide.planning.abstract import AbstractGraph, GraphSolution

KEYS = {"live while idle": "holds", "rematerialized": "brought back"}
"""Keys of `explain --json` that differ from the words of its table."""


@command
def explain(
    terminal: Terminal,
    plan: Annotated[
        Path,
        typer.Argument(metavar="PLAN", help="A plan.json of `lowtide plan` or `run`.", show_default=False),
    ],
    name: Annotated[
        str,
        typer.Argument(
            metavar="ACTIVATION", help="A name from ac_decisions.csv or the report.", show_default=False
        ),
    ],
) -> None:
    """Say what a plan does with an activation, why, and which ops make and read it.

    The ops come from the profile.json beside the plan; without one, the decision alone is shown.
    """
    from lowtide.cli.output_files import PROFILE, load_plan, load_profile
    from lowtide.report.explanation import explain_rows, find_decision

    solution = load_plan(plan)[0].solution
    decision = find_decision(solution, name)
    beside = plan.parent / PROFILE
    step = load_profile(beside)[0].step if beside.exists() else None
    if step is not None and step.fingerprint != solution.fingerprint:
        terminal.note(f"{beside} is of another step: only the decision is shown")
        step = None
    rows = explain_rows(solution, decision, step)
    terminal.data({KEYS.get(label, label): value for label, value in rows})
    terminal.show(table("", ("", ""), rows))


@command
def models(terminal: Terminal) -> None:
    """List the built-in targets and the size that each one takes."""
    entries = CATALOG.values()
    terminal.data([asdict(entry) for entry in entries])
    rows = [
        (entry.name, f"--{entry.option.replace('_', '-')} {getattr(entry, entry.option)}", entry.summary)
        for entry in entries
    ]
    terminal.show(table("Built-in targets", ("name", "size (default)", "what it is"), rows))


@command
def solve(
    terminal: Terminal,
    graph: Annotated[
        Path,
        typer.Argument(
            metavar="GRAPH",
            help='A JSON file: {"nodes": [{"id", "bytes", "cost"}], "edges": [[parent, child]]}, ids in a '
            "topological order.",
            show_default=False,
        ),
    ],
    *,
    budget: Annotated[
        str,
        typer.Option(
            metavar="SIZE",
            help="Largest peak: 8GiB, a number, or 80% of the baseline's, which runs each node once.",
            show_default=False,
        ),
    ],
    output: Annotated[
        Path | None,
        typer.Option(
            "-o", "--output", metavar="FILE", dir_okay=False, help='Schedule to write: {"order": [id, ...]}.'
        ),
    ] = None,
    force: Force = False,
) -> None:
    """Find the cheapest order of runs of an abstract graph that fits into a budget. Needs no torch.

    An order may recompute a node; every run reads the latest earlier run of each parent. Takes
    seconds up to a few hundred nodes, a minute for thousands. Exits with 3 when no order is found that fits.
    """
    from lowtide.facts.serial import save_json
    from lowtide.facts.sizes import parse_budget
    from lowtide.planning.abstract import load_graph, solve_graph

    if output is not None and output.exists() and not force:
        raise LowtideError(f"{output} is already there: say --force to replace it, or choose another -o")
    found = load_graph(graph)
    budget_bytes = parse_budget(budget, whole=found.peak_bytes)
    with terminal.working(f"solving {found.name}"):
        solution = solve_graph(found, budget_bytes=budget_bytes)
    terminal.data(_data(found, solution))
    terminal.show(*_tables(found, solution))
    if output is not None:
        save_json(output, {"order": list(solution.order)})
        terminal.note(f"wrote {output}")


def _data(graph: "AbstractGraph", solution: "GraphSolution") -> dict[str, Any]:
    return {
        "graph": graph.name,
        "num_nodes": len(graph.nbytes),
        "num_runs": len(solution.order),
        "budget_bytes": solution.budget_bytes,
        "peak_bytes": solution.peak_bytes,
        "baseline_peak_bytes": graph.peak_bytes,
        "floor_bytes": graph.floor_bytes,
        "total_cost": solution.total_cost,
        "extra_cost": solution.extra_cost,
        "order": list(solution.order),
    }


def _tables(graph: "AbstractGraph", solution: "GraphSolution") -> list[RenderableType]:
    baseline, again = graph.peak_bytes, len(solution.order) - len(graph.nbytes)
    share = solution.extra_cost / solution.total_cost if solution.total_cost else 0.0
    rows = [
        ("budget", size(solution.budget_bytes), _of(solution.budget_bytes, baseline)),
        ("peak", size(solution.peak_bytes), _of(solution.peak_bytes, baseline)),
        ("baseline peak", size(baseline), "each node runs once"),
        ("no order has a lower peak than", size(graph.floor_bytes), _of(graph.floor_bytes, baseline)),
        ("cost added", f"{solution.extra_cost:.6g}", f"{100 * share:+.3f} % of {solution.total_cost:.6g}"),
        ("runs", len(solution.order), f"{again} more than there are nodes"),
    ]
    return [table(f"{graph.name}, {len(graph.nbytes)} nodes", ("", ">", ""), rows)]


def _of(nbytes: int, whole: int) -> str:
    return f"{100 * nbytes / whole:.2f} % of the baseline" if whole else ""
