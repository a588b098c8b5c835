"""Several calls of a model before one backward pass: which are pending, and how a graph fits beside them.

    output = model(a)            the call is pending: what it saved stays live
    other = model(b)             position 1, beside the bytes of the first call
    loss(output, other).backward()

A stage of a pipeline runs the backward pass of its first call while later calls are pending, and then calls
the model again. So each call is pending until a graph of its own runs its backward pass.

`PendingCalls` counts and measures in the loop. `CallsPlanner` plans graphs for as many calls as a step was
seen to have.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from torch import Tensor

from lowtide.errors import BudgetTooSmall
from lowtide.facts import Graph, GraphRun, Kind, Step, Storage
from lowtide.planning.graph_fetches import transfers_of
from lowtide.planning.planner import StepSchedules
from lowtide.planning.repeated_calls import step_of_calls
from lowtide.planning.repeated_graphs import planner_for
from lowtide.planning.schedules import runs_of_schedules
from lowtide.planning.simulate import simulate
from lowtide.torch_compat.autograd_engine import leads_to
from lowtide.torch_compat.dispatch import WeakStorages

UNCOUNTED_BYTES = 4096
"""Single numbers, and blocks of a few bytes, which no plan counts."""
OTHER_CALLS = "earlier calls of the step"


class PendingCall(NamedTuple):
    """A call, until its `node` of autograd dies: its `number`, up to `nbytes`, and the storages that were
    seen."""

    node: Callable[[], Any]
    nbytes: int
    seen: WeakStorages
    number: int = 0

    def leads_to(self, node: Any) -> bool:
        """Whether its backward pass runs `node`."""
        own = self.node()
        return own is not None and leads_to(own, node)


class PendingCalls:
    """The calls whose backward pass can still come. Refers to their tensors weakly.

    Backward passes come in the order of the calls, or one of them is that of all calls. So a call is no
    longer waited for once a later one has had its own.

    `most`: the largest number of calls that were pending or running at once. `between_bytes`: the most that
    the loop was seen to make, and to keep live, between two calls.
    """

    def __init__(self) -> None:
        self.most = 1
        self.between_bytes = 0
        self.position = 0
        """of the present call: how many earlier ones are pending"""
        self.live_bytes = 0
        """of the earlier calls, when the present one began"""
        self.expected_bytes = 0
        """as much as the earlier calls can keep live by their graphs and tensors"""
        self._calls: list[PendingCall] = []
        self._num_calls = self._last_begun = 0
        self._begun: PendingCall | None = None
        """the last call whose backward pass has begun"""
        self._seen = WeakStorages(())

    def call_begins(self, *, besides: Iterable[Tensor]) -> None:
        """A call begins; the tensors `besides` are no call's own: the model's, and those of this batch."""
        self._calls = self._waiting()
        self._seen = WeakStorages(())
        self.position = len(self._calls)
        self.most = max(self.most, self.position + 1)
        between_bytes = self.position * self.between_bytes
        self.expected_bytes = sum(call.nbytes for call in self._calls) + between_bytes
        seen = WeakStorages(())
        for call in self._calls:
            seen.add(call.seen)
        self.live_bytes = seen.live_bytes(besides=besides) + between_bytes

    def sees(self, tensors: Iterable[Any]) -> None:
        """Tensors of the present call that may stay live: saved, returned, or of its batch."""
        self._seen.add(WeakStorages(tensor for tensor in tensors if isinstance(tensor, Tensor)))

    def call_ends(self, node: Callable[[], Any], nbytes: int) -> None:
        """The call is pending as long as `node`, its node of autograd, lives; it keeps up to `nbytes`."""
        self._num_calls += 1
        self._calls.append(PendingCall(node, nbytes, self._seen, self._num_calls))

    def backward_begins(self, running: Any) -> None:
        """A graph's backward pass begins, by the node `running`. Where no call is known to run this node, no
        call is pending any more."""
        if not self._calls:
            return
        found = next((call for call in self._calls if call.node() is running), None)
        if found is None and self._begun is not None and self._begun.leads_to(running):
            return  # an earlier graph of the same call
        found = found or next((call for call in self._calls if call.leads_to(running)), None)
        self._begun = found
        self._last_begun = self._num_calls if found is None else max(self._last_begun, found.number)
        self._calls = [] if found is None else [call for call in self._calls if call is not found]

    @property
    def are_waiting(self) -> bool:
        """Whether the backward pass of a call can still come."""
        return bool(self._waiting())

    def _waiting(self) -> list[PendingCall]:
        return [call for call in self._calls if call.number > self._last_begun and call.node() is not None]


class CallsPlanner:
    """Plans graphs for steps of `number` calls within `budget_bytes`.

    `limits`: by fingerprint, the bytes of other calls beside which a planned graph fits; without graphs that
    run by the lowest plan, which does not fit.
    """

    def __init__(self, budget_bytes: int) -> None:
        self.budget_bytes = budget_bytes
        self.number = 1
        self.position = 0
        self.live_bytes = 0
        self.between_bytes = 0
        self.limits: dict[str, int] = {}
        self._beside: dict[str, tuple[int, int]] = {}
        """by fingerprint, the bytes beside which a graph did not fit, and the position of its call then"""

    def expect(self, number: int, between_bytes: int) -> None:
        """Plan for `number` calls from now on, between which the loop makes bytes that stay live."""
        if number > self.number:
            self._beside.clear()  # those bytes were of graphs that are planned again
        self.number, self.between_bytes = number, between_bytes
        self.limits.clear()

    def begin(self, position: int, live_bytes: int) -> None:
        """A call begins, after as many others of its step, which keep `live_bytes` live."""
        self.position, self.live_bytes = position, live_bytes

    def excess_bytes(self, fingerprints: Iterable[str]) -> int:
        """By how many bytes the graphs of the present call do not fit beside the earlier ones. Such graphs
        are planned for more from then on."""
        most = 0
        for fingerprint in fingerprints:
            limit = self.limits.get(fingerprint)
            if limit is not None and self.live_bytes > limit + UNCOUNTED_BYTES:
                most = max(most, self.live_bytes - limit)
                known = self._beside.get(fingerprint, (0, 0))
                self._beside[fingerprint] = max(known, (self.live_bytes, self.position))
        return most

    def plan(self, step: Step, like: Sequence[Graph], *, planner: str) -> StepSchedules:
        """Schedules for the graphs of one call, `step`: for as many equal calls as a step has, and where this
        one does not fit beside the earlier calls then, beside their bytes. The lowest where none fits."""
        found = self._solve(step, like, number=self.number, planner=planner)
        known = (self._beside.get(graph.fingerprint, (0, 0)) for graph in step.graphs)
        beside_bytes, position = max([(self.live_bytes, self.position), *known])
        limit = self._limit(step, found.graphs)
        if beside_bytes > limit:
            beside = _with_static(step, beside_bytes)
            found = self._solve(beside, like, number=max(1, self.number - position), planner=planner)
            limit = self._limit(step, found.graphs)
        for graph in step.graphs:
            self.limits.pop(graph.fingerprint, None)
            if found.peak_bytes <= self.budget_bytes:
                self.limits[graph.fingerprint] = limit
        return found

    def _limit(self, step: Step, graphs: Sequence[Graph]) -> int:
        runs = runs_of_schedules(step, _schedules(graphs), *transfers_of(graphs))
        return self.budget_bytes - simulate(step, runs).peak_bytes

    def _solve(self, step: Step, like: Sequence[Graph], *, number: int, planner: str) -> StepSchedules:
        whole = planner_for(step_of_calls(step, number, between_bytes=self.between_bytes))
        per_call = len(step.graphs)
        if like:
            blank: list[tuple[GraphRun, ...]] = [()] * (per_call - len(like))
            schedules = (_schedules(like) + blank) * number
            adapted = whole.adapt(schedules, budget_bytes=self.budget_bytes)
            if adapted is not None and adapted.peak_bytes <= self.budget_bytes:
                return StepSchedules(adapted.peak_bytes, adapted.graphs[:per_call])
        try:
            solved = whole.solve(budget_bytes=self.budget_bytes, planner=planner)
        except BudgetTooSmall as error:
            solved = whole.solve(budget_bytes=error.floor_bytes)
        return StepSchedules(solved.peak_bytes, solved.graphs[:per_call])


def _schedules(graphs: Sequence[Graph]) -> list[tuple[GraphRun, ...]]:
    return [graph.schedule for graph in graphs]


def _with_static(step: Step, nbytes: int) -> Step:
    other = Storage(id=len(step.storages), nbytes=nbytes, kind=Kind.OTHER, name=OTHER_CALLS, static=True)
    return replace(step, storages=(*step.storages, other))
