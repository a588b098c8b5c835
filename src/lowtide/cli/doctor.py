"""`lowtide doctor`: does lowtide work on this machine? A block of text to paste into an issue."""

import os
import platform
import traceback
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

import typer
from rich.text import Text

from lowtide.cli.exits import Exit, one_line
from lowtide.cli.options import Json, Quiet, Verbose
from lowtide.cli.terminal import Terminal, session
from lowtide.report.words import percent, size

if TYPE_CHECKING:
    from lowtide.experiments.checkup import Checkup, SwapCheckup

LIBRARIES = ("lowtide", "torch", "transformers", "numpy")


def doctor(*, as_json: Json = False, quiet: Quiet = False, verbose: Verbose = False) -> None:
    """Check capture, timing, peak, exactness and swap with a small model on this machine, in two minutes.

    Prints a block to paste into an issue. Uses the CPU, and a CUDA device where there is one. Exits with 4
    when results differ, with 3 when a peak is not as promised, with 1 when a check fails.
    """
    with session(as_json=as_json, quiet=quiet, verbose=verbose) as terminal:
        terminal.note("about two minutes; close what else keeps the machine busy")
        with terminal.working("starting"):
            from lowtide.experiments.checkup import DEVICES, why_not_run

        results: dict[str, Any] = {}
        for name in DEVICES:
            reason = why_not_run(name)
            results[name] = f"not run: {reason}" if reason else _check(name, terminal)
        machine = _machine()
        devices = {k: found if isinstance(found, str) else asdict(found) for k, found in results.items()}
        terminal.data({"machine": machine, "devices": devices})
        terminal.show(Text("\n".join(_block(machine, results))))
        raise typer.Exit(_exit(results))


def _check(name: str, terminal: Terminal) -> "Checkup | str":
    """A failed check is a finding, and the other devices are still checked."""
    from lowtide.experiments.checkup import check_device

    try:
        with terminal.working(f"checking {name}"):
            return check_device(name)
    except Exception as error:
        if terminal.verbose:
            terminal.note("".join(traceback.format_exception(error)))
        return f"FAILED: {one_line(error)}"


def _machine() -> dict[str, str]:
    found = {"python": platform.python_version(), "system": f"{platform.system()} {platform.machine()}"}
    for name in LIBRARIES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "not installed"
    settings = [f"{name}={value}" for name, value in sorted(os.environ.items()) if name.startswith("OMP_")]
    return found | {"cores": str(os.cpu_count()), "settings": " ".join(settings) or "none"}


def _block(machine: dict[str, str], results: dict[str, Any]) -> list[str]:
    lines = [f"{name}: {value}" for name, value in machine.items()]
    for name, found in results.items():
        lines += [f"{name}: {found}"] if isinstance(found, str) else _device(found)
    return lines


def _device(found: "Checkup") -> list[str]:
    results = "exact" if found.exact else "DIFFERENT: " + "; ".join(found.differences[:3])
    return [
        f"{found.device}: {found.identity}",
        f"  captured: {found.num_ops} nodes",
        f"  op times: change by {found.timing_noise:.0%} from one profile to the next",
        f"  peak without a plan: {_peaks(found, 0)}",
        f"  peak with a plan: {_peaks(found, 1)}, budget {size(found.budget_bytes)}",
        f"  results: {results}",
        f"  time added: predicted {percent(found.predicted_overhead)}, "
        f"measured {percent(found.measured_overhead)}",
        *_swap(found.swap),
        f"  measured in: {'fresh processes' if found.fresh_process else 'this process'}",
        *(f"  note: {note}" for note in found.notes),
        f"  {'all is well' if found.is_fine else 'NOT as promised'}",
    ]


def _swap(found: "SwapCheckup") -> list[str]:
    results = "exact" if found.exact else "DIFFERENT: " + "; ".join(found.differences[:3])
    link = found.link
    return [
        f"  swap to {link.store}: {size(int(link.write_bytes_per_second))}/s there, "
        f"{size(int(link.read_bytes_per_second))}/s back",
        f"  peak with {found.num_offloaded} values swapped: predicted {size(found.predicted_peak_bytes)}, "
        f"measured {size(found.measured_peak_bytes)}, budget {size(found.budget_bytes)}; results: {results}",
    ]


def _peaks(found: "Checkup", index: int) -> str:
    predicted, measured = found.predicted_peak_bytes[index], found.measured_peak_bytes[index]
    return f"predicted {size(predicted)}, measured {size(measured)}"


def _exit(results: dict[str, Any]) -> Exit:
    checked = [found for found in results.values() if not isinstance(found, str)]
    if any(not (found.exact and found.swap.exact) for found in checked):
        return Exit.RESULTS_DIFFER
    if any(isinstance(found, str) and found.startswith("FAILED") for found in results.values()):
        return Exit.ERROR
    return Exit.DONE if all(found.is_fine for found in checked) else Exit.DOES_NOT_FIT
