"""`make test-accelerator`: run every file of this folder on the accelerator that torch shows, and print one
block for an issue: the device, the versions, and a line for every case that says whether it held.

Each file is a process of its own: an error of the device ends one file and not the others. After ten minutes
the rest is given up, and the block says so.
"""

import argparse
import json
import os
import platform
import re
import subprocess
import sys
import time
from collections import Counter
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

HERE = Path(__file__).parent
STANDIN = HERE.parent / "standin"
LIMIT_SECONDS = 570
WORDS = {"passed": "held", "failed": "FAILED", "skipped": "skipped", "not run": "NOT RUN"}
SETTINGS = ("CUDA_", "CUBLAS_", "CUDNN_", "HIP_", "NVIDIA_", "PYTORCH_", "TORCH", "OMP_")
LIBRARIES = ("lowtide", "torch", "transformers", "triton")
NO_ACCELERATOR = 2


def main() -> int:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--on", choices=["standin"], help="use the stand-in accelerator of the tests")
    options.add_argument("files", nargs="*", type=Path, help="these files instead of all")
    given = options.parse_args()
    if given.on == "standin" and str(STANDIN) not in sys.path:
        paths = [str(STANDIN), *filter(None, [os.environ.get("PYTHONPATH")])]
        os.environ["PYTHONPATH"] = os.pathsep.join(paths)
        os.execv(sys.executable, [sys.executable, *sys.argv])  # torch finds the stand-in when it is imported
    from lowtide.experiments.machine import accelerator_kind, why_no_accelerator

    if not accelerator_kind():
        print(f"no accelerator: {why_no_accelerator()} (ON=standin uses the tests' own)", file=sys.stderr)
        return NO_ACCELERATOR
    head = [*device_lines(), *version_lines()]
    start = time.monotonic()
    files = [file.resolve() for file in given.files] or sorted(HERE.glob("test_*.py"))
    cases = [case for file in files for case in run_file(file, LIMIT_SECONDS - (time.monotonic() - start))]
    seconds = time.monotonic() - start
    print("\n".join(block(head, cases, seconds)))
    return int(any(case["outcome"] not in ("passed", "skipped") for case in cases))


def run_file(file: Path, limit_seconds: float) -> list[dict[str, Any]]:
    """What became of every case of one file; one case more where the file did not come to its end."""
    subject = file.stem.removeprefix("test_").replace("_", " ")
    if limit_seconds <= 0:
        return [{"subject": subject, "name": "", "outcome": "not run", "figures": [], "why": "no time left"}]
    print(f"{subject} ...", file=sys.stderr, flush=True)
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-n",
        "0",
        "-m",
        "",
        "--no-header",
        "--show-capture=no",
        str(file),
    ]
    with TemporaryDirectory() as folder:
        path = Path(folder) / "cases"
        environ = os.environ | {"ACCELERATOR_CASES": str(path)}
        try:
            done = subprocess.run(
                command, env=environ, cwd=HERE.parent.parent, capture_output=True, text=True,
                check=False, timeout=limit_seconds,
            )  # fmt: skip
            ended = "" if done.returncode in (0, 1) else f"ended with status {done.returncode}"
            last = (done.stdout + done.stderr).strip().splitlines()[-1:]
            ended = ended and f"{ended}: {''.join(last)}"
        except subprocess.TimeoutExpired:
            ended = "was given up: no time left"
        lines = path.read_text().splitlines() if path.exists() else []
    cases = merged([json.loads(line) for line in lines])
    if ended:
        cases.append({"name": "", "outcome": "not run", "figures": [], "why": f"the file {ended}"})
    return [case | {"subject": subject} for case in cases]


def merged(cases: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """One for each name: a case that held may have failed when it was cleared up."""
    found: dict[str, dict[str, Any]] = {}
    for case in cases:
        if found.get(case["name"], case)["outcome"] == "passed" or case["name"] not in found:
            found[case["name"]] = case
    return list(found.values())


def device_lines() -> list[str]:
    import torch

    from lowtide.profiling.devices import device_for
    from lowtide.units import format_size

    kind = torch.accelerator.current_accelerator()
    assert kind is not None
    free, total = torch.accelerator.get_memory_info(torch.accelerator.current_device_index())
    properties = torch.get_device_module(kind).get_device_properties(torch.accelerator.current_device_index())
    known = ("major", "minor", "gcnArchName", "multi_processor_count", "driver_version")
    more = [f"{name} {getattr(properties, name)}" for name in known if hasattr(properties, name)]
    return [
        f"device: {device_for(kind).identity}, {torch.accelerator.device_count()} of them",
        f"memory: {format_size(free)} free of {format_size(total)}" + "".join(f", {text}" for text in more),
    ]


def version_lines() -> list[str]:
    import torch

    found = [f"Python {platform.python_version()}"]
    for name in LIBRARIES:
        try:
            found.append(f"{name} {version(name)}")
        except PackageNotFoundError:
            continue
    libraries = [f"cuDNN {torch.backends.cudnn.version()}"] if torch.backends.cudnn.is_available() else []
    settings = [f"{key}={value}" for key, value in sorted(os.environ.items()) if key.startswith(SETTINGS)]
    return [
        f"versions: {', '.join([*found, *libraries, f'{platform.system()} {platform.machine()}'])}",
        f"settings: {' '.join(settings) or 'none'}",
    ]


def block(head: list[str], cases: list[dict[str, Any]], seconds: float) -> list[str]:
    """The text to paste: failures first, then what held, then what was skipped."""
    order = {"failed": 0, "not run": 1, "passed": 2, "skipped": 3}
    counts = Counter(case["outcome"] for case in cases)
    tally = ", ".join(
        f"{counts[outcome]} {word.lower()}" for outcome, word in WORDS.items() if counts[outcome]
    )
    return [
        "",
        "```",
        "lowtide on an accelerator",
        *head,
        *(line(case) for case in sorted(cases, key=lambda case: order[case["outcome"]])),
        f"{tally or 'no case was found'}, in {seconds:.0f} s",
        "```",
    ]


def line(case: dict[str, Any]) -> str:
    words = re.sub(r"^test_", "", case["name"]).replace("_", " ")
    text = f"{WORDS[case['outcome']]:8} {case['subject']}: {words}".rstrip(": ")
    figures = "; ".join(peaks(*figures) for figures in case["figures"])
    return " | ".join(filter(None, (text, figures, case["why"][:300])))


def peaks(predicted: int, measured: int, budget: int) -> str:
    mib = [f"{nbytes / (1 << 20):.2f}" for nbytes in (predicted, measured, budget)]
    over = "" if measured <= budget else " OVER"
    return f"peak {mib[0]} predicted, {mib[1]} measured, {mib[2]} MiB budget{over}"


if __name__ == "__main__":
    sys.exit(main())
