"""Plans against the truth: predicted and measured peak, predicted and measured overhead, exactness.

    python bench/plans.py resnet152:4 bert-base:16 transformer:32 gpt2:4 --budgets 80%,60%,floor -o plans.csv

Every row is verified in fresh processes: three optimizer steps compared with eager by torch.equal,
both peaks by torch's own count, both times in turn. A budget below the floor is a row that says so.
"""

import argparse
import csv
import sys
from pathlib import Path

import lowtide
from lowtide.verification.verify_plan import verify
from lowtide.zoo.targets import TargetSpec

COLUMNS = (
    "target",
    "budget",
    "budget_mib",
    "predicted_mib",
    "measured_mib",
    "difference_percent",
    "eager_measured_mib",
    "eager_predicted_mib",
    "predicted_overhead_percent",
    "measured_overhead_percent",
    "exact",
)
MIB = 2**20


def rows(name: str, batch_size: int, budgets: list[str], *, timed_runs: int, optimizer: str | None):
    """One row per budget of one target."""
    spec = TargetSpec(text=name, batch_size=batch_size, optimizer=optimizer)
    target = spec.load()
    profile = lowtide.profile(target.model, target.batch, optimizer=target.optimizer, loss=target.loss)
    del target
    for budget in budgets:
        head = (f"{name}:{batch_size}", budget)
        try:
            plan = profile.plan(profile.floor_bytes if budget == "floor" else budget)
        except lowtide.BudgetTooSmall as error:
            yield (*head, f"below the floor of {error.floor_bytes / MIB:.1f}")
            continue
        found = verify(spec, plan, timed_runs=timed_runs)
        off = found.measured_peak_bytes / found.predicted_peak_bytes - 1
        yield (
            *head,
            f"{plan.budget_bytes / MIB:.1f}",
            f"{plan.peak_bytes / MIB:.1f}",
            f"{found.measured_peak_bytes / MIB:.1f}",
            f"{100 * off:+.3f}",
            f"{found.baseline_measured_peak_bytes / MIB:.1f}",
            f"{found.baseline_predicted_peak_bytes / MIB:.1f}",
            f"{100 * plan.overhead:.1f}",
            "" if found.overhead is None else f"{100 * found.overhead:.1f}",
            "yes" if found.exact else found.differences[0],
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("targets", nargs="+", metavar="TARGET:BATCH")
    parser.add_argument("--budgets", default="80%,60%,floor")
    parser.add_argument("--timed-runs", type=int, default=5)
    parser.add_argument("--optimizer", default=None)
    parser.add_argument("-o", "--output", type=Path, default=None)
    options = parser.parse_args()
    table = []
    print(",".join(COLUMNS))
    for text in options.targets:
        name, _, batch = text.rpartition(":")
        for row in rows(
            name,
            int(batch),
            options.budgets.split(","),
            timed_runs=options.timed_runs,
            optimizer=options.optimizer,
        ):
            table.append(row)
            print(",".join(row))
            sys.stdout.flush()
    if options.output is not None:
        options.output.parent.mkdir(parents=True, exist_ok=True)
        with options.output.open("w", newline="") as file:
            csv.writer(file).writerows([COLUMNS, *table])


if __name__ == "__main__":
    main()
