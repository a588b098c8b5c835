"""What commands that write a folder share: plots where they can be drawn, and how it was measured."""

import logging
import shlex
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from lowtide.facts.devices import ESTIMATED, gpu_behind
from lowtide.report.environment import environment_here
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
    known = measured or gpu_behind(device) is not None
    here = _device(device) if known else "planned from a file, nothing measured"
    return environment_here(machine=here, command=f"lowtide {shlex.join(sys.argv[1:])}")


def _device(name: str) -> str:
    gpu = gpu_behind(name)
    if gpu is not None:
        return f"{gpu.words}, {ESTIMATED}: nothing was measured"
    import torch

    from lowtide.profiling.device import device_for

    return device_for(torch.device(name)).identity
