"""torchvision beside a torch that its compiled ops are not built for, such as one for CUDA beside one for
the CPU: it is imported with the two names that it needs, and what trains here calls neither."""

import importlib.util
from pathlib import Path

import torch

NAMES = ("nms", "qnms")


def define_missing() -> torch.library.Library | None:
    """The definitions, to be kept; None where torchvision's own load, or where it is not installed."""
    found = importlib.util.find_spec("torchvision")
    if found is None or found.origin is None:
        return None
    try:
        for path in Path(found.origin).parent.glob("_C*.so"):
            torch.ops.load_library(path)
        return None
    except OSError:
        library = torch.library.Library("torchvision", "DEF")
        for name in NAMES:
            library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        return library
