"""What lowtide trains: every architecture of transformers, plain constructions of torch, and training loops.

    python bench/coverage.py [--only TEXT] [--out bench/out/coverage.csv] [--limit 180] [--every 10]
        [--markdown PAGE.md]

Each case trains a few steps in eager and by a plan whose budget is halfway between the lowest
reachable peak and that of eager, in a process of its own, and every loss, gradient, parameter and buffer
is compared to the last bit. Rows that are in the CSV already are not run again: delete one to do so.
"""

import argparse
import sys
import time
from collections.abc import Iterable
from pathlib import Path

from coverage_cases import Case, every_case, find_case
from coverage_cases.outcome import Outcome
from coverage_cases.table import markdown, show
from own_process import ProcessEnded, in_own_process
from rows import append, read, row_options

OUT = Path("bench/out/coverage.csv")
PRELOADED = ["torch", "transformers", "lowtide", "coverage_cases.examine"]


def main() -> None:
    options = _options()
    finished = read(options.out, Outcome)
    chosen = [case for case in every_case() if options.only in f"{case.group}:{case.name}"]
    cases = chosen[:: options.every]
    waiting = [case for case in cases if case.name not in {row.case for row in finished}]
    try:
        for number, case in enumerate(waiting, 1):
            row = run(case, limit_seconds=options.limit)
            row.day = time.strftime("%Y-%m-%d", time.gmtime())
            finished.append(row)
            append(options.out, row)
            print(f"{number}/{len(waiting)} {case.name}: {row.outcome} {row.words}"[:150], file=sys.stderr)
    except KeyboardInterrupt:
        print("stopped; what is finished is kept, and the same command goes on", file=sys.stderr)
    show(finished)
    if options.markdown:
        options.markdown.write_text(markdown(finished))


def run(case: Case, *, limit_seconds: float) -> Outcome:
    """The row of a case, from a process that has been forked before anything was computed."""
    try:
        row: Outcome = in_own_process(work, case.name, limit_seconds=limit_seconds, preload=PRELOADED)
        return row
    except ProcessEnded as end:
        return Outcome(case.name, case.group, end.outcome, str(end))


def work(name: str) -> Outcome:
    """The child's job."""
    from coverage_cases.examine import examine
    from lowtide.profiling import op_costs

    # on a busy machine, timing waits for idle phases; the table has no times
    op_costs._TIME_LIMIT_SECONDS = 1.0
    return examine(find_case(name))


def _options(arguments: Iterable[str] | None = None) -> argparse.Namespace:
    parser = row_options(__doc__, what="cases, as group:name,", out=OUT, limit=180)
    parser.add_argument("--every", type=int, default=1, help="only every so many-th of these cases")
    return parser.parse_args(None if arguments is None else list(arguments))


if __name__ == "__main__":
    main()
