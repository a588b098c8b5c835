"""Help: examples of every command that parse, and no types of switches."""

import shlex

import pytest
from typer.main import get_command

from lowtide.cli.app import app
from lowtide.cli.help_texts import EXAMPLES

COMMANDS = sorted(get_command(app).commands)


@pytest.mark.parametrize("name", COMMANDS)
def test_help_has_examples_and_no_types_of_switches(run_lowtide, monkeypatch, name):
    monkeypatch.setenv("COLUMNS", "80")
    code, stdout, _ = run_lowtide(name, "--help")
    assert code == 0 and EXAMPLES[name] and "Examples:" in stdout
    assert not any(noise in stdout for noise in ("<bool>", "<int>", "<int range>"))
    assert max(map(len, stdout.splitlines())) <= 80


def test_every_command_that_has_examples_exists():
    assert sorted(EXAMPLES) == COMMANDS


@pytest.mark.parametrize(
    "example", [each for examples in EXAMPLES.values() for each in examples if each.startswith("lowtide")]
)
def test_an_example_can_be_typed(example):
    _, name, *words = shlex.split(example.replace("--on cuda", "--on cpu"))
    command = get_command(app).commands[name]
    assert command.make_context(name, words).info_name == name
