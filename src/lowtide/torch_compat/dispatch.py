"""Tensors and ops below autograd: storages, fake tensors, dispatch modes, kernels in Python, schemas.

- tensors: `storage_key`, `has_other_owners`, `WeakStorages`, `iter_tensors`, `map_leaves`; `FakeTensor` and
  its mode
- modes, which see every op of a thread: `active_modes`, `without_modes`, `real_tensors`, `LiveBytes`
- the dispatcher: `dispatch_state`; `recording` and `below_autograd` switch autograd inside of an op
- tracing: `traced_by` and `whole_ops` say by which ops an op is traced
- schemas: `schema_of`, `packet_of`, `can_decompose`
"""

import contextlib
import functools
import itertools
import re
import unittest.mock
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import SymBool, SymFloat, SymInt, Tensor
from torch import _meta_registrations as registrations
from torch._decomp import decompositions
from torch._ops import OperatorBase, OpOverload
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
)
from torch.autograd import forward_ad
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    _disable_current_modes,
    _get_current_dispatch_mode_stack,
    is_traceable_wrapper_subclass,
)

__all__ = [
    "DataDependentOutputException",
    "DynamicOutputShapeException",
    "FakeTensor",
    "FakeTensorMode",
    "OpOverload",
    "OperatorBase",
    "StorageWeakRef",
    "TorchDispatchMode",
]

WHOLE_OPS = re.compile(r"_?upsample_.*|(hard|soft)shrink|multi_margin_loss|multilabel_margin_loss_forward")
"""Ops that torch traces by decompositions. The decompositions round differently from eager's ops and need far
more memory: a bilinear upsampling becomes some fifty ops."""
TRACED_KEYS = (torch._C.DispatchKey.Autograd, torch._C.DispatchKey.CompositeImplicitAutograd)
DIFFERENTIATED_KEYS = TRACED_KEYS[:1]
"""For ops with our own tracing rule only for the derivative."""
COMPOSITE_KEYS = TRACED_KEYS[1:]
"""For ops that ATen writes with other ops."""

Kernel = Callable[..., Any]


def has_other_owners(tensor: Tensor) -> bool:
    """Whether something besides `tensor` refers to its memory, such as a view that the user keeps."""
    # the tensor, and the object of Python by which it is asked
    return int(torch._C._storage_Use_Count(tensor.untyped_storage()._cdata)) > 2


def storage_key(tensor: Tensor) -> int:
    """Equal for two live tensors exactly when they share a storage; fake tensors included."""
    return int(local(tensor).untyped_storage()._cdata)


def local(tensor: Tensor) -> Tensor:
    """This process's part of a tensor that is divided among processes; any other tensor itself. It may still
    be on its way from the others."""
    while isinstance(tensor, (DTensor, AsyncCollectiveTensor)):
        tensor = tensor._local_tensor if isinstance(tensor, DTensor) else tensor.elem
    return tensor


def arrived(tensor: Tensor) -> Tensor:
    """This process's part of a tensor that is divided among processes, after it has arrived from the others;
    any other tensor itself."""
    return waited(tensor._local_tensor) if isinstance(tensor, DTensor) else waited(tensor)


def waited(tensor: Tensor) -> Tensor:
    """A tensor that has arrived from other processes."""
    return tensor.wait() if isinstance(tensor, AsyncCollectiveTensor) else tensor


def is_number(value: Any) -> bool:
    """Whether a traced value is a number that an input of the graph decides."""
    return isinstance(value, SymInt | SymFloat | SymBool)


def iter_tensors(value: Any) -> Iterator[Tensor]:
    """Every tensor inside nested lists, tuples and dicts, in order."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from iter_tensors(item)
    elif isinstance(value, dict):
        for item in value.values():
            yield from iter_tensors(item)


class LiveBytes(TorchDispatchMode):
    """The most bytes of `tensors` and of ops' results that are live at once, above those at the start."""

    def __init__(self, tensors: Any) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.peak_bytes = 0
        self._live: dict[int, tuple[int, StorageWeakRef]] = {}
        for tensor in iter_tensors(tensors):
            self._note(tensor)
        self._start_bytes = self._bytes()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        known = {storage_key(tensor) for tensor in iter_tensors((args, kwargs))}
        self.add([tensor for tensor in iter_tensors(result) if storage_key(tensor) not in known])
        return result

    def add(self, tensors: Iterable[Tensor], sizes: Iterable[int] = (), *, inside_bytes: int = 0) -> None:
        """Count results of an op, of at least these `sizes`, and the bytes of its workspace."""
        self._bytes()  # drops freed storages, since a new one may have the same key
        made = [tensor for tensor in tensors if storage_key(tensor) not in self._live]
        for tensor, nbytes in zip(made, itertools.chain(sizes, itertools.repeat(0)), strict=False):
            self._note(tensor, nbytes)
        if made:
            self.peak_bytes = max(self.peak_bytes, self._bytes() - self._start_bytes + inside_bytes)

    def _note(self, tensor: Tensor, nbytes: int = 0) -> None:
        storage = tensor.untyped_storage()
        nbytes = max(nbytes, storage.nbytes())
        self._live[storage_key(tensor)] = (nbytes, StorageWeakRef(storage))  # type: ignore[no-untyped-call]

    def _bytes(self) -> int:
        self._live = {key: (n, ref) for key, (n, ref) in self._live.items() if not ref.expired()}  # type: ignore[no-untyped-call]
        return sum(nbytes for nbytes, _ in self._live.values())


