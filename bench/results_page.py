"""The results page: Markdown from the JSON of its pieces. A piece that is missing says so."""

import json
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from lowtide.cli.output_files import environment
from lowtide.facts import Kind
from lowtide.report.results import with_why
from lowtide.report.style import LABELS, duration, percent, size

MIB = 2**20


@dataclass(frozen=True)
class Piece:
    """One `lowtide` command of the page. Its `name` is also that of its file."""

    model: str
    kind: str
    command: tuple[str, ...]

    @property
    def name(self) -> str:
        return f"{self.model}-{self.kind}"

    def path(self, folder: Path) -> Path:
        return folder / f"{self.name}.json"

    def load(self, folder: Path) -> dict[str, Any] | None:
        """What the piece found out; None where it was never run, or by another command."""
        if not self.path(folder).exists():
            return None
        data: dict[str, Any] = json.loads(self.path(folder).read_text())
        return data if data["command"] == list(self.command) else None


# Peaks in MiB without and with, change in time: what others published, on one NVIDIA GPU.
PUBLISHED = (
    ("ResNet-152", "first", 4, 1449.6, 1128.0, "+35.8 %"),
    ("ResNet-152", "first", 8, 2128.6, 1420.0, "−19.8 %"),
    ("ResNet-152", "first", 16, 3466.0, 2148.0, "−26.2 %"),
    ("ResNet-152", "first", 32, 6191.1, 3676.0, "−21.1 %"),
    ("ResNet-152", "first", 64, 11682.0, 4392.0, "−21.5 %"),
    ("ResNet-152", "second", 8, 1869.0, 1344.0, "+17.5 %"),
    ("ResNet-152", "second", 16, 3464.0, 2324.0, "+23.3 %"),
    ("ResNet-152", "second", 32, 6207.0, 4133.0, "+12.8 %"),
    ("ResNet-152", "second", 64, 11948.0, 7794.0, "+1.3 %"),
    ("ResNet-152", "third, no optimizer", 8, 1667.9, 1172.4, "–"),
    ("ResNet-152", "third, no optimizer", 16, 3014.1, 1949.0, "–"),
    ("ResNet-152", "third, no optimizer", 32, 5725.9, 3482.0, "–"),
    ("Transformer", "second", 8, 1641.0, 1470.0, "+93.9 %"),
    ("Transformer", "second", 32, 3053.0, 2379.0, "+57.9 %"),
    ("Transformer", "second", 128, 8399.0, 5710.0, "+4.9 %"),
    ("Transformer", "second", 256, 15272.0, 9893.0, "–"),
)


def render_page(
    pieces: Sequence[Piece],
    folder: Path,
    *,
    date: str,
    command: str,
    pictures: Mapping[str, Sequence[str]] = MappingProxyType({}),
) -> str:
    """`pictures`: in Markdown, by the name of the piece that they are of."""
    found = {piece.name: data for piece in pieces if (data := piece.load(folder)) is not None}
    where = environment("cpu")
    versions = ", ".join(f"{name} {version}" for name, version in where.versions)
    parts = [
        f"# Results, {date}",
        f"Machine: {where.machine}. Versions: {versions}. Command: `{command}`.",
        "Peaks are all that torch holds at the worst moment of a whole step, optimizer included, measured "
        "in fresh processes by torch's own count. Times are medians of steps run in turn, without and with; "
        "only their ratio within one run means anything. `~` marks what was predicted and not run.",
        "Time added is recompute, and a few percent either way: the machine's noise, and memory that is "
        "not taken from the system again in every step. A plan can come out faster than eager, since it "
        "saves page faults: `python bench/predicted.py TARGET:BATCH` counts them.",
        "Results of a method are *wrong* where its first step differs from eager's, or from its own without "
        "recompute, by more than rounding can explain. torch's partitioner and torch.compile at a memory "
        "budget come out so where they run the drawing of a dropout's mask, or of its seed, once more in the "
        "backward pass.",
    ]
    for model in dict.fromkeys(piece.model for piece in pieces):
        parts.append(f"## {model}")
        own = [piece for piece in pieces if piece.model == model and piece.kind in _SECTIONS]
        for piece in sorted(own, key=lambda piece: list(_SECTIONS).index(piece.kind)):
            parts += _SECTIONS[piece.kind](found[piece.name]["data"]) if piece.name in found else []
            parts += pictures.get(piece.name, [])
            parts.append(f"`lowtide {shlex.join(piece.command)}` ({_status(found.get(piece.name))})")
    sweeps = [
        (piece.model, row)
        for piece in pieces
        if piece.kind == "sweep" and piece.name in found
        for row in found[piece.name]["data"]["rows"]
    ]
    parts += larger_batches([piece for piece in pieces if piece.kind == "fit"], found)
    parts += _predictions(sweeps)
    parts += _published()
    return "\n\n".join(parts) + "\n"


