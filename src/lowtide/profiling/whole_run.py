"""The whole graph, run for real: time and memory of every node.

Follows the profiler of the μ-TWO paper: one warm-up, then the median of three measured runs.
Needs the memory of the step; `profile_calls` does not.

The second way to profile: run the captured graphs whole, for real, and time every node in place.
"""

import logging
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from lowtide.analyze.captured_step import Captured
from lowtide.facts import Run, Step
from lowtide.planning.simulate import eager_runs, walked
from lowtide.profiling.costing import MEMORY_LIMIT_BYTES, Known, measure_costs
from lowtide.profiling.devices import OpTiming, device_for, rest_after, typical_seconds
from lowtide.torch_compat.dispatch import iter_tensors, storage_key
from lowtide.trace.compile_settings import one_at_a_time
from lowtide.trace.segments import Segment
from lowtide.units import format_size


@dataclass(frozen=True, slots=True)
class NodeRun:
    """One node as it ran.

    `made_bytes`: storages that it brought into being; an alias makes none. `live_bytes`: held when
    it has run and what it read last is freed. `peak_bytes`: the most held while it ran, with what
    the op holds inside, `workspace_bytes`, if that was asked for. The graph's inputs count from
    beginning to end.
    """

    seconds: float
    made_bytes: int
    live_bytes: int
    peak_bytes: int
    workspace_bytes: int = 0


class GraphProfiler(fx.Interpreter):
    """Runs a graph and measures each of its nodes; values are freed after their last use.

    A graph that writes to its inputs does so here as well: hand over copies where that matters.
    """

    def __init__(self, module: fx.GraphModule, *, device: torch.device | None = None) -> None:
        super().__init__(module, garbage_collect_values=True)
        self.device = device_for(device or torch.device("cpu"))
        self._timings: dict[str, list[OpTiming]] = {}
        self._memory: _Ledger | None = None
        self._inside: Counter[str] | None = None
        self._unread: list[fx.Node] = []

    def profile(
        self, *inputs: Any, runs: int = 3, warmup: int = 1, workspace: bool = False
    ) -> dict[str, NodeRun]:
        """Measurements by node name: bytes from the first warm-up, times from `runs` more.

        With `workspace`, another run measures the bytes inside each op, and the peaks include them.
        The global random state is left as it was.
        """
        if runs < 1 or warmup < 1:
            raise ValueError(f"needs at least one warm-up and one run, not {warmup} and {runs}")
        inside = Counter[str]()
        with torch.no_grad():
            self._memory = ledger = _Ledger(inputs)
            self._once(inputs)
            self._memory = None
            for _ in range(warmup - 1):
                self._once(inputs)
            if workspace:
                self._inside = inside
                self._once(inputs)
                self._inside = None
            self._timings.clear()
            for _ in range(runs):
                self._once(inputs)
        rows: dict[str, NodeRun] = {}
        for name, (before, made, live) in ledger.rows.items():
            inner = max(0, inside[name] - made)
            rows[name] = NodeRun(
                typical_seconds(self._timings[name]), made, live, before + made + inner, workspace_bytes=inner
            )
        return rows

    def run_node(self, n: fx.Node) -> Any:
        # The interpreter drops a value at its last read, so one that nobody reads is left to us.
        for node in self._unread:
            self.env.pop(node, None)
        self._unread = [] if n.users else [n]
        if n.op == "output":
            return super().run_node(n)
        args, kwargs = self.fetch_args_kwargs_from_env(n)
        run = getattr(self, n.op)
        if self._inside is not None:
            result, self._inside[n.name] = self.device.measured(lambda: run(n.target, args, kwargs))
            return result
        result, timing = self.device.timed_in_own_memory(lambda: run(n.target, args, kwargs))
        self._timings.setdefault(n.name, []).append(timing)
        rest_after(timing)
        if self._memory is not None:
            freed = [self.env[node] for node in self.user_to_last_uses.get(n, [])]
            self._memory.enter(n.name, result, freed if n.users else [*freed, result])
        return result

    def _once(self, inputs: tuple[Any, ...]) -> None:
        self._unread = []
        with self.device.kept_rng():
            self.run(*inputs)