def map_leaves(change: Callable[[Any], Any], value: Any) -> Any:
    """`value` with every leaf of its nested lists, tuples and dicts changed."""
    if isinstance(value, list):
        return [map_leaves(change, item) for item in value]
    if isinstance(value, tuple):
        return tuple(map_leaves(change, item) for item in value)
    if isinstance(value, dict):
        return {key: map_leaves(change, item) for key, item in value.items()}
    return change(value)


def is_wrapper(tensor: Tensor) -> bool:
    """Whether a tensor is of a class that wraps other tensors and that torch.compile can take apart."""
    return bool(is_traceable_wrapper_subclass(tensor))


def has_storage(tensor: Tensor) -> bool:
    """Whether a tensor has one storage of its own."""
    return tensor.layout is torch.strided and not is_wrapper(tensor)


def storages_of(tensors: Iterable[Tensor]) -> list[torch.UntypedStorage]:
    """The storages of these tensors, without tensors that have none of their own."""
    return [tensor.untyped_storage() for tensor in tensors if has_storage(tensor)]


class WeakStorages:
    """The storages of some tensors; refers to them weakly."""

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        found = [(tensor, tensor.untyped_storage()) for tensor in tensors if has_storage(tensor)]
        self._sizes = {storage_key(tensor): (StorageWeakRef(one), one.nbytes()) for tensor, one in found}  # type: ignore[no-untyped-call]

    def live_bytes(self, *, besides: Iterable[Tensor] = (), keys: Collection[int] = ()) -> int:
        """The bytes of those that live, without the storages of the tensors `besides`, and without `keys`."""
        live = {key: n for key, (reference, n) in self._sizes.items() if not reference.expired()}  # type: ignore[no-untyped-call]
        live = {key: n for key, n in live.items() if key not in keys}
        for tensor in besides if live else ():
            live.pop(storage_key(tensor), None)
        return sum(live.values())

    def keys(self) -> Iterable[int]:
        """As `storage_key` has them; no other storage gets the key of one that is referred to."""
        return self._sizes

    def add(self, others: "WeakStorages") -> None:
        self._sizes.update(others._sizes)

    def freed_bytes(self) -> int:
        return sum(nbytes for _, nbytes in self._sizes.values()) - self.live_bytes()


def active_modes() -> list[Any]:
    """The dispatch modes of this thread, the innermost last."""
    return list(_get_current_dispatch_mode_stack())


def without_modes() -> contextlib.AbstractContextManager[Any]:
    """Hide the ops inside from all modes."""
    return _disable_current_modes()


@contextlib.contextmanager
def real_tensors() -> Iterator[None]:
    """Compute with real tensors and eager's ops, even while torch.compile traces with fake ones."""
    with _disable_current_modes(), torch._C._DisablePythonDispatcher(), torch.no_grad():
        yield


@contextlib.contextmanager
def recording() -> Iterator[None]:
    """Let autograd record inside of an op of our own, where torch switches it off."""
    switched_off = torch._C._dispatch_tls_local_exclude_set()
    autograd = torch._C.DispatchKeySet(torch._C.DispatchKey.AutogradCPU)
    included = torch._C._dispatch_tls_local_include_set()
    with torch._C._ForceDispatchKeyGuard(included, switched_off - autograd), torch.enable_grad():
        yield


def below_autograd() -> Any:
    """Call ops without autograd, inside of a derivative rule of our own."""
    return torch._C._AutoDispatchBelowAutograd()


