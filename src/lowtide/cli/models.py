"""`lowtide models`: the built-in targets."""

from dataclasses import asdict

from lowtide.cli.options import Json, Quiet, Verbose
from lowtide.cli.output import table
from lowtide.cli.terminal import session
from lowtide.zoo.catalog import CATALOG


def models(*, as_json: Json = False, quiet: Quiet = False, verbose: Verbose = False) -> None:
    """List the built-in targets and the size that each one takes."""
    with session(as_json=as_json, quiet=quiet, verbose=verbose) as terminal:
        entries = CATALOG.values()
        terminal.data([asdict(entry) for entry in entries])
        rows = [
            (entry.name, f"--{entry.option.replace('_', '-')} {getattr(entry, entry.option)}", entry.summary)
            for entry in entries
        ]
        terminal.show(table("Built-in targets", ("name", "size (default)", "what it is"), rows))