class _Ledger:
    """Which storages are held, by how many values, while a graph runs."""

    def __init__(self, inputs: Iterable[Any]) -> None:
        self.rows: dict[str, tuple[int, int, int]] = {}
        self._holders = Counter[int]()
        self._nbytes: dict[int, int] = {}
        self.live = 0
        # The caller holds the inputs all the time.
        self._hold(tuple(inputs))

    def enter(self, name: str, result: Any, freed: list[Any]) -> None:
        """Note what was held before node `name`, what it made, and what is held after."""
        before = self.live
        self._hold(result)
        made = self.live - before
        for value in freed:
            self._release(value)
        self.rows[name] = (before, made, self.live)

    def _hold(self, value: Any) -> None:
        for key, nbytes in _storages(value).items():
            self._holders[key] += 1
            if self._holders[key] == 1:
                self._nbytes[key] = nbytes
                self.live += nbytes

    def _release(self, value: Any) -> None:
        for key in _storages(value):
            self._holders[key] -= 1
            if not self._holders[key]:
                self.live -= self._nbytes.pop(key)


def _storages(value: Any) -> dict[int, int]:
    """Bytes of each storage that the value refers to."""
    return {storage_key(tensor): tensor.untyped_storage().nbytes() for tensor in iter_tensors(value)}


logger = logging.getLogger("lowtide")


@one_at_a_time
def run_costs(
    captured: Captured,
    tensors: Iterable[torch.Tensor],
    *,
    memory_limit_bytes: int = MEMORY_LIMIT_BYTES,
    use_cache: bool = True,
    progress: Callable[[int, int], None] | None = None,
) -> tuple[Step, Known]:
    """Times and inner memory of forward and backward from real runs of their graphs.

    `tensors` are the real inputs; any other input is made up. What no graph shows (the optimizer, and
    methods that run another op) is measured op by op, as `measure_costs` does, which takes the other
    arguments. Needs the memory of the step.
    """
    peak = walked(captured.step, eager_runs(captured.step)).peak_bytes
    logger.warning("running the whole step for real, which takes about %s", format_size(peak))
    step, known = measure_costs(
        captured, memory_limit_bytes=memory_limit_bytes, use_cache=use_cache, progress=progress
    )
    by_identity = {id(tensor): tensor for tensor in tensors}
    runs = [_run(segment, by_identity) for segment in captured.segments]
    nodes = list(step.nodes)
    for rank, place in captured.graph_nodes.items():
        seen = runs[place.execution].get(place.node.name)
        if seen is not None:
            remats = [
                remat if Run(rank, remat.rule) in captured.calls else replace(remat, seconds=seen.seconds)
                for remat in nodes[rank].remats
            ]
            nodes[rank] = replace(
                nodes[rank],
                seconds=seen.seconds,
                # less than none, where the plan's graphs write over what these do not
                workspace_bytes=seen.workspace_bytes + captured.step.nodes[rank].workspace_bytes,
                remats=tuple(remats),
                estimated=False,
            )
    return replace(step, nodes=tuple(nodes)), known


def _run(segment: Segment, tensors: Mapping[int, torch.Tensor]) -> dict[str, NodeRun]:
    tangents = segment.tangents
    placeholders = segment.joint.graph.find_nodes(op="placeholder")
    primals = [node for node in placeholders if node not in tangents]
    identities = [origin.tensor for origin in segment.origins]
    given = dict(zip(primals, identities, strict=False))
    inputs = [_input(node, tensors.get(given.get(node, 0))) for node in placeholders]
    return GraphProfiler(segment.joint, device=inputs[0].device).profile(*inputs, workspace=True)


def _input(node: fx.Node, real: torch.Tensor | None) -> torch.Tensor:
    """A copy of the real tensor, since graphs may write to their inputs; else numbers of its layout."""
    if real is not None:
        return real.detach().clone()
    like = node.meta["val"]
    made = torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device=like.device)
    return made.normal_() if made.is_floating_point() else made.zero_()
