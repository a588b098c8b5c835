"""Ten small models on the accelerator that torch shows, at a share of their peak.

Predicted and measured peaks, allocated and reserved, and exactness; and how much of the transfers of
offloaded values hides behind the compute.

    python bench/accelerator.py [--budget 60%] [--only gpt2,lstm] [--csv FILE]

Prints the tables of docs/results/accelerator.md. On a machine without an accelerator it runs on the stand-in
of the tests, with tests/standin on PYTHONPATH; there, transfers are timed once as they are queued, once as
late as they may run (`lazy`). Times are those of events on streams.
"""

import argparse
import csv
import gc
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from unittest import mock

import torch

import lowtide
from accelerator_models import MODELS
from lowtide.errors import BudgetTooSmall
from lowtide.facts.sizes import parse_budget
from lowtide.offload.host_store import HostStore
from lowtide.planning.repeated_graphs import planner_for
from lowtide.planning.simulate import simulate
from lowtide.planning.variants import offload_alone
from lowtide.units import round_up_size
from lowtide.verification.measure_step import train_step
from lowtide.verification.verify_plan import verify
from lowtide.zoo.targets import Target, TargetSpec

STEPS = 5
MIB = 1 << 20
PEAKS = (
    "model", "batch", "budget", "eager predicted", "eager measured", "plan predicted", "plan measured",
    "reserved predicted", "reserved measured", "results",
)  # fmt: skip
TRANSFERS = ("model", "peak", "offloaded", "transfers, ms", "hidden, predicted", "hidden", "lazy", "results")


def spec_of(name: str, device: torch.device) -> TargetSpec:
    text = str(Path(__file__).with_name("accelerator_models.py"))
    return TargetSpec(text=f"{text}:{name}", batch_size=MODELS[name], device=str(device))


def peaks(name: str, device: torch.device, budget: str) -> list[str]:
    """Plan for the budget, or for the lowest reachable peak above it; verify in fresh processes."""
    spec = spec_of(name, device)
    target = spec.load()
    profile = _profile(target)
    plan = lowest_plan(profile, budget)
    share = plan.budget_bytes / profile.peak_bytes
    shown = budget if plan.budget_bytes == parse_budget(budget, whole=profile.peak_bytes) else f"{share:.0%}"
    del target
    gc.collect()
    torch.accelerator.empty_cache()
    found = verify(spec, plan, timed_runs=0, resident=False)
    over = "" if found.fits else ", OVER the budget"
    return [
        name.replace("_", " "),
        str(spec.batch_size),
        shown,
        _mib(found.baseline_predicted_peak_bytes),
        _mib(found.baseline_measured_peak_bytes),
        _mib(found.predicted_peak_bytes),
        _mib(found.measured_peak_bytes),
        _mib(getattr(found, "predicted_reserved_bytes", None)),
        _mib(getattr(found, "measured_reserved_bytes", None)),
        ("exact" if found.exact else f"{len(found.differences)} differ") + over,
    ]


def lowest_plan(profile: lowtide.Profile, budget: str | int) -> lowtide.Plan:
    """For the budget, or for the lowest peak above it that a plan reaches, in blocks of the allocator."""
    try:
        return profile.plan(budget)
    except BudgetTooSmall as error:
        return lowest_plan(profile, round_up_size(error.floor_bytes))


def transfers(name: str, device: torch.device, budget: str) -> list[str]:
    """Plan by offloading alone, where that meets the budget, else as far down as it goes; train and time."""
    spec = spec_of(name, device)
    target = spec.load()
    profile = _profile(target, offload="host")
    planner = planner_for(profile.step)
    budget_bytes = parse_budget(budget, whole=planner.eager_peak_bytes)
    archive = planner.problem.once(offload_alone)
    entry = archive.best(budget_bytes) or min(archive.entries, key=lambda entry: entry.peak_bytes)
    timeline = simulate(planner.step, entry.runs)
    solution = planner.solution_of("auto", timeline, max(budget_bytes, timeline.peak_bytes))
    traffic = timeline.traffic
    if traffic is None or not traffic.store_bytes:
        return [name.replace("_", " "), _mib(timeline.peak_bytes), *["–"] * (len(TRANSFERS) - 2)]
    expected = _trained(spec.load())
    lowtide.Plan(solution, known=profile.known, loop=profile.loop).apply(target.model)
    equal = all(map(torch.equal, expected, _trained(target)))
    shares = [_hidden(target)]
    standin = getattr(torch, "standin", None)
    if standin is not None:
        standin.set_lazy(True)
        shares.append(_hidden(target))
        standin.reset()
    measured = [f"{share:.0%}" for share in shares]
    return [
        name.replace("_", " "),
        _mib(timeline.peak_bytes),
        _mib(traffic.store_bytes),
        f"{traffic.transfer_seconds * 1e3:.1f}",
        f"{max(0.0, 1 - traffic.stall_seconds / traffic.transfer_seconds):.0%}",
        measured[0],
        measured[1] if len(measured) > 1 else "–",
        "exact" if equal else "DIFFER",
    ]


