"""Help of commands: examples to copy for each, and no types of options that are switches."""

from typing import Any

from typer.core import TyperCommand, TyperGroup

EXAMPLES = {
    "run": (
        "lowtide run tiny-gpt2 -b 8 --budget 60% -o out",
        "lowtide run train.py:make -b 32 --budget 8GiB --step-in-backward -o out",
    ),
    "profile": (
        "lowtide profile tiny-gpt2 -b 8 -o out",
        "lowtide profile train.py:make -b 32 --device a100-40g",
    ),
    "plan": (
        "lowtide plan out/profile.json --budget 60% -o out",
        "lowtide plan train.py:make -b 32 --budget 8GiB --planner mu-two",
        "lowtide plan llama3-8b -b 256 --gpus 64 --device h100-80g --search",
        "lowtide plan gpt2 -b 32 --budget 2GiB --pipeline 4 --microbatches 8",
    ),
    "verify": ("lowtide verify out/plan.json", "lowtide verify out/plan.json --on cuda --json"),
    "explain": ("lowtide explain out/plan.json relu_3",),
    "fit": (
        "lowtide fit train.py:make --budget 8GiB",
        "lowtide fit gpt2 --budget 24GiB --device a100-40g",
    ),
    "tradeoff": (
        "lowtide tradeoff out/profile.json --measure 0",
        "lowtide tradeoff tiny-gpt2 -b 8 --planners auto,mu-two -o out",
    ),
    "sweep": ("lowtide sweep train.py:make --batch-sizes 4,8,16 --budget 8GiB -o out",),
    "compare": (
        "lowtide compare tiny-gpt2 -b 8 --memory-budgets 0.5,0 -o out",
        "lowtide compare tiny-gpt2 -b 8 --planners auto,mu-two --budget 60% -o out",
    ),
    "solve": ("lowtide solve graph.json --budget 80%",),
    "models": ("lowtide models", "lowtide models --json"),
    "doctor": ("lowtide doctor", "lowtide doctor --json"),
    "launch": (
        "lowtide launch train.py --budget 8GiB --epochs 3",
        "torchrun --nproc-per-node 2 -m lowtide launch train.py --budget 8GiB",
    ),
    "diff": ("lowtide diff out-a out-b",),
}
"""By command, lines to type."""


def epilog(name: str) -> str:
    """The examples of a command as Markdown; empty without any."""
    lines = [f"- `{example}`" for example in EXAMPLES.get(name, ())]
    return "\n\n".join(["Examples:", *lines]) if lines else ""


def _plain_types(params: list[Any]) -> list[Any]:
    """The parameters, where a switch has no type."""
    for param in params:
        if param.metavar is None and (getattr(param, "is_flag", False) or getattr(param, "count", False)):
            param.metavar = ""
    return params


class PlainCommand(TyperCommand):
    """A command whose help has no types of switches."""

    def get_params(self, ctx: Any) -> list[Any]:
        return _plain_types(super().get_params(ctx))


class PlainGroup(TyperGroup):
    """The same for the command `lowtide` itself."""

    def get_params(self, ctx: Any) -> list[Any]:
        return _plain_types(super().get_params(ctx))
