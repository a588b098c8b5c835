"""What rests on a store between its uses: forms of a step, and the cheapest plan over all of them.

A form is the step in which a set of storages rests (`resting_forms`). The sets are nested, each with the ones
before, from nothing to all that may rest. Every form is planned like any other step. A budget takes the
cheapest plan of all forms, transfers that nothing hides included. So what fits without resting never waits
for it, and a larger budget is never slower.

State is idle in the forward and the backward pass. Forms that differ in their resting state alone differ
there by a constant: one search serves all of them, each at a budget that is smaller by its state in memory.

    budget   [ state in memory ][ a schedule of the form in which all state rests ............. ]
"""

from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from functools import cached_property

from lowtide.errors import BudgetTooSmall
from lowtide.facts import FETCH, Offload, Solution, Step
from lowtide.planning.decisions import floor_hint
from lowtide.planning.planner import MAY_BE_EAGER, Floor, Planner
from lowtide.planning.resting_forms import (
    nested_state,
    resting_name,
    state_storages,
    transfer_seconds,
    with_resting_state,
)
from lowtide.planning.resting_weights import restable_weights, with_resting_weights
from lowtide.planning.schedules import optimizer_step
from lowtide.planning.simulate import Timeline, simulate
from lowtide.planning.variants import variants

PARTS_OF_STATE = 4
"""Sets of resting state: none, and these parts of all."""


def resting_form(step: Step, resting: Collection[str]) -> Step:
    """The form of a step in which these rest, by their names in `Solution.resting`."""
    return with_resting_state(with_resting_weights(step, resting), resting)


def fixed_form(step: Step, resting: Collection[str]) -> Step:
    """The form in which these rest, without a choice of what else could."""
    form = resting_form(step, resting)
    if not may_rest(form):
        return form
    storages = tuple(replace(s, rests="") if s.nbytes else s for s in form.storages)
    return replace(form, storages=storages)


def may_rest(step: Step) -> bool:
    """Whether there is a choice of what rests."""
    return step.transfer_speed is not None and any(s.rests and s.nbytes for s in step.storages)


@dataclass(frozen=True, slots=True, eq=False)
class Form:
    """One form: what rests, its planner, and the seconds of the optimizer's transfers, in all and those that
    nothing hides. `weight_bytes`: the parameters that the optimizer reads and writes there."""

    resting: tuple[str, ...]
    planner: Planner
    transfer_seconds: float = 0.0
    stall_seconds: float = 0.0
    weight_bytes: int = 0

    @property
    def step(self) -> Step:
        return self.planner.step

    @property
    def extra_seconds(self) -> float:
        """What the form adds to a step beyond its schedule."""
        speed = self.step.transfer_speed
        slows = 0.0 if speed is None else speed.slows_compute
        return self.stall_seconds + slows * (self.transfer_seconds - self.stall_seconds)


class _ShiftedPlanner(Planner):
    """Plans a form by the search of the form in which all state rests, as far as both have the same bytes."""

    def __init__(self, step: Step, full: Planner) -> None:
        super().__init__(step)
        self._full, self._shift_bytes = full, step.static_bytes - full.step.static_bytes

    def best(self, budget_bytes: int) -> Timeline | None:
        found = self._full.best(budget_bytes - self._shift_bytes)
        if found is None:
            return None
        timeline = simulate(self.step, found.runs)
        return timeline if timeline.peak_bytes <= budget_bytes else None

    def lowest(self) -> Timeline:
        return simulate(self.step, self._full.lowest().runs)

    @property
    def floor_bytes(self) -> int:
        return self.lowest().peak_bytes

    def floor_bound(self) -> int | None:
        bound = self._full.floor_bound()
        return None if bound is None else bound + self._shift_bytes

    def _lower_bound(self, timeline: Timeline, budget_bytes: int) -> float | None:
        return None