def with_autograd(op: OpOverload[..., Any]) -> Kernel:
    """An op as autograd's own kernel calls it, past kernels in Python."""
    return functools.partial(op._op_dk, torch._C.DispatchKey.Autograd)


def dispatch_state() -> str:
    """How torch dispatches ops in this thread. Modes and autocast are left out: other keys have them."""
    keys = torch._C.DispatchKey
    beside = torch._C.DispatchKeySet(keys.Python) | torch._C.DispatchKeySet(keys.PythonTLSSnapshot)
    for name in dir(keys):
        if name.startswith("Autocast"):
            beside = beside | torch._C.DispatchKeySet(getattr(keys, name))
    included = torch._C._dispatch_tls_local_include_set() - beside
    return f"{included} {torch._C._dispatch_tls_local_exclude_set() - beside}"


def onednn_is_enabled() -> bool:
    return bool(torch._C._get_mkldnn_enabled())


def batch_norm_library(*tensors: Tensor | None, training: bool, eps: float) -> int:
    """The library by which eager runs a batch norm: 0 for torch's own kernel, 1 for cuDNN, 2 for MIOpen.

    `tensors` are input, weight, bias, running mean and running variance. They may be fake. torch's own
    function takes no None: no library runs without weight or bias, and statistics that are missing make no
    difference in training mode.
    """
    value, weight, bias, *statistics = tensors
    if weight is None or bias is None:
        return 0
    known = [weight if each is None else each for each in statistics]
    chosen: Any = torch._C._select_batch_norm_backend(value, weight, bias, *known, training, eps)
    return int(chosen)


@functools.cache
def _whole_ops() -> tuple[OpOverload[..., Any], ...]:
    packets = [getattr(torch.ops.aten, name) for name in dir(torch.ops.aten) if WHOLE_OPS.fullmatch(name)]
    return tuple(getattr(packet, overload) for packet in packets for overload in packet.overloads())


def whole_ops() -> contextlib.AbstractContextManager[None]:
    """Trace `WHOLE_OPS` without decompositions."""
    return _kernels_replaced(dict.fromkeys(_whole_ops()), TRACED_KEYS)


def traced_by(
    rules: Mapping[OpOverload[..., Any], Callable[[Kernel], Kernel]], *, keys: Sequence[Any] = TRACED_KEYS
) -> contextlib.AbstractContextManager[None]:
    """Trace ops by our own `rules`, each made from torch's kernel, instead of torch's decompositions."""
    return _kernels_replaced(rules, keys)


@contextlib.contextmanager
def _kernels_replaced(
    rules: Mapping[OpOverload[..., Any], Callable[[Kernel], Kernel] | None], keys: Sequence[Any]
) -> Iterator[None]:
    """Replace torch's Python kernels of ops by the kernels that `rules` make, or remove them."""
    torchs = {op: {key: op.py_kernels.pop(key, None) for key in _own_keys(op, keys)} for op in rules}
    for op, kernels in torchs.items():
        rule = rules[op]
        if rule is not None:
            in_c = functools.partial(op._op_dk, torch._C.DispatchKey.CompositeImplicitAutograd)
            op.py_kernels.update({key: rule(kernel or in_c) for key, kernel in kernels.items()})
        op._dispatch_cache.clear()
    try:
        yield
    finally:
        for op, kernels in torchs.items():
            for key, kernel in kernels.items():
                op.py_kernels.pop(key, None)
                if kernel is not None:
                    op.py_kernels[key] = kernel
            op._dispatch_cache.clear()


def _own_keys(op: OpOverload[..., Any], keys: Sequence[Any]) -> list[Any]:
    """The keys, and that of devices which torch does not know, if such a device has its own kernel of an op
    for autograd: this kernel would run in place of ours."""
    other = torch._C.DispatchKey.AutogradPrivateUse1
    has_own = torch._C._dispatch_has_kernel_for_dispatch_key(op._name, other)
    return [*keys, *([other] if has_own or other in op.py_kernels else [])]


@contextlib.contextmanager
def recurrent_layers_traced_by(
    layers: Callable[..., Any], *, runs_whole: Callable[..., bool]
) -> Iterator[None]:
    """Let torch trace the layers of an RNN through `layers` instead of its own decomposition, and a layer of
    an LSTM as one op where `runs_whole(input, hidden, params)` is true."""

    def choose(value: Any, hidden: Any, params: Any) -> Callable[..., Any]:
        whole = runs_whole(value, hidden, params)
        chosen: Callable[..., Any] = (
            decompositions.mkldnn_one_layer_lstm if whole else decompositions.one_layer_lstm
        )
        return chosen

    with (
        unittest.mock.patch.object(decompositions, "_rnn_helper", layers),
        unittest.mock.patch.object(decompositions, "select_one_layer_lstm_function", choose),
    ):
        yield


