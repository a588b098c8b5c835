"""Everything that the results page tells, piece by piece; what is there is not run again.

    python bench/results.py                        # all pieces, then docs/results/DATE.md
    python bench/results.py --only bert-base       # pieces whose name starts so; also bert-base-sweep
    python bench/results.py --page                 # the page alone, from what is there
    python bench/results.py --tiny -o page.md       # minutes instead of hours: does it work?

A piece is a `lowtide` command in a process of its own; its JSON goes to docs/results/pieces/, so that the
page can be made again anywhere. Delete a file there to run its piece again. Pictures go into a folder beside
the page, named like it.
"""

import argparse
import datetime
import json
import shlex
import subprocess
import sys
import sysconfig
import time
from dataclasses import dataclass, replace
from pathlib import Path

from lowtide.facts.files import write_atomic
from results_page import Piece, render_page
from results_pictures import draw

ROOT = Path(__file__).parent.parent
FOLDERS = (f"{sysconfig.get_path('purelib')}/", f"{ROOT / 'src'}/")
"""Where sources of models lie on this machine, which is no matter of the page's."""
FINISHED = (0, 3, 4)
"""Exit codes of commands that found something out: done, does not fit, results differ."""


@dataclass(frozen=True, kw_only=True)
class Model:
    """What is asked of one target. Of `sizes` that this machine cannot hold, what it can is measured.

    `compiled`: methods that Inductor compiles are compared as well.
    """

    name: str
    compared: int
    compiled: bool = False
    profiled: int | None = None
    sizes: tuple[int, ...] = ()
    budget: str = "70%"
    fits: tuple[str, ...] = ()


FITS = ("1.5GB", "2GB", "4GB")
MODELS = (
    Model(name="resnet152", sizes=(4, 8, 16, 32, 64), fits=FITS, profiled=16, compared=4, compiled=True),
    Model(name="bert-base", sizes=(8, 16, 32, 64), fits=FITS, profiled=16, compared=8, compiled=True),
    Model(name="transformer", sizes=(2, 4, 8, 16, 32, 64, 128, 256), fits=FITS, profiled=32, compared=16),
    Model(name="gpt2", compared=4, compiled=True),
)


def tiny(model: Model) -> Model:
    return replace(
        model,
        name=f"tiny-{model.name}",
        sizes=model.sizes and (4, 8),
        fits=model.fits and ("8MiB", "16MiB"),
        profiled=model.profiled and 8,
        compared=8,
    )


def pieces(model: Model, *, timed_runs: int, check: bool = True) -> list[Piece]:
    """The commands for one model, cheapest first."""
    name, runs = model.name, ("--timed-runs", str(timed_runs))
    found = []
    if model.profiled:
        found.append(Piece(name, "profile", ("profile", name, "-b", str(model.profiled))))
    if model.fits:
        checks = () if check else ("--no-check",)
        found.append(Piece(name, "fit", ("fit", name, "--budget", ",".join(model.fits), *checks)))
    if model.sizes:
        sizes = ",".join(map(str, model.sizes))
        found.append(Piece(name, "sweep", ("sweep", name, "--budget", model.budget, "-b", sizes, *runs)))
    # each row that Inductor compiles takes minutes, so two of torch's budgets have to do
    executor = ("--executor", "inductor", "--memory-budgets", "0.5,0") if model.compiled else ()
    found.append(Piece(name, "compare", ("compare", name, "-b", str(model.compared), *executor, *runs)))
    return found


def run(piece: Piece, folder: Path) -> bool:
    """Run a piece unless it was run before, by the same command; whether it is there now."""
    if piece.load(folder) is not None:
        print(f"{piece.name}: there already", file=sys.stderr)
        return True
    command = [sys.executable, "-m", "lowtide", *piece.command, "--json"]
    out = folder / "-".join(piece.command).replace("%", "")
    in_parts = out.exists()
    if piece.kind == "sweep":
        # every size is kept as it comes, so that a sweep stopped half-way goes on from there
        command += ["-o", str(out), "--resume"]
    print(f"{piece.name}: {shlex.join(('lowtide', *piece.command))}", file=sys.stderr, flush=True)
    start = time.perf_counter()
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode not in FINISHED or not done.stdout:
        print(f"{piece.name}: failed with exit code {done.returncode}", file=sys.stderr)
        return False
    seconds = None if in_parts else round(time.perf_counter() - start)
    said = done.stdout
    for here in FOLDERS:
        said = said.replace(here, "")
    found = {"command": piece.command, "date": today(), "seconds": seconds, "data": json.loads(said)}
    write_atomic(piece.path(folder), json.dumps(found))
    return True


def today() -> str:
    return datetime.datetime.now(datetime.UTC).date().isoformat()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="+", default=[""], metavar="PIECE", help="pieces by their beginning")
    parser.add_argument("--page", action="store_true", help="run nothing, write the page from what is there")
    parser.add_argument("--tiny", action="store_true", help="small variants of the models")
    parser.add_argument("--timed-runs", type=int, default=5)
    parser.add_argument("--no-check", action="store_true", help="what fits is predicted, and not run")
    parser.add_argument("--folder", type=Path, default=ROOT / "docs" / "results" / "pieces")
    parser.add_argument("-o", "--output", type=Path, help="the page; docs/results/DATE.md without it")
    options = parser.parse_args()
    models = [tiny(model) for model in MODELS] if options.tiny else list(MODELS)
    found = [
        piece
        for model in models
        for piece in pieces(model, timed_runs=options.timed_runs, check=not options.no_check)
    ]
    chosen = [piece for piece in found if piece.name.startswith(tuple(options.only))]
    if not chosen:
        parser.error(f"no piece starts with {options.only}: there are {', '.join(p.name for p in found)}")
    failed = [] if options.page else [piece.name for piece in chosen if not run(piece, options.folder)]
    output = options.output or ROOT / "docs" / "results" / f"{today()}.md"
    command = shlex.join(["python", "bench/results.py", *sys.argv[1:]])
    pictures = draw(found, options.folder, output.with_suffix(""))
    page = render_page(found, options.folder, date=today(), command=command, pictures=pictures)
    write_atomic(output, page)
    print(output)
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
