"""`lowtide doctor`: check lowtide on this machine, and print a block of text to paste into an issue."""

import os
import platform
import traceback
from collections.abc import Callable
from dataclasses import asdict, is_dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

import typer

from lowtide import __version__
from lowtide.cli.command import command
from lowtide.cli.exit_codes import Exit, one_line
from lowtide.cli.terminal import Terminal
from lowtide.experiments import machine as machine_checks
from lowtide.report.style import added, percent, size

if TYPE_CHECKING:
    from lowtide.experiments.checkup import CaptureCheckup, OffloadCheckup, PlanCheckup

LIBRARIES = ("torch", "transformers", "numpy")
SETTINGS = ("OMP_", "MKL_", "KMP_", "CUDA_", "HIP_", "PYTORCH_", "TORCH", "LOWTIDE_", "MALLOC_")
"""The prefixes of environment variables that torch and lowtide read."""

NO_TORCH = "not run: torch does not work here"


class Failed(str):
    """The text about a check that raised."""

    __slots__ = ()


@command
def doctor(terminal: Terminal) -> None:
    """Check capture, timing, peak, exactness and offload with a small model on this machine, in two minutes.

    Prints a block to paste into an issue. Looks at what lowtide stands on first; then uses the CPU, and the
    accelerator that torch shows, if any. Exits with 4 when results differ, with 1 when a check fails, with 3
    when a peak is not as promised.
    """
    terminal.note("about two minutes; close what else keeps the machine busy")
    machine = _machine()
    terminal.show_lines(*(f"{name}: {value}" for name, value in machine.items()))
    checks = _checks(terminal, machine_checks.CHECKS)
    if isinstance(checks["torch"], Failed):
        devices: dict[str, Any] = {"cpu": NO_TORCH}
        terminal.show_lines(f"cpu: {NO_TORCH}")
    else:
        checks |= _checks(terminal, machine_checks.WITH_TORCH)
        devices = _devices(terminal)
    terminal.data(
        {
            "machine": machine,
            "checks": {k: _said(v) for k, v in checks.items()},
            "devices": _plain(devices),
        }
    )
    raise typer.Exit(_exit(checks, devices))


def _checks(terminal: Terminal, checks: dict[str, Callable[[], str]]) -> dict[str, Any]:
    """Show each result at once: a check may end the process."""
    found = {}
    for name, check in checks.items():
        found[name] = _try(terminal, f"checking {name}", check)
        terminal.show_lines(f"{name}: {_said(found[name])}")
    return found


def _try(terminal: Terminal, doing: str, check: Callable[..., Any], *arguments: Any) -> Any:
    """A failed check is a finding; the other checks still run."""
    try:
        with terminal.working(doing):
            return check(*arguments)
    except Exception as error:
        if terminal.verbose:
            terminal.note("".join(traceback.format_exception(error)))
        return Failed(one_line(error))


def _machine() -> dict[str, str]:
    found = {"python": platform.python_version(), "system": f"{platform.system()} {platform.machine()}"}
    found["lowtide"] = __version__
    for name in LIBRARIES:
        try:
            found[f"{name} installed"] = version(name)
        except PackageNotFoundError:
            found[f"{name} installed"] = "no"
    settings = [f"{name}={value}" for name, value in sorted(os.environ.items()) if name.startswith(SETTINGS)]
    return found | {"cores": str(os.cpu_count()), "settings": " ".join(settings) or "none"}


def _devices(terminal: Terminal) -> dict[str, Any]:
    """The findings for each device, check by check; a text for a device that was not checked."""
    found: dict[str, Any] = {"cpu": _device(terminal, "cpu")}
    if kind := machine_checks.accelerator_kind():
        return found | {kind: _device(terminal, kind)}
    found["accelerator"] = f"not run: {machine_checks.why_no_accelerator()}"
    terminal.show_lines(f"accelerator: {found['accelerator']}")
    return found


