"""Costs measured before, on disk: one JSON file for each torch version, machine and device."""

import hashlib
import json
import logging
import os
from pathlib import Path

import torch

from lowtide.errors import LowtideError
from lowtide.facts.files import write_atomic
from lowtide.profiling.device import Device
from lowtide.torchside.calls import OpCost

_log = logging.getLogger(__name__)

# Raised when costs are measured in another way, so that old files are left alone.
_METHOD = 6

Order = list[int] | None
"""Dimensions of a result as they lie in memory, from the outermost; None where it has gaps."""


def cache_directory() -> Path:
    """`LOWTIDE_CACHE_DIR`, else `lowtide` in `XDG_CACHE_HOME`, else `~/.cache/lowtide`."""
    if own := os.environ.get("LOWTIDE_CACHE_DIR"):
        return Path(own)
    if shared := os.environ.get("XDG_CACHE_HOME"):
        return Path(shared) / "lowtide"
    return Path.home() / ".cache" / "lowtide"


class CostCache:
    """Costs by signature, for one device of this machine.

    A file that cannot be read is reported to the log and written anew. Writers replace the whole
    file at once after merging in what others wrote, so two at a time never leave a broken one.
    """

    def __init__(self, device: Device, *, directory: Path | None = None) -> None:
        self.key = f"method {_METHOD}; torch {torch.__version__}; {device.torch_device}; {device.identity}"
        digest = hashlib.sha256(self.key.encode()).hexdigest()[:16]
        self.path = (directory or cache_directory()) / f"costs-{digest}.json"
        self._costs, self._orders = self._read()

    def get(self, signature: str, *, memory_limit_bytes: int) -> OpCost | None:
        """A cost that was measured whole, or on a slice under a limit at least as large as this."""
        cost, limit_bytes = self._costs.get(signature, (None, 0))
        if cost is not None and cost.estimated and limit_bytes < memory_limit_bytes:
            return None
        return cost

    def put(self, signature: str, cost: OpCost, *, memory_limit_bytes: int) -> None:
        self._costs[signature] = (cost, memory_limit_bytes)

    def orders(self, signature: str) -> list[Order] | None:
        """How the results of a call really lie in memory, if that was ever asked."""
        return self._orders.get(signature)

    def put_orders(self, signature: str, orders: list[Order]) -> None:
        self._orders[signature] = orders

    def save(self) -> None:
        """Write all costs and orders, together with those that other processes saved meanwhile.

        Where that cannot be, a warning says so: what was measured is not lost for it.
        """
        costs, orders = self._read()
        self._costs, self._orders = costs | self._costs, orders | self._orders
        document = {
            "key": self.key,
            "costs": {
                signature: [
                    cost.seconds,
                    cost.workspace_bytes,
                    cost.estimated,
                    cost.hidden_bytes,
                    limit_bytes,
                ]
                for signature, (cost, limit_bytes) in sorted(self._costs.items())
            },
            "orders": dict(sorted(self._orders.items())),
        }
        try:
            write_atomic(self.path, json.dumps(document, indent=0))
        except LowtideError as error:
            _log.warning("costs are not remembered: %s", error)

    def _read(self) -> tuple[dict[str, tuple[OpCost, int]], dict[str, list[Order]]]:
        if not self.path.exists():
            return {}, {}
        try:
            document = json.loads(self.path.read_text())
            costs = {
                str(signature): (
                    OpCost(float(seconds), int(workspace), bool(estimated), tuple(map(int, hidden))),
                    int(limit_bytes),
                )
                for signature, (seconds, workspace, estimated, hidden, limit_bytes) in document[
                    "costs"
                ].items()
            }
            return costs, dict(document["orders"])
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            _log.warning("the cost cache %s cannot be read and will be written anew: %s", self.path, error)
            return {}, {}
