"""Costs measured before, on disk: one SQLite file for each torch version, machine and device."""

import hashlib
import json
import logging
import os
import sqlite3
from contextlib import closing
from pathlib import Path

import torch

from lowtide.facts.files import cache_folder
from lowtide.facts.serial import check_types
from lowtide.ops.calls import OpCost
from lowtide.profiling.devices import Device

_log = logging.getLogger(__name__)

_METHOD = 8
"""Raised when the measurement changes, so that old files are not read."""

_TABLES = """
create table if not exists costs (
    signature text primary key, seconds real, workspace_bytes integer, estimated integer, hidden_bytes text,
    limit_bytes integer
) without rowid;
create table if not exists orders (signature text primary key, orders text) without rowid;
"""
_WRITE_TIMEOUT_SECONDS = 30.0
"""The longest wait for another process that writes."""

Order = list[int] | None
"""Dimensions of a result by falling stride; None where it has gaps."""


def cache_directory() -> Path:
    """`LOWTIDE_CACHE_DIR`, else `lowtide` in `XDG_CACHE_HOME`, else `~/.cache/lowtide`."""
    own = os.environ.get("LOWTIDE_CACHE_DIR")
    return Path(own) if own else cache_folder()


class CostCache:
    """Costs by signature, for one device of this machine.

    A file that cannot be read is logged and replaced. Several processes may read and write it at the same
    time; a saved cost is never removed.
    """

    def __init__(self, device: Device, *, directory: Path | None = None) -> None:
        key = f"method {_METHOD}; torch {torch.__version__}; {device.torch_device.type}; {device.identity}"
        # torch's only switch for vendors' libraries: cuDNN, MIOpen and those of registered devices read it
        if device.torch_device.type != "cpu" and not torch.backends.cudnn.enabled:
            key += "; without the vendor's library"
        digest = hashlib.sha256(key.encode()).hexdigest()[:16]
        self.path = (directory or cache_directory()) / f"costs-{digest}.sqlite"
        self._new_costs: dict[str, tuple[OpCost, int]] = {}
        self._new_orders: dict[str, list[Order]] = {}
        self._costs, self._orders = self._read()

    def get(self, signature: str, *, memory_limit_bytes: int) -> OpCost | None:
        """A cost that was measured whole, or on a chunk under a limit at least as large as this."""
        cost, limit_bytes = self._costs.get(signature, (None, 0))
        if cost is not None and cost.estimated and limit_bytes < memory_limit_bytes:
            return None
        return cost

    def put(self, signature: str, cost: OpCost, *, memory_limit_bytes: int) -> None:
        self._costs[signature] = self._new_costs[signature] = (cost, memory_limit_bytes)

    def orders(self, signature: str) -> list[Order] | None:
        """The order of dimensions of a call's real results, if they were measured before."""
        return self._orders.get(signature)

    def put_orders(self, signature: str, orders: list[Order]) -> None:
        self._orders[signature] = self._new_orders[signature] = orders

    def save(self) -> None:
        """Write the costs and orders that are new since the last time.

        A failure is a warning: this process keeps its costs.
        """
        if not self._new_costs and not self._new_orders:
            return
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._write()
        except (OSError, sqlite3.Error) as error:
            _log.warning("costs are not remembered: cannot write %s: %s", self.path, error)
        self._new_costs.clear()
        self._new_orders.clear()

    def _write(self) -> None:
        costs = [
            (key, cost.seconds, cost.workspace_bytes, cost.estimated, json.dumps(cost.hidden_bytes), limit)
            for key, (cost, limit) in self._new_costs.items()
        ]
        orders = [(signature, json.dumps(found)) for signature, found in self._new_orders.items()]
        with closing(self._open()) as database, database:
            database.executemany("insert or replace into costs values (?, ?, ?, ?, ?, ?)", costs)
            database.executemany("insert or replace into orders values (?, ?)", orders)

    def _open(self) -> sqlite3.Connection:
        database = sqlite3.connect(self.path, timeout=_WRITE_TIMEOUT_SECONDS)
        database.executescript(_TABLES)
        return database

    def _read(self) -> tuple[dict[str, tuple[OpCost, int]], dict[str, list[Order]]]:
        if not self.path.exists():
            return {}, {}
        try:
            with closing(self._open()) as database:
                costs = {
                    str(signature): (
                        OpCost(float(seconds), int(workspace), bool(estimated), tuple(json.loads(hidden))),
                        int(limit_bytes),
                    )
                    for signature, seconds, workspace, estimated, hidden, limit_bytes in database.execute(
                        "select * from costs"
                    )
                }
                orders = {
                    str(signature): [
                        None if order is None else list(map(int, order)) for order in json.loads(found)
                    ]
                    for signature, found in database.execute("select * from orders")
                }
                for cost, _ in costs.values():
                    check_types(cost)
                return costs, orders
        except sqlite3.OperationalError as error:  # of the machine, not of the file's content
            _log.warning("the cost cache %s cannot be read: %s", self.path, error)
        except (ArithmeticError, RecursionError, ValueError, TypeError, sqlite3.Error) as error:
            _log.warning("the cost cache %s cannot be read and will be written anew: %s", self.path, error)
            self._remove()
        return {}, {}

    def _remove(self) -> None:
        try:
            self.path.unlink(missing_ok=True)
        except OSError as error:
            _log.warning("costs are not remembered: cannot write %s: %s", self.path, error)
