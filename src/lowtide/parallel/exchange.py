"""What a process holds for exchanging parameters and gradients with others, move by move.

Follows FSDP2 as torch runs it. In the forward pass a unit's gathered buffer lives until the next unit has
its own; in the backward pass it is copied out and freed, and the unit before is gathered ahead. Whole
gradients live until they are copied into the buffer of their reduction, and that until a later reduction.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from lowtide.facts import Kind
from lowtide.facts.sharding import Passage, Sharding


@dataclass(slots=True, kw_only=True)
class ExchangeStep:
    """One moment of an exchange. It `makes` blocks by name, with bytes and kind, `frees` blocks and the
    whole `gradients` of these parameters, and then needs `inside_bytes` for a moment. Blocks that stay to the
    end of the step are `kept`."""

    name: str
    makes: dict[str, tuple[int, Kind]] = field(default_factory=dict)
    frees: list[str] = field(default_factory=list)
    gradients: list[str] = field(default_factory=list)
    inside_bytes: int = 0
    kept: bool = False


Moves = dict[int, list[ExchangeStep]]
"""By the number of a graph."""


@dataclass(slots=True, kw_only=True)
class Exchange:
    """Moves before the forward pass of each graph, and before and after its backward pass.

    `last` come at the end of the backward pass.
    """

    forward: Moves = field(default_factory=dict)
    before: Moves = field(default_factory=dict)
    after: Moves = field(default_factory=dict)
    last: list[ExchangeStep] = field(default_factory=list)


def exchange(sharding: Sharding, passages: Sequence[Passage], *, trained: Collection[str]) -> Exchange:
    """All moves of one step; `trained` are the parameters that get a gradient."""
    ledger = _Ledger(sharding, trained)
    found = Exchange()
    for passage in passages:
        ledger.moves = found.forward.setdefault(passage.executions, [])
        if passage.begins:
            ledger.enter(passage.unit)
        else:
            ledger.leave(passage.unit)
    late: list[int] = []
    for passage in reversed(passages):
        if passage.begins and not passage.differentiable:
            late.append(passage.unit)
        elif passage.begins:
            ledger.moves = found.after.setdefault(passage.executions, [])
            ledger.finish(passage.unit)
        else:
            ledger.moves = found.before.setdefault(passage.executions - 1, [])
            ledger.start_backward(passage.unit)
    ledger.moves = found.last
    for unit in sorted(set(late)):
        ledger.finish(unit)
    ledger.close()
    return found


class _Ledger:
    """What is gathered, waiting and kept at this moment; adds to `moves`."""

    def __init__(self, sharding: Sharding, trained: Collection[str]) -> None:
        self.sharding = sharding
        self.trained = trained
        self.moves: list[ExchangeStep] = []
        self.whole: set[int] = set()
        self.waiting: set[int] = set()
        self.left: dict[int, list[int]] = {}
        self.last_buffer: dict[int, str] = {}
        self.reductions: dict[int, list[str]] = {}
        self.count = 0

    def enter(self, unit: int) -> None:
        root = self.sharding.units[unit].root
        self._gather(unit)
        if unit in self.waiting:
            last = self.last_buffer.pop(root, None)
            self._copy_out(unit, frees=[last] if last is not None else [])
            self.last_buffer[root] = _buffer(unit)
        for other in self.sharding.units[unit].prefetches_forward:
            self._gather(other)

    def leave(self, unit: int) -> None:
        facts = self.sharding.units[unit]
        if facts.frees_after_forward:
            self._give_back(unit)
        self.left.setdefault(facts.root, []).append(unit)
        if facts.root == unit and unit in self.last_buffer:
            self.moves.append(
                ExchangeStep(name=f"end of {_name(facts.name)}", frees=[self.last_buffer.pop(unit)])
            )

    def start_backward(self, unit: int) -> None:
        self._gather(unit)
        if unit in self.waiting:
            self._copy_out(unit, frees=[_buffer(unit)])
        ahead = self.sharding.units[unit].prefetches_backward
        if ahead is None:
            left = self.left[self.sharding.units[unit].root]
            while left.pop() != unit:
                pass
            ahead = tuple(left[-1:])
        for other in ahead:
            self._gather(other)

    def finish(self, unit: int) -> None:
        """The backward pass of a unit is over: its parameters go, its gradients are reduced."""
        facts = self.sharding.units[unit]
        self._give_back(unit)
        kept_buffers = self.reductions.setdefault(facts.root, [])
        while len(kept_buffers) >= self.sharding.kept_reductions:
            self.moves.append(ExchangeStep(name="end of a reduction", frees=[kept_buffers.pop(0)]))
        parts = [part for part in facts.parts if part.name in self.trained]
        if not parts:
            return
        self.count += 1
        name = _name(facts.name)
        buffer, result = f"reduction {self.count} of {name}", f"sum {self.count} of {name}"
        reduced = sum(part.reduced_bytes for part in parts)
        kept = sum(part.gradient_bytes for part in parts)
        self.moves.append(
            ExchangeStep(
                name=f"collect gradients of {name}",
                makes={buffer: (reduced, Kind.OTHER)},
                gradients=[part.name for part in parts],
            )
        )
        summed = reduced // self.sharding.ranks
        self.moves.append(
            ExchangeStep(
                name=f"reduce gradients of {name}",
                makes={result: (summed, Kind.GRADIENT)},
                inside_bytes=reduced * self.sharding.reduce_copies if self.sharding.ranks > 1 else 0,
                kept=summed == kept,
            )
        )
        if summed != kept:
            gradient = f"gradients {self.count} of {name}"
            self.moves.append(
                ExchangeStep(
                    name=f"cast gradients of {name}",
                    makes={gradient: (kept, Kind.GRADIENT)},
                    frees=[result],
                    kept=True,
                )
            )
        kept_buffers.append(buffer)

    def close(self) -> None:
        left = [_whole(unit) for unit in sorted(self.whole)] + [_buffer(u) for u in sorted(self.waiting)]
        left += [buffer for buffers in self.reductions.values() for buffer in buffers]
        if left:
            self.moves.append(ExchangeStep(name="end of the exchange", frees=left))

    def _gather(self, unit: int) -> None:
        if unit in self.whole or unit in self.waiting:
            return
        facts = self.sharding.units[unit]
        self.waiting.add(unit)
        nbytes = facts.whole_bytes if self.sharding.ranks > 1 else 0  # one process copies from its own
        self.moves.append(
            ExchangeStep(
                name=f"gather {_name(facts.name)}",
                makes={_buffer(unit): (nbytes, Kind.PARAMETER)},
                inside_bytes=facts.cast_bytes + nbytes * self.sharding.gather_copies,
            )
        )

    def _copy_out(self, unit: int, *, frees: list[str]) -> None:
        facts = self.sharding.units[unit]
        self.waiting.remove(unit)
        self.whole.add(unit)
        self.moves.append(
            ExchangeStep(
                name=f"copy out {_name(facts.name)}",
                makes={_whole(unit): (facts.whole_bytes, Kind.PARAMETER)},
                frees=frees,
            )
        )

    def _give_back(self, unit: int) -> None:
        if unit in self.whole:
            self.whole.remove(unit)
            name = _name(self.sharding.units[unit].name)
            self.moves.append(ExchangeStep(name=f"give back {name}", frees=[_whole(unit)]))


def _name(unit: str) -> str:
    return unit or "the model"


def _whole(unit: int) -> str:
    return f"parameters of unit {unit}"


def _buffer(unit: int) -> str:
    return f"gathered parameters of unit {unit}"
