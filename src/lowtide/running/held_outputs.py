"""Outputs that a loop holds though its user said that it does not."""

import logging
import weakref
from typing import Any

from torch import Tensor

from lowtide.facts.units import format_size
from lowtide.torchside.batch import tensors_in
from lowtide.torchside.calls import storage_key

logger = logging.getLogger("lowtide")

SMALL_BYTES = 4096


class HeldOutputs:
    """What the model returned last. Warns once, at the end of a backward pass that it outlived, unless it
    `may_be_held`."""

    may_be_held = True

    def __init__(self) -> None:
        self._outputs: list[weakref.ref[Tensor]] = []
        self._told = False

    def note(self, output: Any) -> None:
        """After a call of the model."""
        if not self._told:
            self._outputs = [weakref.ref(tensor) for tensor in tensors_in(output) if tensor.dim()]

    @property
    def nbytes(self) -> int:
        """What of it is still there."""
        alive = [tensor for reference in self._outputs if (tensor := reference()) is not None]
        return sum({storage_key(tensor): tensor.untyped_storage().nbytes() for tensor in alive}.values())

    def warn(self) -> None:
        nbytes = self.nbytes
        self._outputs = []
        if nbytes > SMALL_BYTES and not self.may_be_held:
            self._told = True
            logger.warning(
                "the loop held %s (%d bytes) of the model's outputs through the backward pass, but the plan "
                "was made with holds_outputs=False: the peak is higher by as much. Let go of them, as in "
                "loss = model(...).loss, or plan with holds_outputs=True",
                format_size(nbytes),
                nbytes,
            )
