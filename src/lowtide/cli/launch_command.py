"""`lowtide launch train.py --budget 8GiB [args...]`: train an unmodified script inside a budget.

Options of `launch` stand before the script, or right behind it; the rest is the script's own:

    lowtide launch train.py --budget 8GiB --epochs 3      -> launch: --budget 8GiB; train.py: --epochs 3
    lowtide launch --budget 8GiB -- train.py --budget 2   -> launch: --budget 8GiB; train.py: --budget 2
    torchrun --nproc-per-node 2 -m lowtide launch train.py --budget 8GiB
"""

import difflib
import runpy
import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lowtide.cli.exit_codes import Exit, UsageError, exit_code
from lowtide.cli.help_texts import PlainCommand
from lowtide.cli.option_values import optional_size
from lowtide.cli.options import (
    Budget,
    Executor,
    ExecutorName,
    Offload,
    OffloadWhat,
    Planner,
    Rounds,
    StepInBackward,
)
from lowtide.cli.terminal import Terminal
from lowtide.errors import LowtideError
from lowtide.stage_log import SENDER, is_first_process, say

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer

    from lowtide.integrations.first_trained import TrainedModel

Words = Annotated[
    list[str],
    typer.Argument(metavar="SCRIPT [ARGS]...", help="The script, and its own arguments.", show_default=False),
]
IsModule = Annotated[
    bool, typer.Option("-m", "--module", help="SCRIPT is a module's name, as for python -m.")
]
Accumulate = Annotated[
    bool, typer.Option("--accumulate", help="The script adds up gradients of several backward passes.")
]
Reserve = Annotated[
    str,
    typer.Option(
        metavar="SIZE", help="Bytes besides, such as those of another model.", callback=optional_size
    ),
]


