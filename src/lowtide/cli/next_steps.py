"""What to type next, ready to be copied."""

import shlex
from pathlib import Path

from lowtide.cli.files import PLAN, PROFILE
from lowtide.facts.sizes import parse_budget
from lowtide.facts.units import round_up_size

USUAL = "60%"


def budget_to_try(*, peak_bytes: int, floor_bytes: int) -> str:
    """A budget that can be met: the usual share of the peak, else the floor, rounded up."""
    reachable = floor_bytes <= parse_budget(USUAL, whole=peak_bytes)
    return USUAL if reachable else round_up_size(floor_bytes)


def plan_command(out: Path, *, budget: str, planner: str = "auto") -> str:
    """How to plan from the profile in `out`."""
    where, file = (shlex.quote(str(path)) for path in (out, out / PROFILE))
    other = "" if planner == "auto" else f" --planner {planner}"
    return f"next: lowtide plan {file} --budget {budget}{other} -o {where}"


def after_run(
    out: Path, *, floor_bytes: int, step_in_backward: bool = False, executor: str = "eager"
) -> list[str]:
    """What the files of `lowtide run` are good for; a profile in a file is planned for executor 'eager'."""
    floor = "the lowest reachable peak" if executor == "eager" else "the lowest peak with executor 'eager'"
    given = "model, optimizer=optimizer" if step_in_backward else "model"
    profile, plan = (shlex.quote(str(out / name)) for name in (PROFILE, PLAN))
    return [
        f"next: lowtide plan {profile} --budget {floor_bytes}   # {floor}, at once",
        f"      lowtide tradeoff {profile} --measure 0   # what every budget costs",
        f"      lowtide verify {plan}   # again",
        f"      model = lowtide.load_plan({str(out / PLAN)!r}).apply({given})   # in your own script",
    ]
