"""Outputs that a loop holds though its user said that it does not.

Notice backward passes that keep what they read, though a plan frees it on the way.

See in which order in memory the gradients of a model's outputs come, where nobody knows the loss.

What the user's loop makes between the forward and the backward pass of a step: its loss, most of all.
"""

import logging
import weakref
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lowtide.torch_compat import autograd_engine, dispatch
from lowtide.torch_compat.aot_autograd import in_another_order, order_of
from lowtide.torch_compat.dispatch import iter_tensors, storage_key
from lowtide.trace.gradient_strides import LAID_OUT_OTHERWISE
from lowtide.trace.model_call import tensors_in
from lowtide.units import format_size

logger = logging.getLogger("lowtide")

SMALL_BYTES = 4096


class LiveOutputs:
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


@dataclass(slots=True)
class KeptGraphs:
    """`spare_bytes` are those of the budget that the plan leaves free; None where nobody gave a budget."""

    spare_bytes: int | None = None
    _told: bool = False

    def look(self, saved_bytes: int) -> None:
        """When a backward pass begins for which `saved_bytes` are held."""
        if self._told or self.spare_bytes is None or not autograd_engine.graph_is_kept():
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


class LiveLoss(NamedTuple):
    """Bytes that a loop made and held: the most at once, and those still there when backward began, for a
    call with `batch_bytes`."""

    peak_bytes: int
    kept_bytes: int
    batch_bytes: int = 0


class LoopWatch(dispatch.TorchDispatchMode):
    """Counts the bytes that ops make while it is on. Changes no result; never on beside another such mode.

    autograd, inference mode and others give back the modes that were there when they began: a watch is
    taken away only where torch is as it was at its beginning, by `leave`. Until then it does nothing.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._live: dict[int, tuple[int, dispatch.StorageWeakRef]] = {}
        self._peak_bytes = 0
        self._is_on = False
        self.surroundings = ""

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Leave functions that the user compiles as they are."""
        return True

    def begin(self) -> bool:
        """Watch from now on; False where another mode is on, which would be mixed up with this one."""
        leave()
        if dispatch.active_modes():
            return False
        self.surroundings = dispatch.dispatch_state()
        self.__enter__()  # type: ignore[no-untyped-call]
        self._is_on = True
        return True

    def end(self) -> LiveLoss:
        """What was held since `begin`. Counts no more."""
        self._is_on = False
        return LiveLoss(self._peak_bytes, self._live_bytes())

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if self._is_on:
            read = {storage_key(tensor) for tensor in iter_tensors((args, kwargs))}
            for tensor in iter_tensors(result):
                if _has_bytes(tensor) and storage_key(tensor) not in read:
                    self._note(tensor)
        return result

    def _note(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        reference = dispatch.StorageWeakRef(storage)  # type: ignore[no-untyped-call]
        self._live[storage_key(tensor)] = (storage.nbytes(), reference)
        self._peak_bytes = max(self._peak_bytes, self._live_bytes())

    def _live_bytes(self) -> int:
        self._live = {key: (n, ref) for key, (n, ref) in self._live.items() if not ref.expired()}  # type: ignore[no-untyped-call]
        return sum(nbytes for nbytes, _ in self._live.values())


def leave() -> None:
    """Take a watch of an earlier step away."""
    modes = dispatch.active_modes()
    if modes and isinstance(modes[-1], LoopWatch) and modes[-1].surroundings == dispatch.dispatch_state():
        modes[-1].__exit__(None, None, None)  # type: ignore[no-untyped-call]


def _has_bytes(tensor: torch.Tensor) -> bool:
    return tensor.layout is torch.strided and not isinstance(tensor, dispatch.FakeTensor)