def _profile(target: Target, *, offload: str = "") -> lowtide.Profile:
    return lowtide.profile(
        target.model, target.batch, optimizer=target.optimizer, loss=target.loss, offload=offload
    )


def _trained(target: Target) -> list[torch.Tensor]:
    """Losses of three steps and the parameters after them."""
    torch.manual_seed(0)
    losses = [train_step(target.model, target.batch, target.optimizer, target.loss) for _ in range(3)]
    return [*losses, *(parameter.detach().clone() for parameter in target.model.parameters())]


@dataclass
class Times:
    """Pairs of events around every copy, and around every wait of the compute for one."""

    copies: list[tuple[torch.Event, torch.Event]] = field(default_factory=list)
    waits: list[tuple[torch.Event, torch.Event]] = field(default_factory=list)


@contextmanager
def timed_transfers() -> Iterator[Times]:
    found = Times()
    copy, wait = HostStore.copy, HostStore.wait

    def event(stream: torch.Stream) -> torch.Event:
        made = torch.Event(stream.device, enable_timing=True)
        made.record(stream)
        return made

    def timed_copy(self: HostStore, target: torch.Tensor, source: torch.Tensor, stream: torch.Stream):  # type: ignore[no-untyped-def]
        stream.wait_stream(torch.accelerator.current_stream(stream.device))
        start = event(stream)
        done = copy(self, target, source, stream)
        found.copies.append((start, event(stream)))
        return done

    def timed_wait(self: HostStore, done: torch.Event, device: torch.device) -> None:
        stream = torch.accelerator.current_stream(device)
        start = event(stream)
        wait(self, done, device)
        found.waits.append((start, event(stream)))

    with mock.patch.object(HostStore, "copy", timed_copy), mock.patch.object(HostStore, "wait", timed_wait):
        yield found


def _hidden(target: Target) -> float:
    """The share of the transfers' time in which the compute does not wait: the median of some steps."""
    shares = []
    for _ in range(STEPS):
        with timed_transfers() as found:
            train_step(target.model, target.batch, target.optimizer, target.loss)
        torch.accelerator.synchronize()
        copied, waited = (
            sum(start.elapsed_time(end) for start, end in pairs) for pairs in (found.copies, found.waits)
        )
        shares.append(max(0.0, 1 - waited / copied) if copied else 1.0)
    return median(shares)


def _mib(nbytes: int | None) -> str:
    return "–" if nbytes is None else f"{nbytes / MIB:.2f}"


def show(columns: tuple[str, ...], rows: Iterator[list[str]]) -> list[list[str]]:
    """Print a table as its rows come."""
    print(f"| {' | '.join(columns)} |\n|{'---|' * len(columns)}")
    found = []
    for row in rows:
        print(f"| {' | '.join(row)} |", flush=True)
        found.append(row)
    print()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--budget", default="60%")
    parser.add_argument("--only", default="", help="names of models, with commas between them")
    parser.add_argument("--csv", type=Path, help="file for the peaks; transfers go to NAME-transfers.csv")
    given = parser.parse_args()
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None:
        raise SystemExit("no accelerator here: put tests/standin on PYTHONPATH to use the stand-in")
    logging.getLogger("lowtide").setLevel(logging.ERROR)
    device = torch.device(accelerator.type, torch.accelerator.current_device_index())
    names = given.only.split(",") if given.only else list(MODELS)
    found = show(PEAKS, (peaks(name, device, given.budget) for name in names))
    moved = show(TRANSFERS, (transfers(name, device, given.budget) for name in names))
    if given.csv is not None:
        beside = given.csv.with_name(f"{given.csv.stem}-transfers.csv")
        for path, columns, rows in ((given.csv, PEAKS, found), (beside, TRANSFERS, moved)):
            with path.open("w", newline="") as file:
                csv.writer(file).writerows([columns, *rows])


if __name__ == "__main__":
    main()
