"""Outputs of graphs that frames of Python keep live between the graphs of a forward pass.

    def forward(self, v):            def forward(self, v):        def rest(r, v):        def rest_2(r, v):
        for block in self.blocks:        r = block(v)                 v = v + r              v = v + r
            v = v + block(v)      ==>    return rest(r, v)            r = block(v)           return v
        return v                                                      return rest_2(r, v)

At a graph break, torch.compile calls the rest of a function as a function of its own: each of these frames
keeps its `r` and `v` live until the last one returns. Eager has one frame, and drops them as it goes.
"""

import inspect
from collections.abc import Mapping
from pathlib import Path
from types import FrameType

import torch

from lowtide.torch_compat.dispatch import has_storage, storage_key
from lowtide.trace.model_call import tensors_behind

LOWTIDE = str(Path(__file__).parents[1])
TORCH, LAYERS = (str(Path(torch.__file__).parent.joinpath(*parts)) for parts in ((), ("nn",)))
OUTERMOST = str(Path(__file__).with_name("trace_model.py"))
"""Calls the model."""


def outputs_in_frames(made: Mapping[int, tuple[int, int]]) -> frozenset[tuple[int, int]]:
    """Each (execution, output) in `made`, by its storage, that a local variable of the model's code names.

    The frames of lowtide and of torch's machinery do not count: these drop what they pass on.
    """
    found: set[tuple[int, int]] = set()
    frame: FrameType | None = inspect.currentframe() if made else None
    while frame is not None and frame.f_code.co_filename != OUTERMOST:
        if _is_of_model(frame.f_code.co_filename):
            found |= {made[key] for key in _storages_in(frame) if key in made}
        frame = frame.f_back
    return frozenset(found)


def _storages_in(frame: FrameType) -> list[int]:
    variables = frame.f_locals
    tensors = tensors_behind(variables.values())
    found = [storage_key(tensor) for tensor in tensors if has_storage(tensor)]
    if frame.f_code.co_flags & inspect.CO_OPTIMIZED and type(variables) is dict:
        variables.clear()  # before Python 3.13 a copy, which stays with the frame and keeps old values live
    return found


def _is_of_model(file: str) -> bool:
    return not file.startswith(LOWTIDE) and (not file.startswith(TORCH) or file.startswith(LAYERS))
