"""The device of a step, from the tensors of a model and its batch, or from the values of its graphs."""

from collections.abc import Iterable
from itertools import chain

import torch
from torch import Tensor, nn

from lowtide.ops.device_memory import common_device
from lowtide.torch_compat.dispatch import iter_tensors
from lowtide.trace.identity import user_tensors
from lowtide.trace.segments import Trace


def device_of(model: nn.Module, batch: object) -> torch.device:
    """The device of a step of this model on this batch."""
    return common_device(user_tensors(model, batch))


def devices_of(model: nn.Module, batch: object) -> set[torch.device]:
    """The devices of all tensors that a step of this model on this batch starts from."""
    return {tensor.device for tensor in user_tensors(model, batch)}


def device_of_trace(traced: Trace, tensors: Iterable[Tensor] = ()) -> torch.device:
    """The device of a traced step: of all values of its graphs, and of `tensors` that no graph may read."""
    nodes = (node for execution in traced.executions for node in execution.segment.joint.graph.nodes)
    values = chain.from_iterable(iter_tensors(node.meta.get("val")) for node in nodes)
    return common_device(chain(values, tensors))
