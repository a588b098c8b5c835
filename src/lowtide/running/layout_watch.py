"""See in which order in memory the gradients of a model's outputs come, where nobody knows the loss."""

import logging
from typing import Any

import torch

from lowtide.capture.gradient_layouts import LAID_OUT_OTHERWISE
from lowtide.torchside.batch import tensors_in
from lowtide.torchside.gradient_orders import in_another_order, order_of

logger = logging.getLogger("lowtide")


class LayoutWatch:
    """Notes in `orders` how gradients are laid out that are not laid out like their outputs."""

    def __init__(self, orders: dict[str, str]) -> None:
        self.orders = orders
        self._has_news = False
        self._told = False

    def watch(self, output: Any) -> None:
        """Look at the gradients that this output of the model gets."""
        for tensor in tensors_in(output):
            if tensor.grad_fn is not None and tensor.dim() > 1:
                self._watch(tensor)

    def has_news(self) -> bool:
        """Whether orders came since the last time that somebody asked."""
        has_news, self._has_news = self._has_news, False
        return has_news

    def _watch(self, output: torch.Tensor) -> None:
        shape, strides, order = output.shape, output.stride(), order_of(output)

        def look(gradient: torch.Tensor | None) -> None:
            if gradient is None or order in self.orders:
                return
            if in_another_order(shape, strides, gradient.stride()):
                self.orders[order], self._has_news = order_of(gradient), True
                self._tell()

        output.register_hook(look)  # type: ignore[no-untyped-call]

    def _tell(self) -> None:
        if not self._told:
            self._told = True
            logger.warning(
                "%s: the last bits of this step can differ, since torch copies it into the output's order "
                "first, and eager does not. It is planned for from the next step on; pass `loss=` to plan "
                "for it from the first",
                LAID_OUT_OTHERWISE,
            )