class RestingPlanner(Planner):
    """Solutions for one step, of which something may rest on its store; only `auto` lets anything rest."""

    def __init__(self, step: Step) -> None:
        super().__init__(step, variants(step))
        plain = Planner(step)
        plain.problem = self.problem
        self._plain = Form((), plain)

    @cached_property
    def forms(self) -> tuple[Form, ...]:
        """All forms, the first one without anything that rests."""
        return (self._plain, *self._state_forms, *self._weight_forms())

    @cached_property
    def _state_forms(self) -> tuple[Form, ...]:
        sets = nested_state(self.step, parts=PARTS_OF_STATE)
        if not sets:
            return ()
        whole = with_resting_state(self.step, sets[-1])
        full, found = Planner(whole, variants(whole)), []
        for names in sets:
            form = with_resting_state(self.step, names)
            planner = full if names is sets[-1] else _ShiftedPlanner(form, full)
            found.append(Form(names, planner, *transfer_seconds(form)))
        return tuple(found)

    def _weight_forms(self) -> Iterator[Form]:
        """Frozen weights alone, which are only read; then with all state; then all that may rest."""
        weights = restable_weights(self.step)
        frozen = tuple(name for name in weights if name.startswith("frozen:"))
        state = self._state_forms[-1].resting if self._state_forms else ()
        for names in dict.fromkeys((frozen, (*state, *frozen), (*state, *weights))):
            if any(name in weights for name in names):
                step = resting_form(self.step, names)
                trained = sum(weights[n].nbytes for n in names if n.startswith("parameters:") and state)
                yield Form(
                    names,
                    Planner(step, variants(step)),
                    *transfer_seconds(step, weight_bytes=trained),
                    weight_bytes=trained,
                )

    def solve(self, *, budget_bytes: int, planner: str = "auto", may_be_eager: bool = False) -> Solution:
        if planner != "auto":
            return super().solve(budget_bytes=budget_bytes, planner=planner, may_be_eager=may_be_eager)
        found = self._cheapest(budget_bytes)
        if found is not None:
            return self._solution_of(*found, budget_bytes)
        if may_be_eager and planner in MAY_BE_EAGER and self.eager_peak_bytes <= budget_bytes:
            return self.eager_solution(planner, budget_bytes)
        lowest = self.floor()
        floor_bytes = min(lowest.floor_bytes, self.eager_peak_bytes if may_be_eager else lowest.floor_bytes)
        raise BudgetTooSmall(
            budget_bytes=budget_bytes,
            floor_bytes=floor_bytes,
            node=lowest.node,
            hint=lowest.hint.cause,
            remedy=lowest.hint.remedy,
        )

    def _cheapest(self, budget_bytes: int) -> tuple[Form, Timeline] | None:
        """The form and the schedule that add least; of equal ones, where less rests."""
        best: tuple[float, Form, Timeline] | None = None
        for form in sorted(self.forms, key=lambda form: form.extra_seconds):
            if best is not None and form.extra_seconds >= best[0]:
                break
            if _bound(form) > budget_bytes:
                continue
            timeline = form.planner.best(budget_bytes)
            if timeline is None or _peak(form, timeline, budget_bytes) > budget_bytes:
                continue
            seconds = timeline.added_seconds + form.extra_seconds
            if best is None or seconds < best[0]:
                best = seconds, form, timeline
        return None if best is None else best[1:]

    def best(self, budget_bytes: int) -> Timeline | None:
        found = self._cheapest(budget_bytes)
        return None if found is None else found[1]

    def _solution_of(self, form: Form, timeline: Timeline, budget_bytes: int) -> Solution:
        found = form.planner.solution_of("auto", timeline, budget_bytes)
        seconds = found.recompute_seconds + form.extra_seconds
        bound = self._bound_seconds(budget_bytes) if seconds > 0 else 0.0
        return replace(
            found,
            baseline_peak_bytes=self.eager_peak_bytes,
            recompute_seconds=seconds,
            lower_bound_seconds=None if bound is None else max(0.0, min(bound, seconds)),
            floor_bytes=self.floor_bytes,
            floor_bound_bytes=self.floor_bound(),
            resting=form.resting,
            offload=None if found.offload is None else _with_resting(found.offload, form, timeline),
        )

    def lowest_form(self) -> tuple[Step, Timeline]:
        best: tuple[int, Form, Timeline] | None = None
        for form in sorted(self.forms, key=_bound):
            if best is not None and _bound(form) >= best[0]:
                break
            timeline = form.planner.lowest()
            peak_bytes = _peak(form, timeline, 0)
            if best is None or peak_bytes < best[0]:
                best = peak_bytes, form, timeline
        assert best is not None
        return best[1].step, best[2]

    def lowest(self) -> Timeline:
        return self.lowest_form()[1]

    @cached_property
    def _floor(self) -> Floor:
        step, timeline = self.lowest_form()
        return Floor(
            floor_bytes=timeline.peak_bytes, node=timeline.peak_node, hint=floor_hint(step, timeline)
        )

    def floor(self) -> Floor:
        return self._floor

    @property
    def floor_bytes(self) -> int:
        return self._floor.floor_bytes

    def floor_bound(self) -> int | None:
        """No form has a schedule with a lower peak."""
        return min(_bound(form) for form in self.forms)

    def _bound_seconds(self, budget_bytes: int) -> float | None:
        """No schedule within the budget adds less, whatever part of the state rests. None where weights may
        rest: which of them do is a choice that no bound covers.

        With an amount of state in memory that is between those of two sets, a schedule has at most the bytes
        that the smaller amount leaves, and the step waits at least as long as with the larger one.
        """
        if restable_weights(self.step):
            return None
        full = self.forms[-1].planner
        found = [self._plain.planner.search.bound_seconds(budget_bytes)]
        for more, less in zip(reversed(self.forms), reversed(self.forms[:-1]), strict=False):
            kept_bytes = more.step.static_bytes - full.step.static_bytes
            found.append(full.search.bound_seconds(budget_bytes - kept_bytes) + less.extra_seconds)
        return min(found)