class LaunchCommand(PlainCommand):
    """A command whose options may also stand right behind its first word."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        takes_value = {
            name: not getattr(parameter, "is_flag", False)
            for parameter in self.params
            for name in getattr(parameter, "opts", ())
            if name.startswith("-")
        }
        takes_value |= {"-h": False, "--help": False}
        words = options_first(args, takes_value)
        if "--" not in args and "--" in words:
            for note in misplaced(words[words.index("--") + 2 :], takes_value):
                say(f"note: {note}")
        return super().parse_args(ctx, words)


def options_first(words: Sequence[str], takes_value: dict[str, bool]) -> list[str]:
    """`words` with the options that stand right behind the script moved before it.

    `takes_value`: the options, and whether the next word is the value of one.
    """
    before, behind = _leading_options(words, takes_value)
    if behind and behind[0] == "--":
        return list(words)
    script, words_behind = behind[:1], behind[1:]
    more, arguments = _leading_options(words_behind, takes_value)
    if arguments[:1] == ["--"]:
        arguments = arguments[1:]
    return [*before, *more, *(["--", *script, *arguments] if script else [])]


def misplaced(arguments: Sequence[str], options: Collection[str]) -> Iterator[str]:
    """What to say of arguments that go to the script and may be meant as `options` of launch."""
    for argument in arguments:
        name = argument.partition("=")[0]
        if not name.startswith("--"):
            continue
        if name in options:
            yield f"{name} goes to the script, as it stands behind the script's own: put it before them"
        elif near := difflib.get_close_matches(name, options, n=1, cutoff=0.8):
            yield f"{name} goes to the script (lowtide has {near[0]})"


def _leading_options(words: Sequence[str], takes_value: dict[str, bool]) -> tuple[list[str], list[str]]:
    """The options that `words` begin with, and the other words."""
    at = 0
    while at < len(words) and words[at].partition("=")[0] in takes_value:
        name, has_value, _ = words[at].partition("=")
        at += 2 if takes_value[name] and not has_value else 1
    return list(words[:at]), list(words[at:])


def launch(
    words: Words,
    *,
    budget: Budget = "auto",
    is_module: IsModule = False,
    planner: Planner = "auto",
    accumulate: Accumulate = False,
    reserve: Reserve = "",
    step_in_backward: StepInBackward = False,
    offload: Offload = "",
    offload_what: OffloadWhat = "activations",
    rounds: Rounds = "",
    executor: Executor = ExecutorName.EAGER,
) -> None:
    """Train an unmodified script inside a budget: the first model that trains is planned at its first batch.

    What is planned, and what is not and why, is said in one line each. A budget that cannot be met ends the
    script before its first step; without --budget it is what the device has free. Options stand before the
    script or right behind it, and the rest is the script's own.

    Example: lowtide launch train.py --budget 8GiB --epochs 3

    Under torchrun: torchrun --nproc-per-node 2 -m lowtide launch train.py --budget 8GiB
    """
    script, *arguments = words
    terminal = Terminal(sender=SENDER)
    if not is_module and not Path(script).is_file():
        terminal.fail(UsageError(f"there is no file {script}: name a script, or a module with -m"))
        raise typer.Exit(Exit.USAGE)
    options = {
        "budget": budget,
        "planner": planner,
        "accumulate": accumulate,
        "reserve": reserve,
        "step_in_backward": step_in_backward,
        "offload": offload,
        "offload_what": offload_what,
        "rounds": rounds,
        "executor": executor.value,
    }
    from lowtide.integrations.first_trained import first_trained

    launched, interrupted = Launched(options), False
    sys.argv = [script, *arguments]
    sys.path.insert(0, str(Path.cwd() if is_module else Path(script).resolve().parent))
    try:
        with first_trained(launched.plan):
            if is_module:
                runpy.run_module(script, run_name="__main__", alter_sys=True)
            else:
                runpy.run_path(script, run_name="__main__")
    except (Exception, KeyboardInterrupt) as error:
        if error is launched.refusal:
            if is_first_process():
                terminal.fail(error)
            raise typer.Exit(exit_code(error)) from None
        launched.explain(error)
        interrupted = isinstance(error, KeyboardInterrupt)
        frames = _of_script(error.__traceback__)
        sys.excepthook(type(error), error.with_traceback(frames), frames)
        raise typer.Exit(Exit.INTERRUPTED if interrupted else Exit.ERROR) from None
    finally:
        if launched.model is None and not interrupted:
            say(
                "nothing was planned: no model was called with gradients whose parameters an optimizer has"
                + _compiled()
            )


class Launched:
    """The model of a script that is planned, and why it was refused, if it was: an error, or Ctrl-C while it
    was planned."""

    def __init__(self, options: dict[str, Any]) -> None:
        self.options = options
        self.model: nn.Module | None = None
        self.refusal: LowtideError | KeyboardInterrupt | None = None
        self.explain: Callable[[BaseException], None] = lambda _: None

    def plan(self, found: "TrainedModel") -> None:
        from lowtide.api import checkpoint
        from lowtide.experiments.out_of_memory import explainer
        from lowtide.integrations.held_besides import loop_is_of
        from lowtide.runtime.apply import plan_of
        from lowtide.runtime.loop_messages import SCRIPT

        self.explain = explainer(found.module, found.optimizers)
        self.model, name = found.module, type(found.module).__name__
        if plan_of(found.module) is not None:
            say(f"not planned: {name}, which the script itself gave a plan")
            return
        try:
            checkpoint(found.module, found.call, optimizer=found.optimizers, **self.options)
        except (LowtideError, KeyboardInterrupt) as error:
            self.refusal = error
            raise
        loop_is_of(SCRIPT, found.module)
        if found.num_outside:
            say(
                f"not planned: {found.num_outside} parameters of {_kinds(found.optimizers)} besides {name}, "
                "whose bytes the budget leaves out (--reserve counts them)"
            )
        if found.others:
            count = sum(len(group["params"]) for each in found.others for group in each.param_groups)
            say(
                f"not planned: the {count} parameters of {'another' if len(found.others) == 1 else 'other'} "
                f"{_kinds(found.others)}; only the first trained model is planned"
            )


def _compiled() -> str:
    """What to say of a script in which torch.compile has traced functions."""
    from lowtide.torch_compat.dynamo import has_compiled

    if not has_compiled():
        return ""
    return ". A model that is called inside of a function of torch.compile is not seen: leave compiling out"


def _kinds(optimizers: "Sequence[Optimizer]") -> str:
    return " and ".join(type(optimizer).__name__ for optimizer in optimizers)


def _of_script(frames: TracebackType | None) -> TracebackType | None:
    """The traceback from the script's first frame on, without those of this command and of `runpy`.

    None where the script did not begin, as after a `SyntaxError`.
    """
    at, is_inside, of_runpy = frames, False, runpy.run_path.__code__.co_filename
    while at is not None:
        is_runpy = at.tb_frame.f_code.co_filename == of_runpy
        if is_inside and not is_runpy:
            return at
        is_inside = is_inside or is_runpy
        at = at.tb_next
    return None if is_inside else frames
