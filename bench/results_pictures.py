"""The pictures of the results page: peaks and step times by batch size, and the methods side by side."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lowtide.experiments.sweep_rows import row_from_dict
from lowtide.report.plots import write_plots
from lowtide.report.results import CompareRow, Results
from results_page import Piece

CAPTIONS = {
    "peak_by_batch_size": "Peak memory by batch size",
    "latency_by_batch_size": "Step time by batch size",
    "methods": "Peak memory and time of each method",
}


def draw(pieces: Sequence[Piece], folder: Path, pictures: Path) -> dict[str, list[str]]:
    """Write the pictures of all pieces that are there into `pictures`; gives Markdown by a piece's name."""
    found = {}
    for piece in pieces:
        data = piece.load(folder)
        if data is None or piece.kind not in _ROWS:
            continue
        rows = _ROWS[piece.kind](data["data"])
        written = write_plots(pictures / piece.model, **rows, name=piece.model, formats=("png",))
        found[piece.name] = [
            f"![{CAPTIONS[path.stem]}]({path.relative_to(pictures.parent).as_posix()})" for path in written
        ]
    return found


def _sweep(data: dict[str, Any]) -> dict[str, Any]:
    return {"sweep": [row_from_dict(row) for row in data["rows"]]}


def _compare(data: dict[str, Any]) -> dict[str, Any]:
    rows = [
        CompareRow(
            method=method["method"],
            verdict=Results(method["verdict"]),
            why=method.get("why", ""),
            peak_bytes=method["peak_bytes"],
            time_ratio=method["time_ratio"],
            noise=method.get("noise"),
        )
        for method in data["methods"]
    ]
    return {"compare": rows}


_ROWS = {"sweep": _sweep, "compare": _compare}
