"""Costs of calls that were not measured, from those of the same ops that were."""

import operator
from collections.abc import Iterable, Mapping
from copy import copy
from math import log
from typing import Any

import torch
from torch import Tensor

from lowtide.facts import Run
from lowtide.ops.calls import Call, OpCost, signature
from lowtide.profiling.op_costs import cost_by_bytes
from lowtide.profiling.work import Work, work_making
from lowtide.torch_compat.dispatch import map_leaves

Made = tuple[int, ...]
"""Bytes of each block that a call makes."""
Kind = tuple[Any, tuple[torch.dtype, ...]]
"""An op and the types of its tensors: kernels of another type hold other bytes inside."""
Sizes = tuple[tuple[int, ...], ...]
"""Those of every tensor of a call."""


class Known:
    """Calls that were measured, their costs, and the bytes of each block that they make.

    What another call is scaled from is worked out once for each op, when one asks for it. `runs`: the call of
    every run of the step that they were measured for.
    """

    def __init__(
        self, measured: Iterable[tuple[Call, OpCost, Made]], *, runs: Mapping[Run, Call] | None = None
    ) -> None:
        self.runs: Mapping[Run, Call] = runs or {}
        self._costs: dict[str, OpCost] = {}
        self._made: dict[str, Made] = {}
        self._calls: dict[Kind, list[tuple[Call, OpCost, Made]]] = {}
        self._works: dict[Kind, list[tuple[str, Sizes, Work, OpCost]]] = {}
        self.add(measured)

    def add(self, measured: Iterable[tuple[Call, OpCost, Made]]) -> None:
        for call, cost, made in measured:
            name = signature(call)
            kind = kind_of(call)
            if name not in self._costs:
                self._calls.setdefault(kind, []).append((call, cost, made))
                self._works.pop(kind, None)
            self._costs[name], self._made[name] = cost, made

    def without_runs(self) -> "Known":
        """The same costs, for a plan, which outlives the step that they were measured for."""
        other = copy(self)
        other.runs = {}
        return other

    def measured_cost(self, call: Call) -> OpCost | None:
        """The cost of a call that was itself measured."""
        return self._costs.get(signature(call))

    def has_like(self, call: Call) -> bool:
        """Whether the op of a call was measured with tensors of the same types."""
        return call.target is operator.getitem or kind_of(call) in self._calls

    def cost_of(self, call: Call, name: str, made: Made) -> OpCost:
        """The cost of a call whose signature is `name` and that makes blocks of these bytes.

        Measured, or else scaled from the measured call of the same op and types that has most sizes in common
        with it, as the same call of another batch has, and of these from the nearest in bytes; or else from
        its bytes alone. The last two are `estimated`.
        """
        if name in self._costs:
            return self._costs[name]
        if call.target is operator.getitem:
            return OpCost(0.0, 0, estimated=False)
        kind = kind_of(call)
        if kind not in self._calls:
            return cost_by_bytes(call)
        work, constants, sizes = work_making(call, made), _constants(call), _sizes(call)
        works = self._works_of(kind)
        # which gradients a convolution gives, say, changes what it holds more than its size does
        alike = [each for each in works if each[0] == constants] or works
        _, _, near, cost = min(
            alike,
            key=lambda each: (
                -_num_common(each[1], sizes),
                abs(log((each[2].nbytes + 1) / (work.nbytes + 1))),
            ),
        )
        return _scaled(cost, near, work)

    def cost_of_run(self, run: Run, call: Call, name: str, made: Made) -> OpCost:
        """The same for a run of a step that has the runs of the known one, at another size: scaled from that
        run, where it is of the same op and types."""
        same = self.runs.get(run)
        if name in self._costs or same is None or kind_of(same) != kind_of(call):
            return self.cost_of(call, name, made)
        known = signature(same)
        return _scaled(self._costs[known], work_making(same, self._made[known]), work_making(call, made))

    def _works_of(self, kind: Kind) -> list[tuple[str, Sizes, Work, OpCost]]:
        if kind not in self._works:
            self._works[kind] = [
                (_constants(call), _sizes(call), work_making(call, made), cost)
                for call, cost, made in self._calls[kind]
            ]
        return self._works[kind]


def _scaled(cost: OpCost, near: Work, work: Work) -> OpCost:
    ratio = work.nbytes / near.nbytes if near.nbytes else 1.0
    return OpCost(
        cost.seconds * work.ratio_to(near),
        # of a smaller call it may be as large: some kernels need as much whatever the batch
        round(cost.workspace_bytes * max(1.0, ratio)),
        estimated=True,
        hidden_bytes=tuple(round(nbytes * ratio) for nbytes in cost.hidden_bytes),
    )


def kind_of(call: Call) -> Kind:
    types: list[torch.dtype] = []
    map_leaves(
        lambda leaf: types.append(leaf.dtype) if isinstance(leaf, Tensor) else None, (call.args, call.kwargs)
    )
    return call.target, tuple(types)


def _constants(call: Call) -> str:
    """What a call is given besides tensors."""
    return str(map_leaves(lambda leaf: None if isinstance(leaf, Tensor) else leaf, (call.args, call.kwargs)))


def _sizes(call: Call) -> Sizes:
    return tuple(tuple(tensor.shape) for tensor in call.tensors)


def _num_common(one: Sizes, other: Sizes) -> int:
    """How many dimensions have the same size; those of tensors of another rank have none in common."""
    pairs = ((a, b) for a, b in zip(one, other, strict=False) if len(a) == len(b))
    return sum(x == y for a, b in pairs for x, y in zip(a, b, strict=True))
