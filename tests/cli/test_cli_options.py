"""Groups of options become options of a command, and come back as one object."""

import inspect
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer
from typer.testing import CliRunner

from lowtide.cli.app import app
from lowtide.cli.command import Offered, OutputOptions, command
from lowtide.cli.sources import StepOptions, offers
from lowtide.cli.terminal import Terminal

TERMINAL = ["as_json", "quiet", "verbose"]


@dataclass(frozen=True, kw_only=True)
class Size:
    width: Annotated[int, typer.Option(help="Columns.")] = 3
    height: Annotated[int, typer.Option(help="Rows.")] = 2


def test_each_field_of_a_group_is_an_option():
    got = {}

    @command
    def draw(terminal: Terminal, name: str, *, size: Size, output: OutputOptions) -> None:
        """Draw it."""
        got.update(terminal=terminal, name=name, size=size, output=output)

    assert list(inspect.signature(draw).parameters) == [
        "name",
        "width",
        "height",
        "folder",
        "force",
        *TERMINAL,
    ]
    one = typer.Typer()
    one.command()(draw)
    result = CliRunner().invoke(one, ["x", "--width", "7", "-o", "there", "-q"])
    assert result.exit_code == 0, result.output
    assert (got["name"], got["size"], got["output"]) == (
        "x",
        Size(width=7),
        OutputOptions(folder=Path("there")),
    )
    assert got["terminal"].quiet and not got["terminal"].as_json
    assert "Draw it." in CliRunner().invoke(one, ["--help"]).output


def test_a_command_has_the_fields_that_it_offers():
    @command
    def draw(terminal: Terminal, *, size: Annotated[Size, Offered(("height",))]) -> None:
        assert size == Size(height=9)

    assert list(inspect.signature(draw).parameters) == ["height", *TERMINAL]
    one = typer.Typer()
    one.command()(draw)
    assert CliRunner().invoke(one, ["--height", "9"]).exit_code == 0
    assert CliRunner().invoke(one, ["--width", "9"]).exit_code == 2


def test_what_differs_from_its_default_was_given():
    assert StepOptions().given == []
    assert StepOptions(seed=1, no_cache=True, device="t4-16g").given == ["--seed", "--no-cache", "--device"]


def test_offload_comes_with_its_earlier_name_which_help_does_not_show():
    assert "swap" in offers("offload").names and "swap" not in offers("device").names
    shown = CliRunner().invoke(app, ["run", "--help"]).output
    assert "--offload" in shown and "--swap" not in shown
