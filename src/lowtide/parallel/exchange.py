"""What a process allocates to exchange parameters and gradients with others, step by step, as FSDP2 does.

    forward    all-gather a ─ copy out a ─ graph of a ─ reshard a ─ all-gather b ─ copy out b ─ graph of b ─ …
    backward   all-gather b ─ copy out b ─ all-gather a ─ graph of b ─ reshard b ─ reduce-scatter of b ─ …

In forward, the gathered buffer of a unit is live until the next unit has its own. In backward, a buffer is
copied out and freed, and the unit before is gathered ahead. Unsharded gradients are live until they are
copied into the buffer of their reduction, and this buffer until a later reduction.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

from lowtide.facts import Kind
from lowtide.facts.sharding import Passage, Sharding


@dataclass(slots=True, kw_only=True)
class ExchangeStep:
    """One operation of an exchange.

    An operation `makes` storages (by name, with bytes and kind), `frees` storages and the unsharded
    `gradients` of these parameters, and then needs `workspace_bytes`. Storages that stay live to the end of
    the training step are `kept`.
    """

    name: str
    makes: dict[str, tuple[int, Kind]] = field(default_factory=dict)
    frees: list[str] = field(default_factory=list)
    gradients: list[str] = field(default_factory=list)
    workspace_bytes: int = 0
    kept: bool = False


ByGraph = dict[int, list[ExchangeStep]]


@dataclass(slots=True, kw_only=True)
class Exchange:
    """Steps before the forward pass of each graph, before and after its backward pass, and at the end."""

    forward: ByGraph = field(default_factory=dict)
    before: ByGraph = field(default_factory=dict)
    after: ByGraph = field(default_factory=dict)
    last: list[ExchangeStep] = field(default_factory=list)


def exchange(
    sharding: Sharding,
    passages: Sequence[Passage],
    *,
    trained: Collection[str],
    outside: Collection[str] = (),
) -> Exchange:
    """All exchanges of one training step; `trained` are the parameters that get a gradient.

    Those `outside` get theirs by code that no graph has: counted while they are copied into the buffer.
    """
    builder = _Builder(sharding, trained, outside)
    found = Exchange()
    for passage in passages:
        builder.steps = found.forward.setdefault(passage.executions, [])
        if passage.begins:
            builder.before_forward(passage.unit)
        else:
            builder.after_forward(passage.unit)
    at_the_end: list[int] = []
    for passage in reversed(passages):
        if passage.begins and not passage.differentiable:
            at_the_end.append(passage.unit)
        elif passage.begins:
            builder.steps = found.after.setdefault(passage.executions, [])
            builder.after_backward(passage.unit)
        else:
            builder.steps = found.before.setdefault(passage.executions - 1, [])
            builder.before_backward(passage.unit)
    builder.steps = found.last
    for unit in sorted(set(at_the_end)):
        builder.after_backward(unit)
    builder.close()
    return found


class _Builder:
    """Appends to `steps`; knows which units are in a `gathered` buffer, which are copied out (`unsharded`),
    which keep a part `between` forward and backward, and which buffers of reductions are live."""

    def __init__(self, sharding: Sharding, trained: Collection[str], outside: Collection[str]) -> None:
        self.sharding = sharding
        self.trained = trained
        self.outside = outside
        self.steps: list[ExchangeStep] = []
        self.unsharded: set[int] = set()
        self.gathered: set[int] = set()
        self.between: set[int] = set()
        self.after_forward_order: dict[int, list[int]] = {}
        self.last_buffer: dict[int, str] = {}
        self.reductions: dict[int, list[str]] = {}
        self.num_reductions = 0

    def before_forward(self, unit: int) -> None:
        root = self.sharding.units[unit].root
        self._gather(unit)
        if unit in self.gathered:
            last = self.last_buffer.pop(root, None)
            self._copy_out(unit, frees=[last] if last is not None else [])
            self.last_buffer[root] = _buffer(unit)
        for other in self.sharding.units[unit].prefetches_forward:
            self._gather(other)

    def after_forward(self, unit: int) -> None:
        facts = self.sharding.units[unit]
        if facts.frees_after_forward:
            self._reshard(unit, between_ranks=facts.between_ranks)
        self.after_forward_order.setdefault(facts.root, []).append(unit)
        if facts.root == unit and unit in self.last_buffer:
            self._add(f"end of {_name(facts.name)}", frees=[self.last_buffer.pop(unit)])

    def before_backward(self, unit: int) -> None:
        self._gather(unit)
        if unit in self.gathered:
            self._copy_out(unit, frees=[_buffer(unit), *self._take_between(unit)])
        ahead = self.sharding.units[unit].prefetches_backward
        if ahead is None:
            order = self.after_forward_order[self.sharding.units[unit].root]
            while order.pop() != unit:
                pass
            ahead = tuple(order[-1:])
        for other in ahead:
            self._gather(other)

    def after_backward(self, unit: int) -> None:
        """Reshard the parameters of a unit and reduce its gradients."""
        facts = self.sharding.units[unit]
        self._reshard(unit)
        buffers = self.reductions.setdefault(facts.root, [])
        while len(buffers) >= self.sharding.kept_reductions:
            self._add("end of a reduction", frees=[buffers.pop(0)])
        parts = [part for part in facts.parts if part.name in self.trained]
        if not parts:
            return
        self.num_reductions += 1
        name = _name(facts.name)
        of_unit = f"{self.num_reductions} of {name}"
        buffer, result = f"reduction {of_unit}", f"sum {of_unit}"
        reduced_bytes = sum(part.reduced_bytes for part in parts)
        kept_bytes = sum(part.gradient_bytes for part in parts)
        self._add(
            f"copy in gradients of {name}",
            makes={buffer: (reduced_bytes, Kind.OTHER)},
            gradients=[part.name for part in parts],
            workspace_bytes=sum(part.whole_bytes for part in parts if part.name in self.outside),
        )
        sum_bytes = reduced_bytes // facts.ranks
        self._add(
            f"reduce-scatter gradients of {name}",
            makes={result: (sum_bytes, Kind.GRADIENT)},
            workspace_bytes=reduced_bytes * self.sharding.reduce_copies if facts.ranks > 1 else 0,
            kept=sum_bytes == kept_bytes,
        )
        if sum_bytes != kept_bytes:
            makes = {f"gradients {of_unit}": (kept_bytes, Kind.GRADIENT)}
            self._add(f"cast gradients of {name}", makes=makes, frees=[result], kept=True)
        buffers.append(buffer)

    def close(self) -> None:
        left = [_unsharded(unit) for unit in sorted(self.unsharded)]
        left += [_buffer(unit) for unit in sorted(self.gathered)]
        left += [_between(unit) for unit in sorted(self.between)]
        left += [buffer for buffers in self.reductions.values() for buffer in buffers]
        if left:
            self._add("end of the exchange", frees=left)

    def _gather(self, unit: int) -> None:
        if unit in self.unsharded or unit in self.gathered:
            return
        facts = self.sharding.units[unit]
        self.gathered.add(unit)
        nbytes = facts.whole_bytes if facts.ranks > 1 else 0  # one process copies from its own shards
        self._add(
            f"all-gather {_name(facts.name)}",
            makes={_buffer(unit): (nbytes, Kind.PARAMETER)},
            workspace_bytes=facts.cast_bytes + nbytes * self.sharding.gather_copies,
        )

    def _copy_out(self, unit: int, *, frees: list[str]) -> None:
        facts = self.sharding.units[unit]
        self.gathered.remove(unit)
        self.unsharded.add(unit)
        makes = {_unsharded(unit): (facts.whole_bytes, Kind.PARAMETER)}
        self._add(f"copy out {_name(facts.name)}", makes=makes, frees=frees)

    def _reshard(self, unit: int, *, between_ranks: int = 0) -> None:
        if unit not in self.unsharded:
            return
        facts = self.sharding.units[unit]
        self.unsharded.remove(unit)
        makes = {}
        if between_ranks:
            self.between.add(unit)
            makes = {_between(unit): (facts.whole_bytes // between_ranks, Kind.PARAMETER)}
        self._add(f"reshard {_name(facts.name)}", makes=makes, frees=[_unsharded(unit)])

    def _take_between(self, unit: int) -> list[str]:
        """The part that a unit kept between forward and backward, which is freed now."""
        if unit not in self.between:
            return []
        self.between.remove(unit)
        return [_between(unit)]

    def _add(self, name: str, **fields: Any) -> None:
        self.steps.append(ExchangeStep(name=name, **fields))


def _name(unit: str) -> str:
    return unit or "the model"


def _unsharded(unit: int) -> str:
    return f"parameters of unit {unit}"


def _between(unit: int) -> str:
    return f"part of unit {unit} between forward and backward"


def _buffer(unit: int) -> str:
    return f"gathered parameters of unit {unit}"
