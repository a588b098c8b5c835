"""What commands that write a folder share: plots where they can be drawn, and how it was measured."""

import datetime
import logging
import platform
import shlex
import sys
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from lowtide.facts.devices import ESTIMATED, gpu_behind
from lowtide.report.records import Environment

REPORT = "report.html"
PLOTS = "plots"

logger = logging.getLogger("lowtide")


def plots_if_possible(folder: Path, **data: Any) -> list[Path]:
    """The plots that `data` allows, in their own folder; without matplotlib none, and a line on stderr."""
    if find_spec("matplotlib") is None:
        logger.warning("no plots: they need matplotlib (pip install lowtide[plots])")
        return []
    from lowtide.report.plots import write_plots

    return write_plots(folder / PLOTS, **data)


def environment(device: str, *, measured: bool = True) -> Environment:
    """How this command's figures were measured; torch is only asked where they were."""
    here = _device(device) if measured else "planned from a file, nothing measured"
    return Environment(
        command=f"lowtide {shlex.join(sys.argv[1:])}",
        date=datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC"),
        machine=f"{here}, {platform.system()} {platform.machine()}",
        versions=(("python", platform.python_version()), *_versions("lowtide", "torch", "transformers")),
    )


def _versions(*names: str) -> list[tuple[str, str]]:
    found = []
    for name in names:
        try:
            found.append((name, version(name)))
        except PackageNotFoundError:
            continue  # an optional library that is not here took no part
    return found


def _device(name: str) -> str:
    gpu = gpu_behind(name)
    if gpu is not None:
        return f"{gpu.words}, {ESTIMATED}: nothing was measured"
    import torch

    from lowtide.profiling.device import device_for

    return device_for(torch.device(name)).identity
