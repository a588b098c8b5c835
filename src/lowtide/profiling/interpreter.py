"""The whole graph, run for real: time and memory of every node.

Follows the profiler of the μ-TWO paper: one warm-up, then the median of three measured runs.
Needs the memory of the step; `profile_calls` does not.
"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from lowtide.profiling.device import OpTiming, device_for, rest_after, typical_seconds
from lowtide.torchside.calls import iter_tensors, storage_key


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
