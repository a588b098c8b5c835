"""What a runner asks for the schedules of its graphs, and the answers without a plan."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lowtide.analyze.gradient_sums import specialised
from lowtide.facts import Graph
from lowtide.runtime.backend import GraphSchedule
from lowtide.runtime.loop_messages import LoopOwner
from lowtide.runtime.loop_tensors import LoopBytes
from lowtide.runtime.loop_watch import LiveLoss
from lowtide.runtime.rewrite import baseline_schedule
from lowtide.torch_compat import ddp
from lowtide.trace.segments import Segment


def _as_captured(segment: Segment, graph: Graph | None) -> GraphSchedule:
    """The schedule without recompute, for the gradients of `graph`."""
    missing = frozenset(graph.missing if graph is not None else ())
    apart = frozenset(graph.apart if graph is not None else ())
    handed_over = frozenset(graph.handed_over if graph is not None else ())
    wanted = specialised(segment, missing=missing, apart=apart)
    return GraphSchedule(baseline_schedule(wanted), missing, apart, handed_over=handed_over)


@dataclass(frozen=True, slots=True, kw_only=True)
class CallSoFar:
    """The state of a call when one of its graphs is compiled.

    `nothing_ran`: the call can start over. `is_whole`: the graph reaches to the end of the traced function.
    `saved_bytes` are live for the backward pass; `batch_bytes` are the bytes of the call's arguments.
    """

    nothing_ran: bool
    is_whole: bool
    num_graphs: int
    saved_bytes: int
    batch_bytes: int


def by_fingerprint(graphs: Iterable[Graph]) -> dict[str, tuple[Graph, ...]]:
    """The graphs of one call; a graph that runs several times once for each run, in order."""
    found: dict[str, tuple[Graph, ...]] = {}
    for graph in graphs:
        found[graph.fingerprint] = (*found.get(graph.fingerprint, ()), graph)
    return found


class Schedules:
    """The schedules of a runner's graphs; in this class: graphs run as captured, without recompute.

    `graphs` say which gradients to expect. `orders`: the strides of gradients that differ from their
    outputs'. `spare_bytes`: the bytes of the budget that all planned graphs leave free; None without a
    budget.
    """

    spare_bytes: int | None = None
    loop_owner: LoopOwner | None = None
    """who has the loop, where that takes no `loss=`"""
    in_pipeline = False
    """whether the model is a stage of a pipeline, whose own tensors the plan counts"""
    earlier_gradient_bytes = 0
    """of earlier passes, which the plan counts"""

    def __init__(self, graphs: Sequence[Graph] = (), orders: Iterable[tuple[str, str]] = ()) -> None:
        self.graphs = by_fingerprint(graphs)
        self.orders = dict(orders)

    def schedules_of(self, segment: Segment, so_far: CallSoFar) -> tuple[GraphSchedule, ...]:
        """The schedules of `segment` by its runs in one call, the last one for further runs. StartOver where
        the whole call must be planned and no op has run yet."""
        known = self.graphs.get(segment.fingerprint, (None,))
        return tuple(_as_captured(segment, graph) for graph in known)

    def plan_call(self, args: tuple[Any, ...], kwargs: dict[str, Any], *, cause: str) -> None:
        """Plan the step that this call of the model begins, without running it."""

    @property
    def counts_loop(self) -> bool:
        """Whether the bytes that the loop makes between forward and backward pass can change schedules."""
        return False

    @property
    def loss_is_unknown(self) -> bool:
        """Whether the bytes of the loop's loss are unknown."""
        return False

    def learn(self, loss: LiveLoss | None, used: Mapping[str, Collection[int]]) -> bool:
        """Whether schedules were dropped, because of the bytes of the loss, or because of outputs with an
        unexpected gradient, by graph."""
        return False

    counts_gradients = False
    """whether `see_gradients` can count"""

    def see_loop(self, found: LoopBytes) -> None:
        """Count tensors of the loop's own, from `fit_beside_loop` on."""

    def see_gradients(self, nbytes: int, *, to_the_end: bool, is_seen: bool) -> None:
        """Count gradients of earlier passes as live when a step begins, to its end or until its backward pass
        begins. `is_seen`: in a step that is over, not expected in the one that begins."""

    def see_path(self, fingerprints: Sequence[str], saved_bytes: Sequence[int]) -> int:
        """A call has run these graphs, which save so many bytes. By how many bytes it is larger than the
        planned one; other graphs are planned beside them, from `fit_beside_loop` on."""
        return 0

    def fit_beside_loop(self) -> bool:
        """Whether schedules were dropped or changed, since what was seen of the loop did not fit beside."""
        return False

    def count_state(self) -> bool:
        """Whether schedules were dropped, because the optimizer has more state than the plan counts."""
        return False

    @property
    def last_output_bytes(self) -> int:
        """Of earlier outputs, which the plan counts as live through the forward pass."""
        return 0

    def count_outputs(self, nbytes: int) -> bool:
        """Whether schedules were dropped, because the loop keeps `nbytes` of earlier outputs live."""
        return False

    @property
    def pays_for_outputs(self) -> bool:
        """Whether the plan could cost less time, or have a lower peak, if the loop kept no outputs."""
        return False

    num_calls: int | None = None
    """the calls of a step that are planned together; None where calls are not planned together"""

    def expect_calls(self, number: int, between_bytes: int) -> bool:
        """Whether schedules were dropped, because a step has more calls of the model before its backward
        pass, or others, than were planned together. The loop keeps `between_bytes` live after each call."""
        return False

    def begin_call(self, position: int, live_bytes: int) -> None:
        """A call begins, after `position` others of its step, which keep `live_bytes` live."""

    def excess_bytes(self, fingerprints: Iterable[str]) -> int:
        """By how many bytes these graphs of the present call do not fit beside the earlier calls."""
        return 0

    def count_buckets(self, buckets: ddp.Buckets) -> bool:
        """Whether schedules were dropped, because the plan does not count the buckets of gradients."""
        return False
