"""The settings of torch that change results, times or memory, for a fresh process that must have them too."""

from typing import Any

import torch

FLAGS: tuple[str, ...] = (
    "cudnn.benchmark",
    "cudnn.deterministic",
    "cudnn.conv.fp32_precision",
    "cudnn.rnn.fp32_precision",
    "cuda.matmul.allow_fp16_reduced_precision_reduction",
    "cuda.matmul.allow_bf16_reduced_precision_reduction",
)
PRECISIONS = ("cuda.matmul.fp32_precision", "mkldnn.matmul.fp32_precision")


def torch_settings() -> dict[str, Any]:
    """The settings of this process."""
    names, matmul = FLAGS, None
    try:
        matmul = torch.get_float32_matmul_precision()
    except RuntimeError:  # precisions were set one by one, and torch has no word for all of them
        names = (*FLAGS, *PRECISIONS)
    return {
        "threads": torch.get_num_threads(),
        "deterministic": torch.get_deterministic_debug_mode(),
        "default dtype": torch.get_default_dtype(),
        "matmul": matmul,
        "backends": {name: _read(name) for name in names},
    }


def use_settings(settings: dict[str, Any]) -> None:
    """Set what differs here."""
    if settings["threads"] != torch.get_num_threads():
        torch.set_num_threads(settings["threads"])
    if settings["deterministic"] != torch.get_deterministic_debug_mode():
        torch.set_deterministic_debug_mode(settings["deterministic"])
    torch.set_default_dtype(settings["default dtype"])
    if settings["matmul"] not in (None, torch.get_float32_matmul_precision()):
        torch.set_float32_matmul_precision(settings["matmul"])
    for name, value in settings["backends"].items():
        if value != _read(name):
            place, _, attribute = name.rpartition(".")
            setattr(_place(place), attribute, value)


def _read(name: str) -> Any:
    place, _, attribute = name.rpartition(".")
    return getattr(_place(place), attribute)


def _place(name: str) -> Any:
    found: Any = torch.backends
    for part in name.split("."):
        found = getattr(found, part)
    return found
