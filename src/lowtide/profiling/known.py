"""Costs of calls that were not measured, from those of the same ops that were."""

import operator
from collections.abc import Iterable
from math import log
from typing import Any

from lowtide.profiling.ops import cost_by_bytes
from lowtide.profiling.work import Work, visible_work_of
from lowtide.torchside.calls import Call, OpCost, signature


class Known:
    """Calls that were measured, and their costs.

    What another call is scaled from is worked out once for each op, when one asks for it.
    """

    def __init__(self, measured: Iterable[tuple[Call, OpCost]]) -> None:
        self._costs: dict[str, OpCost] = {}
        self._calls: dict[Any, list[tuple[Call, OpCost]]] = {}
        self._works: dict[Any, list[tuple[Work, OpCost]]] = {}
        for call, cost in measured:
            name = signature(call)
            if name not in self._costs:
                self._calls.setdefault(call.target, []).append((call, cost))
            self._costs[name] = cost

    def cost_of(self, call: Call, name: str) -> OpCost:
        """The cost of a call whose signature is `name`: measured, or else scaled from the measured call of
        the same op nearest in bytes, or else from its bytes alone; the last two are `estimated`."""
        if name in self._costs:
            return self._costs[name]
        if call.target is operator.getitem:
            return OpCost(0.0, 0, estimated=False)
        if call.target not in self._calls:
            return cost_by_bytes(call)
        work = visible_work_of(call)
        near, cost = min(
            self._works_of(call.target), key=lambda each: abs(log((each[0].nbytes + 1) / (work.nbytes + 1)))
        )
        ratio = work.nbytes / near.nbytes if near.nbytes else 1.0
        return OpCost(
            cost.seconds * work.ratio_to(near),
            round(cost.workspace_bytes * ratio),
            estimated=True,
            hidden_bytes=tuple(round(nbytes * ratio) for nbytes in cost.hidden_bytes),
        )

    def _works_of(self, target: Any) -> list[tuple[Work, OpCost]]:
        if target not in self._works:
            self._works[target] = [(visible_work_of(call), cost) for call, cost in self._calls[target]]
        return self._works[target]
