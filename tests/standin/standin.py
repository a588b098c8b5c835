"""An accelerator for tests on machines without one: with this folder on PYTHONPATH, `import torch` has it.

The device "standin" is host memory behind a caching allocator of its own, and CPU kernels that work in it;
`standin.cpp` says what it imitates. The extension is built once for each source, torch and Python, into
`STANDIN_BUILD` or a folder beside this file: about 20 seconds.

Shortcoming: the device replaces the CPU allocator and the current accelerator of its process, and so needs a
process of its own.
"""

import fcntl
import hashlib
import importlib.machinery
import importlib.util
import os
import subprocess
import sys
import sysconfig
import types
from contextlib import contextmanager
from pathlib import Path

import torch

NAME = "standin"
SOURCE = Path(__file__).with_name("standin.cpp")


def library() -> Path:
    """Where the extension of this source, torch and Python is, or will be."""
    sources = [path.read_text() for path in sorted(SOURCE.parent.glob("*.[ch]*"))]
    key = f"{torch.__version__} {sys.version} {sources}"
    folder = Path(os.environ.get("STANDIN_BUILD", Path(__file__).with_name(".build")))
    return folder / f"standin_{hashlib.sha256(key.encode()).hexdigest()[:12]}.so"


def build() -> Path:
    """The extension, compiled where it is not there yet. Of several processes, one compiles."""
    target = library()
    target.parent.mkdir(parents=True, exist_ok=True)
    with (target.parent / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not target.exists():
            half = target.with_suffix(".half")
            subprocess.run(_compile(target.stem, half), check=True)
            half.rename(target)
    return target


def _compile(name: str, target: Path) -> list[str]:
    from torch.utils.cpp_extension import include_paths, library_paths

    return [
        os.environ.get("CXX", "c++"),
        *("-std=c++20", "-O1", "-w", "-fPIC", "-shared", f"-DTORCH_EXTENSION_NAME={name}"),
        f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}",
        *(f"-I{path}" for path in (*include_paths(), sysconfig.get_path("include"))),
        str(SOURCE),
        *(f"-L{path}" for path in library_paths()),
        *("-lc10", "-ltorch", "-ltorch_cpu", "-ltorch_python"),
        *("-o", str(target)),
    ]


