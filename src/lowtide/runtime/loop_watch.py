"""Count the bytes that the user's loop makes between a forward and a backward pass: the loss, most of all.

    output = model(batch)        the watch begins
    loss = loss_fn(output)       the ops of the loss are counted
    loss.backward()              the ops of its backward pass are counted; the watch ends at the planned graph

The watch is a dispatch mode on the stack of the user's thread. It leaves that stack when `backward()` returns
or raises, when the output dies, or when a planned model is called again, whichever comes first.
"""

import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from lowtide.ops.device_memory import CPU, block_bytes
from lowtide.torch_compat import autograd_engine, dispatch
from lowtide.torch_compat.dispatch import iter_tensors, storage_key
from lowtide.trace.model_call import tensors_in


class LiveLoss(NamedTuple):
    """Bytes that a loop made: their peak, and the bytes live when the planned backward pass began, for a call
    with `batch_bytes`."""

    peak_bytes: int
    kept_bytes: int
    batch_bytes: int = 0


class LoopWatch(dispatch.TorchDispatchMode):
    """Counts the bytes that ops make on `device` while it is on. Changes no result; never on beside another
    mode.

    autograd, inference mode and others restore the stack of modes that they found. So a watch leaves the
    stack only where torch dispatches as at its beginning. Elsewhere it stays on the stack and counts nothing.
    """

    def __init__(self, batch_bytes: int = 0, device: torch.device = CPU) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.batch_bytes = batch_bytes
        self.device = device
        self.is_counting = False
        self.surroundings = ""
        self._live: dict[int, tuple[int, dispatch.StorageWeakRef]] = {}
        self._peak_bytes = 0
        self._output: Any = None

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Do not change functions that the user compiles."""
        return True

    def begin(self, output: Any) -> bool:
        """Watch the ops on `output`; False where another mode is on, or no backward pass can come."""
        leave()
        node = node_behind(output)
        if node is None or dispatch.active_modes():
            return False
        self._output = weakref.ref(node, lambda _: self._break_off())
        self.surroundings = dispatch.dispatch_state()
        self.__enter__()  # type: ignore[no-untyped-call]
        self.is_counting = True
        self.release = _AFTER_BACKWARD.hold(self)
        return True

    def end(self, arrived: Sequence[torch.Tensor]) -> LiveLoss:
        """Stop counting; the live bytes since `begin`, without the gradients that arrived: these are the
        graph's."""
        self.is_counting = False
        arrived_bytes = sum(block_bytes(self.device, tensor, tensor.nbytes) for tensor in arrived)
        return LiveLoss(self._peak_bytes, max(0, self._live_bytes() - arrived_bytes), self.batch_bytes)

    def _break_off(self) -> None:
        """The output died without a backward pass."""
        self.is_counting = False
        leave()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if self.is_counting:
            read = {storage_key(tensor) for tensor in iter_tensors((args, kwargs))}
            for tensor in iter_tensors(result):
                if _has_bytes(tensor) and storage_key(tensor) not in read:
                    self._note(tensor)
        return result

    def _note(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        reference = dispatch.StorageWeakRef(storage)  # type: ignore[no-untyped-call]
        self._live[storage_key(tensor)] = (block_bytes(self.device, tensor), reference)
        self._peak_bytes = max(self._peak_bytes, self._live_bytes())

    def _live_bytes(self) -> int:
        self._live = {key: (n, ref) for key, (n, ref) in self._live.items() if not ref.expired()}  # type: ignore[no-untyped-call]
        return sum(nbytes for nbytes, _ in self._live.values())


def leave() -> None:
    """Take the watch of an earlier step from the stack of this thread."""
    modes = dispatch.active_modes()
    if not modes or not isinstance(modes[-1], LoopWatch) or autograd_engine.in_backward():
        return
    watch = modes[-1]
    if watch.surroundings == dispatch.dispatch_state():
        watch.is_counting = False
        watch.release()
        watch.__exit__(None, None, None)  # type: ignore[no-untyped-call]


def _leave_after_backward() -> None:
    """Leave after the watched backward pass; after any other, the watch counts on."""
    modes = dispatch.active_modes()
    if modes and isinstance(modes[-1], LoopWatch) and not modes[-1].is_counting:
        leave()


_AFTER_BACKWARD = autograd_engine.after_backward(_leave_after_backward)


def node_behind(output: Any) -> Any:
    """The first node of autograd behind an output that can be referred to weakly: a graph's node. None where
    there is none."""
    node: Any = next((tensor.grad_fn for tensor in tensors_in(output) if tensor.grad_fn is not None), None)
    while node is not None:
        try:
            weakref.ref(node)
        except TypeError:  # autograd's own node; the node of a graph is behind it
            node = node.next_functions[0][0] if node.next_functions else None
        else:
            return node
    return None


def weakly(value: Any) -> Callable[[], Any]:
    """A weak reference; to nothing where `value` is None."""
    return (lambda: None) if value is None else weakref.ref(value)


def _has_bytes(tensor: torch.Tensor) -> bool:
    return tensor.layout is torch.strided and not isinstance(tensor, dispatch.FakeTensor)