def _status(piece: dict[str, Any] | None) -> str:
    if piece is None:
        return "**not run**"
    took = "run in parts" if piece["seconds"] is None else f"{piece['seconds']} s"
    if isinstance(piece["data"], dict) and not piece["data"].get("finished", True):
        took = "**stopped before its end**"
    return f"{took}, {piece['date']}"


def _table(columns: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    lines = [f"| {' | '.join(columns)} |", f"|{'---|' * len(columns)}"]
    lines += [f"| {' | '.join(str(cell).replace('|', '/') for cell in row)} |" for row in rows]
    return "\n".join(lines)


def _profile(data: dict[str, Any]) -> list[str]:
    peak, place = data["peak_bytes"], data["peak"]
    facts = _table(
        ("figure", "value"),
        [
            ("ops in the step", data["num_nodes"]),
            ("activations", f"{data['num_activations']}, {size(data['activation_bytes'])}"),
            ("peak", f"{size(peak)} at `{place['node']}` ({place['region']}, {place['module'] or '–'})"),
            ("step, sum of its ops", duration(data["step_seconds"])),
            *(
                (f"of it {region}", duration(seconds))
                for region, seconds in data["seconds_by_region"].items()
            ),
            ("ops timed at a smaller size", data["num_estimated"]),
        ],
    )
    kinds = _table(
        ("kind", "bytes at the peak", "share"),
        [
            (LABELS[Kind(kind)], size(nbytes), f"{100 * nbytes / peak:.1f} %")
            for kind, nbytes in data["peak_bytes_by_kind"].items()
        ],
    )
    largest = _table(
        ("largest activations", "bytes", "idle", "recompute", "module"),
        [
            (f"`{a['name']}`", size(a["nbytes"]), duration(a["idle_seconds"]), _again(a), a["module"] or "–")
            for a in data["largest_activations"][:5]
        ],
    )
    return [f"### Profile: {data['target']}", facts, kinds, largest]


def _again(activation: dict[str, Any]) -> str:
    return "never" if activation["fixed"] else duration(activation["recompute_seconds"])


def _sweep(data: dict[str, Any]) -> list[str]:
    rows = [
        (
            row["batch_size"],
            size(row["budget_bytes"]),
            _peak(row["baseline"]),
            _peak(row["planned"]),
            percent(None if row["reduction"] is None else -row["reduction"]),
            _time(row["baseline"]),
            _time(row["planned"]),
            percent(row["overhead"]),
            percent(row["predicted_overhead"]),
            {True: "exact", False: "**differ**", None: with_why(row["status"], row.get("why", ""))}[
                row["exact"]
            ],
        )
        for row in data["rows"]
    ]
    columns = (
        "batch",
        "budget",
        "peak without",
        "with",
        "memory",
        "step without",
        "with",
        "time",
        "predicted",
        "results",
    )
    return [f"### Batch sizes, budget {data['settings']['budget']}", _table(columns, rows)]


def _peak(step: dict[str, Any]) -> str:
    if step["measured_peak_bytes"] is not None:
        return size(step["measured_peak_bytes"])
    return "–" if step["predicted_peak_bytes"] is None else f"~{size(step['predicted_peak_bytes'])}"


def _time(step: dict[str, Any]) -> str:
    if step["seconds_median"] is None:
        return "–"
    return f"{duration(step['seconds_median'])} ± {duration(step['seconds_spread'] / 2)}"


def _compare(data: dict[str, Any]) -> list[str]:
    methods = data["methods"]
    plain = next((m["peak_bytes"] for m in methods if m["kind"] == "eager"), None)
    rows = [
        (
            m["method"],
            size(m["peak_bytes"]),
            percent(m["peak_bytes"] / plain - 1) if plain and m["peak_bytes"] else "–",
            "–" if m["time_ratio"] is None else f"× {m['time_ratio']:.2f}",
            with_why(m["verdict"], m.get("why", "")),
        )
        for m in methods
    ]
    return [
        f"### Methods: {data['target']}",
        _table(("method", "measured peak", "memory", "time", "results"), rows),
    ]


def larger_batches(pieces: Sequence[Piece], found: Mapping[str, dict[str, Any]]) -> list[str]:
    """How much larger a batch a plan allows in a few gigabytes, and what throughput that gains or loses."""
    if not pieces:
        return []
    rows = [
        (piece.model, budget, *_larger(fit))
        for piece in pieces
        if piece.name in found
        for budget, fit in zip(_budgets(piece), found[piece.name]["data"], strict=True)
    ]
    columns = (
        "model",
        "budget",
        "largest batch without",
        "with",
        "larger",
        "no plan exists from",
        "samples/s without",
        "with",
        "throughput",
        "fastest batch",
        "measured with its plan",
    )
    ran = [f"`lowtide {shlex.join(piece.command)}` ({_status(found.get(piece.name))})" for piece in pieces]
    return [
        "## How much larger a batch in so many bytes?",
        "Sizes and throughputs are predicted. With a plan, it is the largest batch that one was found for; "
        "from which on none can exist is proven. Throughput is that of the largest batch with its plan "
        "against that of the largest without one.",
        *([_table(columns, rows)] if rows else []),
        "; ".join(ran),
    ]


def _budgets(piece: Piece) -> list[str]:
    return piece.command[piece.command.index("--budget") + 1].split(",")


def _larger(data: dict[str, Any]) -> tuple[str, ...]:
    plain, largest = data["largest_plain"], data["largest"]
    rates = {row["size"]: row["per_second"] for row in data["rows"]}
    before, after = rates.get(plain), rates.get(largest)
    checks = [check for check in data["checks"] if check["planned"]]
    return (
        str(plain or "none"),
        str(largest or "none"),
        f"× {largest / plain:.2f}" if plain else "–",
        "–" if data["no_plan_above"] is None else str(data["no_plan_above"] + data["multiple_of"]),
        "–" if before is None else f"~{before:.3g}",
        "–" if after is None else f"~{after:.3g}",
        percent(after / before - 1) if before and after else "–",
        str(data["fastest"] or "–"),
        "; ".join(map(_checked, checks)) or "–",
    )


def _checked(check: dict[str, Any]) -> str:
    if check["measured_peak_bytes"] is None:
        return "not measured"
    exact = {True: "exact", False: "**differ**", None: "not compared"}[check["exact"]]
    return f"{size(check['measured_peak_bytes'])}, {exact}"


def _predictions(sweeps: Sequence[tuple[str, dict[str, Any]]]) -> list[str]:
    rows = [
        (
            model,
            row["batch_size"],
            run,
            size(predicted),
            size(measured),
            f"{100 * (predicted / measured - 1):+.2f} %",
        )
        for model, row in sweeps
        for run, step in (("without", row["baseline"]), ("with", row["planned"]))
        if (measured := step["measured_peak_bytes"]) and (predicted := step["predicted_peak_bytes"])
    ]
    if not rows:
        return []
    return [
        "## Predicted against measured peak",
        _table(("model", "batch", "plan", "predicted", "measured", "error"), rows),
    ]


def _published() -> list[str]:
    rows = [
        (model, source, batch, f"{before:.0f} MiB", f"{after:.0f} MiB", percent(after / before - 1), time)
        for model, source, batch, before, after, time in PUBLISHED
    ]
    return [
        "## Published elsewhere",
        "Three earlier implementations of the same idea, on one NVIDIA GPU. Their step holds the same kinds "
        "of bytes, but a GPU's convolutions take other workspaces, its allocator rounds sizes, and its ops "
        "have other relative costs, so peaks compare roughly and times not at all. None of them ran its own "
        "plan: torch.utils.checkpoint around blocks ran instead, and the speed-ups are errors of "
        "measurement (no synchronisation, evaluation mode, no warm-up).",
        _table(("model", "source", "batch", "peak without", "with", "memory", "time"), rows),
    ]


_SECTIONS = {"profile": _profile, "sweep": _sweep, "compare": _compare}
"""By kind of piece, in the order of the page."""