def _bound(form: Form) -> int:
    """No schedule of the form has a lower peak; needs no search."""
    return form.planner.floor_bound() or 0


def _peak(form: Form, timeline: Timeline, budget_bytes: int) -> int:
    """The peak of a schedule with the optimizer's step in the chunks that the budget allows."""
    if not form.step.optimizer_chunks:
        return timeline.peak_bytes
    return max(timeline.peak_bytes, optimizer_step(form.step, timeline, budget_bytes).peak_bytes)


def _with_resting(offload: Offload, form: Form, timeline: Timeline) -> Offload:
    """The transfers of a plan, with those of what rests in this form."""
    step, names = form.step, set(form.resting)
    state = [
        s.extra_eager_bytes for s in state_storages(step) if resting_name(s.name) in names and not s.nbytes
    ]
    weights = {
        s.name: s.nbytes for s in step.storages if f"{s.rests}:{s.name}" in names and s.rests != "state"
    }
    traffic = timeline.traffic.transfers if timeline.traffic is not None else ()
    fetched = sum(t.nbytes for t in traffic if not t.is_write and step.nodes[t.node].op == FETCH)
    speed = step.transfer_speed
    slows = 0.0 if speed is None else speed.slows_compute
    both_bytes = sum(state) + form.weight_bytes
    return replace(
        offload,
        store_bytes=offload.store_bytes + sum(map(_pages, (*state, *weights.values()))),
        transfer_seconds=offload.transfer_seconds + form.transfer_seconds,
        stall_seconds=offload.stall_seconds + form.stall_seconds,
        slowed_seconds=offload.slowed_seconds + slows * (form.transfer_seconds - form.stall_seconds),
        resting_bytes=sum(state) + sum(weights.values()),
        read_bytes=both_bytes + fetched,
        written_bytes=both_bytes,
    )


def _pages(nbytes: int) -> int:
    return -(-nbytes // 4096) * 4096
