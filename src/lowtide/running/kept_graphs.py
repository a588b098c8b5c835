"""Notice backward passes that keep what they read, though a plan frees it on the way."""

import logging
from dataclasses import dataclass

from lowtide.facts.units import format_size
from lowtide.torchside import engine

logger = logging.getLogger("lowtide")


@dataclass(slots=True)
class KeptGraphs:
    """`spare_bytes` are those of the budget that the plan leaves free; None where nobody gave a budget."""

    spare_bytes: int | None = None
    _told: bool = False

    def look(self, saved_bytes: int) -> None:
        """When a backward pass begins for which `saved_bytes` are held."""
        if self._told or self.spare_bytes is None or not engine.graph_is_kept():
            return
        if saved_bytes > max(0, self.spare_bytes):
            self._told = True
            logger.warning(
                "backward(retain_graph=True) holds %s of saved activations to its end, and the plan counted "
                "on letting go of them on the way: the peak is higher by up to as much. Add up the losses "
                "and call backward() once, or plan for a budget that is smaller by %d bytes",
                format_size(saved_bytes),
                saved_bytes,
            )
