"""What the user's loop makes between the forward and the backward pass of a step: its loss, most of all."""

from typing import Any, NamedTuple

import torch

from lowtide.torchside import hooks
from lowtide.torchside.calls import iter_tensors, storage_key


class Held(NamedTuple):
    """Bytes that a loop made and held: the most at once, and those still there when backward began, for a
    call with `batch_bytes`."""

    peak_bytes: int
    kept_bytes: int
    batch_bytes: int = 0


class LoopWatch(hooks.TorchDispatchMode):
    """Counts the bytes that ops make while it is on. Changes no result; never on beside another such mode.

    autograd, inference mode and others give back the modes that were there when they began: a watch is
    taken away only where torch is as it was at its beginning, by `leave`. Until then it does nothing.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._live: dict[int, tuple[int, hooks.StorageWeakRef]] = {}
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
        if hooks.active_modes():
            return False
        self.surroundings = hooks.dispatch_state()
        self.__enter__()  # type: ignore[no-untyped-call]
        self._is_on = True
        return True

    def end(self) -> Held:
        """What was held since `begin`. Counts no more."""
        self._is_on = False
        return Held(self._peak_bytes, self._live_bytes())

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
        reference = hooks.StorageWeakRef(storage)  # type: ignore[no-untyped-call]
        self._live[storage_key(tensor)] = (storage.nbytes(), reference)
        self._peak_bytes = max(self._peak_bytes, self._live_bytes())

    def _live_bytes(self) -> int:
        self._live = {key: (n, ref) for key, (n, ref) in self._live.items() if not ref.expired()}  # type: ignore[no-untyped-call]
        return sum(nbytes for nbytes, _ in self._live.values())


def leave() -> None:
    """Take a watch of an earlier step away."""
    modes = hooks.active_modes()
    if modes and isinstance(modes[-1], LoopWatch) and modes[-1].surroundings == hooks.dispatch_state():
        modes[-1].__exit__(None, None, None)  # type: ignore[no-untyped-call]


def _has_bytes(tensor: torch.Tensor) -> bool:
    return tensor.layout is torch.strided and not isinstance(tensor, hooks.FakeTensor)