def _extension() -> types.ModuleType:
    path = build()
    loader = importlib.machinery.ExtensionFileLoader(path.stem, str(path))
    spec = importlib.util.spec_from_loader(path.stem, loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    return module


_C = _extension()
torch.utils.rename_privateuse1_backend(NAME)


def _index(device: object = None) -> int:
    if device is None:
        return torch.accelerator.current_device_index()
    if isinstance(device, int):
        return device
    device = torch.device(device)
    return torch.accelerator.current_device_index() if device.index is None else device.index


# What a device module has: `torch.standin`, which is this one.

Stream, Event = torch.Stream, torch.Event


def is_available() -> bool:
    return True


is_initialized = is_available


def _is_in_bad_fork() -> bool:
    return False


def _lazy_init() -> None:
    pass


def is_bf16_supported(including_emulation: bool = True) -> bool:
    return True


def get_amp_supported_dtype() -> list[torch.dtype]:
    return [torch.bfloat16, torch.float16]


def device_count() -> int:
    return _C.device_count()


def current_device() -> int:
    return torch.accelerator.current_device_index()


def set_device(device: object) -> None:
    torch.accelerator.set_device_index(_index(device))


def get_device_name(device: object = None) -> str:
    return "stand-in"


def get_device_properties(device: object = None) -> types.SimpleNamespace:
    return types.SimpleNamespace(name=get_device_name(device), total_memory=mem_get_info(device)[1])


class device(torch.accelerator.device_index):
    """Another current device, for a while."""

    def __init__(self, device: object) -> None:
        super().__init__(_index(device))


def synchronize(device: object = None) -> None:
    torch.accelerator.synchronize(_index(device))


def current_stream(device: object = None) -> torch.Stream:
    return torch.accelerator.current_stream(_index(device))


def set_stream(stream: torch.Stream) -> None:
    torch.accelerator.set_stream(stream)


@contextmanager
def stream(other: torch.Stream):
    with other:
        yield


def _default_generators() -> tuple[torch.Generator, ...]:
    _C.set_gives_default(True)
    try:
        return tuple(torch.Generator(f"{NAME}:{i}") for i in range(device_count()))
    finally:
        _C.set_gives_default(False)


default_generators = _default_generators()


def get_rng_state(device: object = NAME) -> torch.Tensor:
    return default_generators[_index(device)].get_state()


def set_rng_state(state: torch.Tensor, device: object = NAME) -> None:
    default_generators[_index(device)].set_state(state)


def manual_seed(seed: int) -> None:
    default_generators[_index()].manual_seed(seed)


def manual_seed_all(seed: int) -> None:
    for generator in default_generators:
        generator.manual_seed(seed)


def initial_seed() -> int:
    return default_generators[_index()].initial_seed()


def memory_stats(device: object = None) -> dict:
    return torch.accelerator.memory_stats(_index(device))


def memory_allocated(device: object = None) -> int:
    return torch.accelerator.memory_allocated(_index(device))


def max_memory_allocated(device: object = None) -> int:
    return torch.accelerator.max_memory_allocated(_index(device))


def memory_reserved(device: object = None) -> int:
    return torch.accelerator.memory_reserved(_index(device))


def max_memory_reserved(device: object = None) -> int:
    return torch.accelerator.max_memory_reserved(_index(device))


def reset_peak_memory_stats(device: object = None) -> None:
    torch.accelerator.reset_peak_memory_stats(_index(device))


def mem_get_info(device: object = None) -> tuple[int, int]:
    return torch.accelerator.get_memory_info(_index(device))


empty_cache = torch.accelerator.empty_cache

# What only a stand-in has.

set_lazy = _C.set_lazy
"""Let asynchronous copies run as late as they may.

On side streams that is when somebody waits for them, on the default stream when the host waits for it or an
op needs one of their blocks. A copy that no event puts behind the op that makes its source gives zeros.
"""
sleep = _C.sleep
"""Keep the current stream busy for some seconds, which take none of the host's time."""
set_efficient_attention = _C.set_efficient_attention
"""Attention by `_scaled_dot_product_efficient_attention`, as on CUDA: one op with a seed, not its steps."""
set_flash_attention = _C.set_flash_attention
"""Attention by `_scaled_dot_product_flash_attention`, as on CUDA, for halves without a mask.

The op returns integers, two tensors that are None, and its random state (seed and offset, uint64) besides.
"""
set_overrideable_attention = _C.set_overrideable_attention
"""Attention by `_scaled_dot_product_fused_attention_overrideable`, which torch has for devices like this one.

It takes all kinds of numbers and masks. The op returns integers, tensors that are None, seed and offset.
"""
set_vendor_batch_norm = _C.set_vendor_batch_norm
"""Batch norm by `cudnn_batch_norm` and `cudnn_batch_norm_backward`, which round otherwise than torch's own.

As on CUDA, `F.batch_norm`, `_batch_norm_with_update` (also `_functional`) and `batch_norm_backward` choose
them, for float and half (not bfloat16) inputs of three and more dimensions, if
`torch.backends.cudnn.enabled`. Torch's own stay `native_batch_norm`, `_native_batch_norm_legit*` and
`native_batch_norm_backward`; a trace of `F.batch_norm` has those.
"""
set_vendor_recurrent = _C.set_vendor_recurrent
"""LSTM, GRU and RNN by `_cudnn_rnn` and `_cudnn_rnn_backward`: one op for all steps, which rounds otherwise.

As on CUDA, a trace has torch's decompositions instead, the op keeps reserved bytes whose number its fake
kernel does not know, and dropout between layers has a state of its own, which starts over where the
device's generator is seeded or set. Switched on before a model is moved to the device, all weights of a layer
share one storage (`flatten_parameters`, which as on CUDA asks tensors for their pointers, and so raises a
RuntimeError where a layer is traced with other weights).
`torch.backends.cudnn.enabled = False` turns all of it off. Then, and without the switch, layers go by
`_thnn_fused_lstm_cell` and `_thnn_fused_gru_cell`.
"""
set_matmul_workspace = _C.set_matmul_workspace
"""Bytes that every thread keeps from its first matrix product on, as torch does for cuBLAS; 0 for none."""
take_races = _C.take_races
"""Accesses of one block by two streams that no event orders, since the last call."""
num_ops = _C.num_ops


_SWITCHES = (
    set_lazy,
    set_efficient_attention,
    set_flash_attention,
    set_overrideable_attention,
    set_vendor_batch_norm,
    set_vendor_recurrent,
)


def set_capacity(nbytes: int | None, device: object = None) -> None:
    """Raise torch.OutOfMemoryError where more would be reserved."""
    _C.set_capacity(_index(device), nbytes)


def reset() -> None:
    """All switches off, no capacity."""
    for switch in _SWITCHES:
        switch(False)
    set_matmul_workspace(0)
    for index in range(device_count()):
        set_capacity(None, index)


def _register() -> None:
    torch._register_device_module(NAME, sys.modules[__name__])
    torch.utils.generate_methods_for_privateuse1_backend(unsupported_dtype=[torch.quint8])
    from torch._dynamo import device_interface

    class Interface(device_interface.DeviceInterface):
        Stream, Event, device = torch.Stream, torch.Event, sys.modules[__name__].device

        class Worker:
            current_device = staticmethod(current_device)
            set_device = staticmethod(set_device)
            get_device_properties = staticmethod(get_device_properties)

        current_device = staticmethod(current_device)
        set_device = staticmethod(set_device)
        device_count = staticmethod(device_count)
        is_available = staticmethod(is_available)
        stream = staticmethod(stream)
        current_stream = staticmethod(current_stream)
        set_stream = staticmethod(set_stream)
        synchronize = staticmethod(synchronize)
        memory_allocated = staticmethod(memory_allocated)
        is_bf16_supported = staticmethod(is_bf16_supported)
        exchange_device = staticmethod(torch._C._accelerator_exchangeDevice)
        maybe_exchange_device = staticmethod(torch._C._accelerator_maybeExchangeDevice)

    for name in (NAME, *(f"{NAME}:{i}" for i in range(device_count()))):
        device_interface.register_interface_for_device(name, Interface)


def _as_cuda() -> None:
    """Teach torch's Python what it knows of CUDA alone: vendor ops, and decompositions in their place."""
    ask, nbytes = torch._C._select_batch_norm_backend, torch._C._get_cudnn_batch_norm_reserve_space_size

    def backend(input, weight, bias, mean, var, training, eps):
        if _C.batch_norm_by_vendor(input, weight, bias, mean, var, training):
            return torch._C._BatchNormBackend.Cudnn
        return ask(input, weight, bias, mean, var, training, eps)

    def reserved(input, training):
        return _C.batch_norm_reserved(input) if input.device.type == NAME else nbytes(input, training)

    formatted = torch._C._conv_determine_backend_memory_format

    def convolution_format(input, weight, backend):
        is_own = input.device.type == NAME
        return _C.convolution_format(input, weight) if is_own else formatted(input, weight, backend)

    torch._C._conv_determine_backend_memory_format = convolution_format
    torch._C._select_batch_norm_backend = backend
    torch._C._get_cudnn_batch_norm_reserve_space_size = reserved
    key = torch._C.DispatchKey
    for op in ("lstm", "gru", "rnn_tanh", "rnn_relu"):
        for overload in ("input", "data"):
            layer = getattr(getattr(torch.ops.aten, op), overload)
            layer.py_impl(key.AutogradPrivateUse1)(layer.py_kernels[key.Autograd])
    flatten = torch.nn.RNNBase.flatten_parameters

    def flatten_parameters(self: torch.nn.RNNBase) -> None:
        flatten(self)
        weights = self._flat_weights
        if not _C.has_vendor_recurrent() or not all(
            isinstance(w, torch.Tensor) and w.device.type == NAME for w in weights
        ):
            return
        if len({weight.data_ptr() for weight in weights}) == len(weights):
            _flatten(weights)

    torch.nn.RNNBase.flatten_parameters = flatten_parameters


def _flatten(weights: list[torch.Tensor]) -> None:
    """Move weights side by side into one storage."""
    with torch.no_grad():
        flat = torch.cat([weight.flatten() for weight in weights])
        start = 0
        for weight in weights:
            weight.set_(flat.untyped_storage(), start, weight.shape, weight.contiguous().stride())
            start += weight.numel()


def _register_collectives() -> None:
    from torch import distributed

    def create(store, rank: int, size: int, timeout):
        return _C.Collectives(distributed.ProcessGroupGloo(store, rank, size, timeout))

    distributed.Backend.register_backend(NAME, create, devices=[NAME])


_register()
_as_cuda()
_register_collectives()


def autoload() -> None:
    """What torch calls when it is imported; the import of this module has done it all."""
