"""The commands to type after a budget was refused: the same command with levers, or another batch size."""

import shlex
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from lowtide.cli.terminal import Terminal
from lowtide.errors import BudgetTooSmall
from lowtide.facts.levers import Lever
from lowtide.units import round_up_size
from lowtide.zoo.targets import TargetSpec

FOLDER = "disk:FOLDER"
STORE = "store"
BUDGET = "--budget"


@contextmanager
def remedies(
    terminal: Terminal, argv: Sequence[str], *, folder: Path | None = None, anew: str = ""
) -> Iterator[None]:
    """Where the block refuses a budget, let the command end with the commands that would succeed.

    `folder` is the command's own, whose files are replaced then; a store is made in it. `anew` is the command
    that plans a live model, for a profile from a file: only beside a model are there levers.
    """
    try:
        yield
    except BudgetTooSmall as error:
        if anew and error.remedy:  # else another planner meets the budget
            terminal.after_failure.append(f"{anew}   # says what would fit")
        lever = lever_to_type(error)
        if lever is not None:
            store = f"disk:{(folder or Path()) / STORE}"
            options = [option.replace(FOLDER, store) for option in lever.options]
            budget = None if lever.floor_bytes <= error.budget_bytes else round_up_size(lever.floor_bytes)
            command = again(argv, options, budget=budget, force=folder is not None)
            terminal.after_failure.append(f"{command}   # reaches {lever.floor}")
        raise


def lever_to_type(error: BudgetTooSmall) -> Lever | None:
    """The lever that fits with the fewest changes, else the one with the lowest floor, among those that are
    options of the command; an estimate only where there is nothing else."""
    typed = [lever for lever in error.levers if all(option.startswith("--") for option in lever.options)]
    fitting = [lever for lever in typed if lever.floor_bytes <= error.budget_bytes]
    if fitting:
        return min(fitting, key=lambda lever: (lever.is_estimate, len(lever.options), lever.floor_bytes))
    return min(typed, key=lambda lever: (lever.is_estimate, lever.floor_bytes), default=None)


def target_command(spec: TargetSpec, budget: str) -> str:
    """How to plan the target of a profile anew: a refusal names levers only beside a live model."""
    options = {
        "--image-size": spec.image_size,
        "--sequence-length": spec.sequence_length,
        "--optimizer": spec.optimizer,
        "--seed": spec.seed or None,
        "--on": spec.device,
    }
    given = [word for name, value in options.items() if value is not None for word in (name, str(value))]
    words = ["lowtide", "plan", spec.text, "-b", str(spec.batch_size), *given, BUDGET, budget]
    return shlex.join(words)


def again(
    argv: Sequence[str], options: Sequence[str] = (), *, budget: str | None = None, force: bool = False
) -> str:
    """The command of `argv` with more options, another budget, and permission to replace its files."""
    words = ["lowtide", *argv[1:]]
    if budget is not None:
        place = next((i for i, word in enumerate(words) if word.partition("=")[0] == BUDGET), len(words))
        words[place : place + (1 if "=" in "".join(words[place : place + 1]) else 2)] = [BUDGET, budget]
    words += [word for option in options for word in option.split(" ", 1)]
    if force and "--force" not in words:
        words.append("--force")
    return shlex.join(words)