@contextlib.contextmanager
def dropout_called_by(dropout: Callable[..., Tensor]) -> Iterator[None]:
    """Let `torch.nn.functional` call `dropout` in place of torch's own, which is not written in Python."""
    with unittest.mock.patch.object(torch._VF, "dropout", dropout, create=True):
        yield


_torchs_grouped_product = registrations._meta_grouped_mm_common


@contextlib.contextmanager
def grouped_products_of_any_type() -> Iterator[None]:
    """Let torch trace grouped products (experts in one op) of all dtypes of eager, not only bfloat16."""
    with unittest.mock.patch.object(registrations, "_meta_grouped_mm_common", _grouped_product):
        yield


def _grouped_product(mat_a: Tensor, mat_b: Tensor, **options: Any) -> Any:
    if options["scale_a"] is not None or mat_a.dtype is torch.bfloat16:
        return _torchs_grouped_product(mat_a, mat_b, **options)
    make: Any = registrations._create_grouped_mm_output_tensor
    return make(mat_a, mat_b, options["offs"], options["out_dtype"])


def schema_of(op: OpOverload[..., Any]) -> Any:
    """An op's schema: its name, its `arguments` and `returns`, whether it `is_mutable`."""
    return op._schema


def overload_behind(value: Any) -> OpOverload[..., Any] | None:
    """The default overload of all overloads of a name, or of what `torch.library.custom_op` makes."""
    found = getattr(value, "_opoverload", None) or getattr(value, "default", None)
    return found if isinstance(found, OpOverload) else None


def ops_in(namespace: str) -> list[str]:
    """The names of all ops that are registered in a namespace, without it."""
    prefix = f"{namespace}::"
    names = (
        name.removeprefix(prefix) for name in torch._C._dispatch_get_all_op_names() if name.startswith(prefix)
    )
    return sorted({name.partition(".")[0] for name in names})


def packet_of(op: OpOverload[..., Any]) -> Any:
    """All overloads of an op's name."""
    return op._overloadpacket


def packet_name(op: Any) -> str:
    """`embedding` for an op of any overload; any other target's own text."""
    return str(getattr(op, "_opname", op))


def can_decompose(op: OpOverload[..., Any]) -> bool:
    return bool(op._can_decompose())


def bare_op(op: OpOverload[..., Any]) -> Kernel:
    """An op's function in C, without the Python around it."""
    kernel: Kernel = op._op
    return kernel


def torch_function_off() -> Any:
    """Call functions on a tensor of our own class without the class's `__torch_function__`."""
    return torch._C.DisableTorchFunctionSubclass()


def tensor_without_memory(kind: type[Tensor], shape: Any, **options: Any) -> Any:
    """A tensor of our own class with a layout and no storage."""
    return Tensor._make_wrapper_subclass(kind, shape, **options)


# fmt: off
FUNCTIONS = (
    "acos", "asin", "atan", "cos", "cosh", "erf", "erfc", "erfinv", "exp", "exp2", "expm1", "lgamma", "log",
    "log10", "log1p", "log2", "rsqrt", "sigmoid", "sin", "sinh", "sqrt", "tan", "tanh", "trunc",
)
# fmt: on


@functools.cache
def make_first_calls() -> None:
    """Let every mathematical function choose its kernel. Once per process; further calls do nothing.

    With Intel's MKL the first call of such a function in a process chooses its kernel. Where that call runs
    on several threads, one thread may use a kernel of low precision for its values, this one time
    (pytorch/pytorch issue 188792; seen with torch 2.13.0 as an Adam step that differed in the last bits from
    the same step later). A call with one value runs on one thread.
    """
    for dtype in (torch.float32, torch.float64):
        one_value = torch.full((1,), 0.5, dtype=dtype)
        for name in FUNCTIONS:
            getattr(torch, name)(one_value)


def in_transform(tensors: Iterable[Any] = ()) -> bool:
    """Whether this code runs inside of a transform of torch.func (vmap, grad, jvp) or of forward-mode
    differentiation, or on `tensors` of torch's older vmap, which vectorizes jacobians."""
    return (
        torch._C._functorch.peek_interpreter_stack() is not None
        or forward_ad._current_level >= 0
        or any(torch._C._functorch.is_legacy_batchedtensor(tensor) for tensor in iter_tensors(list(tensors)))
    )
