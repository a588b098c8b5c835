"""The `lowtide` command and its subcommands."""

import json
import sys
from importlib.metadata import PackageNotFoundError, version
from typing import Annotated

import typer

from lowtide import __version__
from lowtide.cli.compare_command import compare
from lowtide.cli.diff_command import diff
from lowtide.cli.doctor_command import doctor
from lowtide.cli.encoding import write_what_can_be_read
from lowtide.cli.exit_codes import Exit, UsageError
from lowtide.cli.file_commands import explain, models, solve
from lowtide.cli.fit_command import fit
from lowtide.cli.help_texts import PlainCommand, PlainGroup, epilog
from lowtide.cli.launch_command import LaunchCommand, launch
from lowtide.cli.step_commands import plan, profile, run, verify
from lowtide.cli.sweep_command import sweep
from lowtide.cli.terminal import Terminal
from lowtide.cli.tradeoff_command import tradeoff

app = typer.Typer(
    name="lowtide",
    cls=PlainGroup,
    invoke_without_command=True,
    context_settings={"help_option_names": ["-h", "--help"]},
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
)
for command in (
    *(run, profile, plan, verify, explain, diff, fit, tradeoff, sweep, compare, solve, models, doctor),
):
    app.command(cls=PlainCommand, epilog=epilog(command.__name__))(command)
app.command(cls=LaunchCommand, epilog=epilog(launch.__name__))(launch)


def _installed(library: str) -> str:
    try:
        return version(library)
    except PackageNotFoundError:
        return "not installed"


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"lowtide {__version__} (torch {_installed('torch')})")
        raise typer.Exit


@app.callback()
def lowtide(
    context: typer.Context,
    version: Annotated[
        bool,
        typer.Option("--version", callback=_version, is_eager=True, help="Print the version, and torch's."),
    ] = False,
) -> None:
    """Train a PyTorch model inside a memory budget given in bytes.

    Exit codes: 0 done, 1 error, 2 usage, 3 does not fit, 4 results differ.
    """
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


def main() -> None:
    """Run the command line and exit. A usage error is one line, too, and with `--json` a value as well."""
    write_what_can_be_read()
    try:
        code = app(standalone_mode=False)
    except Exception as error:
        # typer has its own click, under a private name: recognized by its methods
        if not hasattr(error, "format_message"):
            raise
        command = getattr(getattr(error, "ctx", None), "command_path", "lowtide")
        message = " ".join(error.format_message().split())
        Terminal().say(f"error: {message} ({command} --help shows what can be said)")
        if "--json" in sys.argv:
            typer.echo(json.dumps({"error": {"type": UsageError.__name__, "message": message}}, indent=2))
        code = Exit.USAGE
    sys.exit(code)
