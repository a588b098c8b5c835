"""What would lower the floor of a refused step: other settings of the loop, and the floor with each.

The graphs are the captured ones. Each setting is an analysis of them and a search for the lowest peak, which
take a second for a model of a thousand ops; so all this runs only after a refusal.
"""

import logging
import weakref
from collections.abc import Callable, Iterator
from copy import copy
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import nn

from lowtide import display
from lowtide.analyze.analyze_again import AnalyzeAgain
from lowtide.analyze.captured_step import Captured
from lowtide.errors import LowtideError
from lowtide.facts import Kind, Region, Step, TransferSpeed
from lowtide.facts.levers import Lever, lowering
from lowtide.facts.plan import OFFLOADABLE
from lowtide.planning.decisions import LASTING
from lowtide.planning.planner import Planner
from lowtide.planning.repeated_calls import step_of_calls
from lowtide.planning.repeated_graphs import planner_for
from lowtide.planning.simulate import Timeline
from lowtide.planning.variants import with_priced_fetches
from lowtide.stage_log import without_warnings

UNKNOWN_STORE = TransferSpeed(
    store="disk:FOLDER", write_bytes_per_second=1e9, read_bytes_per_second=1e9, latency_seconds=1e-4
)
"""A store that is not there yet. Its speed changes the time of a plan, hardly the lowest peak."""
NO_CLIPPING = "step_in_backward: not where gradients are clipped by norm, scaled or accumulated"

logger = logging.getLogger("lowtide")


def lever_search(
    captured: Captured,
    model: nn.Module,
    cost: Callable[[Captured], Step],
    count: Callable[[Step, nn.Module], Step],
    *,
    one_process: bool,
    stores: bool,
) -> "LeverSearch | None":
    """What finds the levers of a captured step; None for a sharded model. Does not keep the model live.

    `cost` fills a captured step with known costs, and `count` adds what the model's processes hold."""
    if captured.again is None:
        return None
    reference = weakref.ref(model)

    def counted(other: Captured) -> Step:
        alive = reference()
        assert alive is not None  # else nothing was analyzed again
        return count(cost(other), alive)

    return LeverSearch(captured.again, counted, one_process=one_process, stores=stores)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Change:
    """A setting of the loop, or of its optimizers, that differs."""

    keyword: str
    option: str
    settings: tuple[tuple[str, Any], ...] = ()
    optimizer: tuple[tuple[str, bool], ...] = ()
    caution: str = ""


