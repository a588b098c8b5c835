"""What is known beforehand not to be traceable, each refused in one line with the next step."""

from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from lowtide.capture.graphs import Segment, Trace, mutated_inputs
from lowtide.errors import CaptureError
from lowtide.torchside import hooks
from lowtide.torchside.batch import tensors_in

ORDINARY = (torch.Tensor, nn.Parameter, nn.Buffer)


def refuse_what_cannot_be_traced(model: nn.Module, batch: Any) -> None:
    """Raise a `CaptureError` for a model or a batch on which tracing fails in torch's own words, or harms."""
    named = (*model.named_parameters(), *model.named_buffers())
    lazy = next((name for name, tensor in named if is_lazy(tensor)), None)
    if lazy is not None:
        raise CaptureError(
            f"'{lazy}' of a lazy module has no shape yet: call the model once, on a batch and under "
            "torch.no_grad(), then make the optimizer and plan"
        )
    for tensor in tensors_in(batch):
        if isinstance(tensor, ORDINARY) and type(tensor) not in ORDINARY and not hooks.is_wrapper(tensor):
            raise CaptureError(
                f"the batch has a {type(tensor).__name__}, a kind of tensor that torch.compile does not "
                "trace: pass tensor.as_subclass(torch.Tensor), here and in training"
            )


def refuse_several_graphs(traced: Trace) -> None:
    """Raise a `CaptureError` where a gradient may not be final inside one graph."""
    if traced.num_in_model > 1 or traced.loss_outside or any(e.from_outside for e in traced.executions):
        raise CaptureError(
            f"the model breaks into {traced.num_in_model} graphs, or runs code outside of them, so that a "
            "gradient is final only when all have run: leave step_in_backward out, or remove the graph "
            "breaks (torch._dynamo.explain shows them)"
        )


def refuse_empty_buffers(segment: Segment) -> None:
    """Raise a `CaptureError` where the forward pass fills an empty buffer, as observers do the first time."""
    inputs = segment.joint.graph.find_nodes(op="placeholder")
    for index in mutated_inputs(segment.joint).values():
        if inputs[index].meta["val"].numel() == 0:
            name = segment.origins[index].name if index < len(segment.origins) else inputs[index].name
            raise CaptureError(
                f"the buffer '{name}' is empty until the forward pass has run once: call the model on a "
                "batch, then plan"
            )