def _device(terminal: Terminal, name: str) -> dict[str, Any]:
    from lowtide.experiments import checkup

    captured = _try(terminal, f"checking {name}: capture", checkup.check_capture, name)
    if isinstance(captured, Failed):
        terminal.show_lines(f"{name}: {_said(captured)}")
        return {"capture": captured}
    capture, made, profile = captured
    terminal.show_lines(f"{name}: {capture.identity}", *_capture_lines(capture))
    plan = _try(
        terminal, f"checking {name}: a plan, timed for 30 s at most", checkup.check_plan, made, profile
    )
    terminal.show_lines(*_plan_lines(plan))
    offload = _try(terminal, f"checking {name}: offload", checkup.check_offload, name, made)
    terminal.show_lines(*_offload_lines(offload))
    found = {"capture": capture, "plan": plan, "swap": offload}
    terminal.show_lines(f"  {'all is well' if _is_fine(found) else 'NOT as promised'}")
    return found


def _capture_lines(found: "CaptureCheckup") -> list[str]:
    return [
        *([] if found.free_bytes is None else [f"  memory: {size(found.free_bytes)} free"]),
        f"  captured: {found.num_ops} nodes",
        f"  op times: change by {found.timing_noise:.0%} from one profile to the next",
        *(f"  note: {note}" for note in found.notes),
    ]


def _plan_lines(found: "PlanCheckup | Failed") -> list[str]:
    if isinstance(found, Failed):
        return [f"  plan: {_said(found)}"]
    (baseline, planned), (baseline_measured, measured) = found.predicted_peak_bytes, found.measured_peak_bytes
    return [
        f"  peak without a plan: predicted {size(baseline)}, measured {size(baseline_measured)}",
        f"  peak with a plan: predicted {size(planned)}, measured {size(measured)}, "
        f"budget {size(found.budget_bytes)}",
        f"  results: {_results(found)}",
        f"  time added: predicted {percent(found.predicted_overhead)}, "
        f"measured {added(found.measured_overhead, found.noise)}",
        f"  measured in: {'fresh processes' if found.fresh_process else 'this process'}",
    ]


def _offload_lines(found: "OffloadCheckup | Failed") -> list[str]:
    if isinstance(found, Failed):
        return [f"  offload: {_said(found)}"]
    link = found.link
    return [
        f"  offload to {link.store}: {size(int(link.write_bytes_per_second))}/s there, "
        f"{size(int(link.read_bytes_per_second))}/s back",
        f"  peak with {found.num_offloaded} values offloaded: predicted {size(found.predicted_peak_bytes)}, "
        f"measured {size(found.measured_peak_bytes)}, budget {size(found.budget_bytes)}; "
        f"results: {_results(found)}",
    ]


def _results(found: "PlanCheckup | OffloadCheckup") -> str:
    return "exact" if found.exact else "DIFFERENT: " + "; ".join(found.differences[:3])


def _said(found: Any) -> str:
    if isinstance(found, Failed):
        return f"FAILED: {found}"
    return f"NOTE: {found}" if isinstance(found, machine_checks.Note) else str(found)


def _plain(found: Any) -> Any:
    """As JSON data."""
    if isinstance(found, dict):
        return {key: _plain(value) for key, value in found.items()}
    return asdict(found) if is_dataclass(found) and not isinstance(found, type) else _said(found)


def _is_fine(found: dict[str, Any]) -> bool:
    return not any(isinstance(part, Failed) for part in found.values()) and all(
        found[part].is_fine for part in ("plan", "swap")
    )


def _exit(checks: dict[str, Any], devices: dict[str, Any]) -> Exit:
    parts = [part for found in devices.values() if isinstance(found, dict) for part in found.values()]
    if any(not getattr(part, "exact", True) for part in parts):
        return Exit.RESULTS_DIFFER
    if any(isinstance(part, Failed) for part in (*checks.values(), *parts)):
        return Exit.ERROR
    return Exit.DONE if all(getattr(part, "is_fine", True) for part in parts) else Exit.DOES_NOT_FIT
