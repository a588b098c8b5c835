"""Profile by running the captured graphs whole, and measure every node in place.

This follows the profiler of the μ-TWO paper: one warm-up, then the median of three measured runs. Needs the
memory of the step; `measure_costs` does not.
"""

import logging
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from lowtide.analyze.captured_step import Captured, own_workspace_bytes
from lowtide.errors import LowtideError
from lowtide.facts import Run, Step
from lowtide.planning.simulate import eager_runs, simulate_unchecked
from lowtide.profiling.costing import MEMORY_LIMIT_BYTES, KnownCosts, measure_costs
from lowtide.profiling.devices import OpTiming, device_for, outside_profiler, rest_after, typical_seconds
from lowtide.torch_compat.dispatch import iter_tensors, storage_key
from lowtide.trace.compile_settings import one_at_a_time
from lowtide.trace.segments import Segment
from lowtide.units import format_size

logger = logging.getLogger("lowtide")


@dataclass(frozen=True, slots=True)
class NodeRun:
    """One node as it ran.

    `made_bytes`: its fresh storages; an alias makes none. `live_bytes`: live after its run, when inputs that
    it read last are freed. `peak_bytes`: the most live during its run, with its `workspace_bytes` if those
    were asked for. The graph's inputs are live from beginning to end.
    """

    seconds: float
    made_bytes: int
    live_bytes: int
    peak_bytes: int
    workspace_bytes: int = 0


class GraphProfiler(fx.Interpreter):
    """Runs a graph and measures each of its nodes; values are freed after their last use.

    A graph may write to its inputs: pass copies where that matters.
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

        With `workspace`, another run measures the workspace of each op, and the peaks include it.
        The global random state does not change.
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
        # The interpreter drops a value at its last read, and so never a value without readers.
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
    """Which storages are live, and how many values refer to each, while a graph runs."""

    def __init__(self, inputs: Iterable[Any]) -> None:
        self.rows: dict[str, tuple[int, int, int]] = {}
        self._num_refs = Counter[int]()
        self._nbytes: dict[int, int] = {}
        self.live = 0
        # The caller keeps the inputs live all the time.
        self._add(tuple(inputs))

    def enter(self, name: str, result: Any, freed: list[Any]) -> None:
        """Record the live bytes before node `name`, the bytes that it made, and the live bytes after."""
        before = self.live
        self._add(result)
        made = self.live - before
        for value in freed:
            self._release(value)
        self.rows[name] = (before, made, self.live)

    def _add(self, value: Any) -> None:
        for key, nbytes in _storages(value).items():
            self._num_refs[key] += 1
            if self._num_refs[key] == 1:
                self._nbytes[key] = nbytes
                self.live += nbytes

    def _release(self, value: Any) -> None:
        for key in _storages(value):
            self._num_refs[key] -= 1
            if not self._num_refs[key]:
                self.live -= self._nbytes.pop(key)


def _storages(value: Any) -> dict[int, int]:
    """Bytes of each storage that the value refers to."""
    return {storage_key(tensor): tensor.untyped_storage().nbytes() for tensor in iter_tensors(value)}


@one_at_a_time
def run_costs(
    captured: Captured,
    tensors: Iterable[torch.Tensor],
    *,
    memory_limit_bytes: int = MEMORY_LIMIT_BYTES,
    use_cache: bool = True,
    progress: Callable[[int, int], None] | None = None,
) -> tuple[Step, KnownCosts]:
    """Times and workspaces of forward and backward from real runs of their graphs.

    `tensors` are the real inputs; other inputs are random. Runs that are in no graph (the optimizer, and
    remat rules that run another op) are measured op by op by `measure_costs`, which takes the other
    arguments. Needs the memory of the step.
    """
    peak = simulate_unchecked(captured.step, eager_runs(captured.step)).peak_bytes
    logger.warning("running the whole step for real, which takes about %s", format_size(peak))
    step, known = measure_costs(
        captured, memory_limit_bytes=memory_limit_bytes, use_cache=use_cache, progress=progress
    )
    by_identity = {id(tensor): tensor for tensor in tensors}
    device = torch.device(captured.step.device)
    try:
        runs = [_run(segment, by_identity, device) for segment in captured.segments]
    except torch.OutOfMemoryError as error:
        raise LowtideError(
            f"mode 'run' runs the whole step, and {captured.step.device} has too little memory free for it: "
            "profile with mode 'ops', which runs one op at a time"
        ) from error
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
                # negative where the plan's graphs overwrite an input that these keep
                workspace_bytes=seen.workspace_bytes + captured.step.nodes[rank].workspace_bytes,
                extra_eager_bytes=captured.step.nodes[rank].extra_eager_bytes
                - own_workspace_bytes(nodes[rank].op, seen.workspace_bytes),
                remats=tuple(remats),
                estimated=False,
            )
    return replace(step, nodes=tuple(nodes)), known


def _run(segment: Segment, tensors: Mapping[int, torch.Tensor], device: torch.device) -> dict[str, NodeRun]:
    tangents = segment.tangents
    placeholders = segment.joint.graph.find_nodes(op="placeholder")
    primals = [node for node in placeholders if node not in tangents]
    identities = [origin.tensor for origin in segment.origins]
    given = dict(zip(primals, identities, strict=False))
    inputs = [_input(node, tensors.get(given.get(node, 0))) for node in placeholders]
    profiler = GraphProfiler(segment.joint, device=device)
    return outside_profiler(lambda: profiler.profile(*inputs, workspace=True))


def _input(node: fx.Node, real: torch.Tensor | None) -> torch.Tensor:
    """A copy of the real tensor, since graphs may write to their inputs; else random numbers, or zeros."""
    if real is not None:
        return real.detach().clone()
    like = node.meta["val"]
    made = torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device=like.device)
    generator = torch.Generator(like.device).manual_seed(0)
    return made.normal_(generator=generator) if made.is_floating_point() else made.zero_()