class LeverSearch:
    """Finds the levers of one captured step.

    `cost` fills a captured step with the known costs. `one_process`: gradients need no other process.
    `stores`: an offload store can be had where the step runs.
    """

    def __init__(
        self,
        again: AnalyzeAgain[Captured],
        cost: Callable[[Captured], Step],
        *,
        one_process: bool = True,
        stores: bool = True,
    ) -> None:
        self._again = again
        self._cost = cost
        self._one_process = one_process
        self._stores = stores

    def find(self, planner: Planner, *, floor_bytes: int) -> tuple[Lever, ...]:
        """Levers of the step of `planner` with a floor below `floor_bytes`, the lowest floor first."""
        form, lowest = planner.lowest_form()
        with display.shown() as line:
            line.stage("looking for what would fit")
            changes = list(self._changes(form, lowest))
            found: list[Lever] = []
            for done, change in enumerate(changes):
                line.count(done, len(changes) + 1)
                found += self._tried((change,), planner.step)
            for together in _combinations(changes, found, floor_bytes=floor_bytes):
                found += self._tried(together, planner.step)
            found.append(_half_the_batch(form, lowest))
        return lowering(found, floor_bytes=floor_bytes)

    def _changes(self, step: Step, lowest: Timeline) -> Iterator[_Change]:
        settings, optimizers = self._again.settings, self._again.optimizers
        several = settings.accumulate or settings.calls > 1
        if optimizers and self._one_process and not (settings.step_in_backward or several):
            yield _Change(
                keyword="step_in_backward=True",
                option="--step-in-backward",
                settings=(("step_in_backward", True),),
                caution=NO_CLIPPING,
            )
        if settings.holds_outputs:
            yield _Change(
                keyword="holds_outputs=False",
                option="",
                settings=(("holds_outputs", False),),
                caution="holds_outputs=False: where the loop frees the model's outputs before backward",
            )
        stores = self._stores and settings.calls == 1
        if stores and not settings.offload:
            store = "disk:FOLDER" if step.device == "cpu" else "host"
            yield _Change(
                keyword=f'offload="{store}"',
                option=f"--offload {store}",
                settings=(("offload_what", ("activations",)),),
            )
        if (
            stores
            and optimizers
            and not settings.accumulate
            and "state" not in settings.offload_what
            and lowest.bytes_by_kind[Kind.OPTIMIZER_STATE].any()
        ):
            store = "disk:FOLDER" if step.device == "cpu" else "host"
            what = tuple(
                word for word in OFFLOADABLE if word in {*settings.offload_what, "activations", "state"}
            )
            yield _Change(
                keyword=f'offload="{store}", offload_what="{",".join(what)}"',
                option=f"--offload {store} --offload-what {','.join(what)}",
                settings=(("offload_what", what),),
            )
        if step.nodes[lowest.peak_rank].region is Region.OPTIMIZER:
            yield from self._optimizer_changes()

    def _optimizer_changes(self) -> Iterator[_Change]:
        """Other implementations of the same optimizers, with fewer temporaries in their step."""
        groups = [group for each in self._again.optimizers for group in each.param_groups]
        name = {type(each).__name__.lower() for each in self._again.optimizers}
        words = name.pop() if len(name) == 1 else ""
        for keyword, variant, values in (
            ("fused=True", "fused", (("fused", True), ("foreach", False))),
            ("foreach=False", "single", (("foreach", False), ("fused", False))),
        ):
            if all(key in group for group in groups for key, _ in values):
                option = f"--optimizer {words}:{variant}" if words in ("adam", "adamw", "sgd") else ""
                yield _Change(keyword=f"{keyword} in the optimizer", option=option, optimizer=values)

    def _tried(self, changes: tuple[_Change, ...], step: Step) -> list[Lever]:
        """The lever of these changes; none where the step, or its optimizer, does not allow them."""
        settings = self._again.settings
        values: dict[str, Any] = {}
        for change in changes:
            settings = replace(settings, **dict(change.settings))
            values |= dict(change.optimizer)
        try:
            optimizers = [_with_options(each, values) for each in self._again.optimizers] if values else None
            with without_warnings():  # the capture itself has given them
                captured = self._again(settings, optimizers=optimizers)
        except (LowtideError, RuntimeError) as error:  # torch refuses `fused` for some parameters
            logger.debug("no lever: %s: %s", ", ".join(change.keyword for change in changes), error)
            return []
        if captured is None:
            return []
        other = self._cost(captured)
        if settings.offload:
            other = with_priced_fetches(replace(other, transfer_speed=step.transfer_speed or UNKNOWN_STORE))
        planner = planner_for(step_of_calls(other, other.calls))
        floor_bytes = planner.floor_bytes
        if other.graphs:  # a plan may be eager itself
            floor_bytes = min(floor_bytes, planner.eager_peak_bytes)
        return [
            Lever(
                keywords=tuple(change.keyword for change in changes),
                options=tuple(change.option for change in changes),
                floor_bytes=floor_bytes,
                is_estimate=settings.offload,
                caution=changes[0].caution if len(changes) == 1 else "",
            )
        ]


def _combinations(
    changes: list[_Change], found: list[Lever], *, floor_bytes: int
) -> list[tuple[_Change, ...]]:
    """All changes that apply, and those that lower the floor alone; of the optimizer's, only the best."""
    floors = {lever.keywords[0]: lever.floor_bytes for lever in found}
    applied = [change for change in changes if change.keyword in floors]
    stores = [change for change in applied if any(name == "offload_what" for name, _ in change.settings)]
    # what offloads more is in place of what offloads less
    of_loop = [change for change in applied if not change.optimizer and change not in stores[:-1]]
    of_optimizer = [change for change in applied if change.optimizer]
    of_optimizer.sort(key=lambda change: floors[change.keyword])
    every = (*of_loop, *of_optimizer[:1])
    lower = tuple(change for change in every if floors[change.keyword] < floor_bytes)
    return [some for some in dict.fromkeys((lower, every)) if len(some) > 1]


def _with_options(optimizer: torch.optim.Optimizer, values: dict[str, bool]) -> torch.optim.Optimizer:
    """The same optimizer with other options; the user's own is not changed."""
    other = copy(optimizer)
    other.param_groups = [{**group, **values} for group in optimizer.param_groups]
    return other


HALF = "half the batch"


def _half_the_batch(step: Step, lowest: Timeline) -> Lever:
    """The schedule with the lowest peak, where all but lasting kinds takes half the bytes until the
    optimizer's step."""
    lasting = sum(lowest.bytes_by_kind[kind] for kind in LASTING if kind in lowest.bytes_by_kind)
    scales = np.array([step.nodes[run.rank].region is not Region.OPTIMIZER for run in lowest.runs])
    halved = (lowest.live_bytes - lasting) // 2
    floor_bytes = int((lowest.live_bytes - np.where(scales, halved, 0)).max())
    return Lever(keywords=(HALF,), options=(HALF,), floor_bytes=floor_bytes, is_estimate=True)
