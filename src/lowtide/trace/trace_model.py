"""Trace a model's forward and backward pass into joint graphs, without running either.

Dynamo and AOTAutograd trace the model on fake tensors. Where a model breaks into several graphs, the first
graph passes fake outputs to the second: nothing is computed and no memory is needed. Only a model whose
Python code reads values between two graphs needs a real forward pass.
"""

import contextlib
import functools
import logging
import types
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from lowtide.errors import CaptureError, LowtideError
from lowtide.facts.gpus import Gpu
from lowtide.garbage import uncollected
from lowtide.parallel.fsdp_units import compiled_model
from lowtide.parallel.simulated_sharding import SimulatedSharding
from lowtide.torch_compat import dispatch, dynamo, fsdp2
from lowtide.torch_compat.aot_autograd import Orders
from lowtide.torch_compat.modules import backward_hooks_replaced
from lowtide.trace import failures
from lowtide.trace.batch_arguments import mismatch
from lowtide.trace.collector import Collector
from lowtide.trace.compile_settings import compiled
from lowtide.trace.model_call import own_loss, sum_of_floats, tensors_in
from lowtide.trace.segments import Execution, Trace, TracedModel
from lowtide.trace.step_device import device_of
from lowtide.trace.tangents import new_orders
from lowtide.trace.uncaptured import (
    UncapturedCode,
    UncapturedWatch,
    bytes_saved_by_autograd,
    hook_stand_in,
    leaves_behind,
)
from lowtide.trace.user_state import user_state_restored
from lowtide.units import format_size

logger = logging.getLogger("lowtide")

DOES_NOT_FIT = (RuntimeError, ValueError, IndexError)
"""torch's errors where the shapes of a loss's input and targets do not match."""


def trace(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    loss: Callable[[Any], torch.Tensor] | None,
    any_loss: bool = False,
    simulated: SimulatedSharding | None = None,
    gpu: Gpu | None = None,
    orders: Orders | None = None,
    read_outputs: Mapping[str, Collection[int]] | None = None,
) -> Trace:
    """Trace one forward pass and its loss; run a real forward only where fake values are not enough.

    With `any_loss`, `loss` may not fit this output: then the loss is left out, and every output may get a
    gradient. `read_outputs` of graphs, by structure, get one besides that of the loss. Gradients have the
    memory `orders`; where other orders are seen, the step is traced again.
    """
    call = _Call(model, args, kwargs, loss, any_loss, simulated, gpu, read_outputs or {})
    known = dict(orders or {})
    while True:
        found = _trace_for(call, known)
        new = {taken: order for taken, order in new_orders(found).items() if taken not in known}
        if not new:
            return replace(found, orders=known)
        known |= new


@dataclass(frozen=True, slots=True)
class _Call:
    """One call of a model, and the loss of its output."""

    model: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    loss: Callable[[Any], torch.Tensor] | None
    any_loss: bool
    simulated: SimulatedSharding | None
    gpu: Gpu | None
    read_outputs: Mapping[str, Collection[int]]

    @property
    def device(self) -> torch.device:
        return device_of(self.model, (self.args, self.kwargs))

    def collector(self, orders: Orders, *, real: bool) -> Collector:
        is_sharded = self.simulated is not None or bool(fsdp2.units_of(self.model))
        watch = None if is_sharded or dispatch.active_modes() else UncapturedWatch(self.device)
        batch = self.args, self.kwargs
        gpu = None if real else self.gpu
        return Collector(self.model, batch, real=real, gpu=gpu, watch=watch, orders=orders)


def _trace_for(call: _Call, orders: Orders) -> Trace:
    """Trace a call for gradients in these memory orders, first on fake values."""
    try:
        with call.collector(orders, real=False) as collector:
            return _trace(call, collector)
    except failures.NeedsValues as wanted:
        if call.gpu is not None:
            raise CaptureError(
                f"the model's Python code needs real values between two graphs ({wanted}), which only the "
                f"{call.gpu.words} could give. "
                + (
                    failures.without_cuda(str(wanted))
                    or "Plan it there, or put what reads them behind @torch._dynamo.disable"
                )
            ) from None
        if call.any_loss and fsdp2.units_of(call.model):
            raise CaptureError(
                f"the model's Python code needs real values between two graphs ({wanted}), which one process "
                "cannot have alone: pad its batches to the shape that was planned on all of them"
            ) from None
        own = sum(tensor.nbytes for tensor in (*call.model.parameters(), *call.model.buffers()))
        logger.warning(
            "the model's Python code needs real values between two graphs (%s): capturing it runs one real "
            "forward pass now, without saved activations. It takes at least %s: %s of parameters and "
            "buffers, and %s for the largest graph so far",
            wanted,
            format_size(own + collector.forward_bytes),
            format_size(own),
            format_size(collector.forward_bytes),
        )
    first_break = collector.first_break
    with call.collector(orders, real=True) as collector:
        collector.first_break = first_break
        return _trace(call, collector)


def _trace(call: _Call, collector: Collector) -> Trace:
    model, simulated, batch = call.model, call.simulated, (call.args, call.kwargs)
    with (
        user_state_restored(model, batch),
        backward_hooks_replaced(model, (*model.parameters(), *tensors_in(batch)), hook_stand_in),
        fsdp2.called_once(model, alone=not collector.real),
        dynamo.quiet(),
        dynamo.forgotten() as kept,
        torch.enable_grad(),
        collector.uncaptured or contextlib.nullcontext(),
        # uncaptured code on real values: its own cycles stay live as long as they can
        uncollected() if collector.real else contextlib.nullcontext(),
    ):
        breaks = dynamo.graph_breaks()
        fits = functools.partial(mismatch, model, call.args, call.kwargs)
        with failures.explained("the model", of_arguments=fits), _values_if_needed(collector):
            units = simulated.units if simulated is not None else ()
            run = compiled_model(model, collector, units=units, watch=collector.note_passage)
            output = run(model, call.args, call.kwargs)
        num_in_model = len(collector.executions)
        if not num_in_model:
            raise CaptureError(failures.nothing_captured(dynamo.graph_breaks() - breaks))
        traced = None
        if isinstance(run, dynamo.Compiled) and num_in_model == 1 and collector.traced and not collector.real:
            traced = TracedModel(model, run, collector.traced)
            run.take_graphs_along()
            kept.append(run)
        returned = frozenset(
            place
            for leaf in tensors_in((output, [vars(module) for module in model.modules()]))
            if (place := collector.where(leaf)) is not None
        )
        if num_in_model == 1 and collector.traced is not None:
            # a graph that reaches the end returns only values that some code reads, in the output or not
            segment = collector.traced.segment
            changed = segment.mutated_inputs
            returned |= {(0, place) for place in range(segment.num_forward_outputs) if place not in changed}
        found = Trace(
            executions=collector.executions,
            returned=returned,
            given=_every_output(collector.executions) & returned,
            num_in_model=num_in_model,
            real_forward=collector.real,
            sharding=simulated.sharding if simulated is not None else fsdp2.sharding_of(model),
            passages=collector.passages,
            first_break=collector.first_break if num_in_model > 1 else "",
        )
        value = own_loss(output) if call.loss is None else None
        if value is None and call.any_loss:
            value = _loss_if_it_fits(call.loss, output, collector)
            if value is None:
                del collector.executions[num_in_model:]
                roots = [tensor for tensor in tensors_in(output) if tensor.requires_grad]
                return replace(found, uncaptured=_uncaptured_code(collector, roots)[0])
        elif value is None:
            with failures.explained("the loss"), _values_if_needed(collector):
                value = _compiled(call.loss or sum_of_floats, collector)(output)
                found = replace(found, has_stand_in_loss=call.loss is None)
        saved: dict[int, int] = {}
        if collector.uncaptured is None:
            saved = bytes_saved_by_autograd(
                tensors_in((output, value)),
                collector.known(model, (call.args, call.kwargs)),
                num_graphs=sum(execution.segment.differentiable for execution in collector.executions),
                device=call.device,
            )
        is_scalar = isinstance(value, torch.Tensor) and value.requires_grad and value.numel() == 1
        read = _read_outputs(call, collector.executions[:num_in_model])
        others = [leaf for leaf in tensors_in(output) if leaf.requires_grad and collector.where(leaf) in read]
        uncaptured, is_counted = _uncaptured_code(collector, [value, *others] if is_scalar else [])
        returned |= collector.live_in_autograd | read
    if (
        not isinstance(value, torch.Tensor)
        or not value.requires_grad
        or _trains_nothing(value, collector, model)
    ):
        raise CaptureError(
            f"the loss of {type(model).__name__} does not depend on any parameter that requires a gradient: "
            "pass `loss=` a function of the model's output that returns a scalar, and look for detach() or "
            "no_grad() in its forward"
        )
    if value.numel() != 1:
        raise CaptureError(
            f"the loss has shape {tuple(value.shape)}, not one element: "
            "pass `loss=` a function that returns a scalar"
        )
    place = collector.where(value)
    return replace(
        found,
        returned=returned if place is None else returned | {place},
        given=_every_output(collector.executions) if place is None else read | {place},
        loss_is_uncaptured=place is None,
        uncaptured_bytes=saved,
        uncaptured=uncaptured,
        uncaptured_is_counted=is_counted,
        received=frozenset(collector.received) if collector.ran_backward and is_counted else None,
        # where a backward pass ran at capture, torch keeps the one that computes nothing
        traced=None if collector.ran_backward else traced,
    )


def _trains_nothing(loss: torch.Tensor, collector: Collector, model: nn.Module) -> bool:
    """Whether a backward pass from the loss ends in tensors that the forward pass made itself, as in
    `x.detach().requires_grad_()`. Any other leaf may be trained: a parameter (a fake tensor, too, of a model
    without memory), a latent in the batch or in a variable, a parameter of the loss."""
    leaves = leaves_behind([loss])
    own = {id(parameter) for parameter in model.parameters()}
    made = (
        id(leaf) not in own and (isinstance(leaf, dispatch.FakeTensor) or collector.where(leaf) is not None)
        for leaf in leaves
    )
    return bool(leaves) and all(made)


def _uncaptured_code(
    collector: Collector, roots: Sequence[torch.Tensor]
) -> tuple[UncapturedCode | None, bool]:
    """The bytes that uncaptured code keeps live, and whether all were seen. The backward pass of the code
    runs, with gradients from graphs that compute nothing."""
    if collector.uncaptured is None:
        return None, False
    gradients: dict[int, torch.Tensor] = {}
    is_counted = True
    has_backward = any(execution.from_uncaptured for execution in collector.executions)
    if roots and (has_backward or any(collector.where(root) is None for root in roots)):
        try:
            gradients = collector.run_backward(roots)
        except Exception as error:
            if not collector.real and collector.gpu is None:
                raise failures.NeedsValues(failures.in_plain_words(error)) from error
            is_counted = False
    return collector.uncaptured.result(gradients), is_counted


def _read_outputs(call: _Call, executions: Sequence[Execution]) -> frozenset[tuple[int, int]]:
    """The outputs that are known to get a gradient besides that of the loss."""
    return frozenset(
        (index, output)
        for index, execution in enumerate(executions)
        for output in call.read_outputs.get(execution.segment.structure, ())
    )


def _every_output(executions: Sequence[Execution]) -> frozenset[tuple[int, int]]:
    """All outputs that can get a gradient."""
    return frozenset(
        (index, output)
        for index, execution in enumerate(executions)
        for output in execution.segment.tangents.values()
    )


def _loss_if_it_fits(
    loss: Callable[[Any], torch.Tensor] | None, output: Any, collector: Collector
) -> torch.Tensor | None:
    """The loss of an output of another batch; None where the targets in `loss` do not fit."""
    if loss is None:
        return None
    failed_ops = dynamo.FailedOps.count
    try:
        value = _compiled(loss, collector)(output)
    except Exception as error:
        if dynamo.FailedOps.count == failed_ops and not isinstance(failures.first_cause(error), DOES_NOT_FIT):
            logger.warning(
                "the loss cannot be captured for this batch (%s): the batch is planned without its loss, as "
                "if every output got a gradient",
                failures.describe(error),
            )
        return None
    return value if isinstance(value, torch.Tensor) and value.requires_grad and value.numel() == 1 else None


@contextlib.contextmanager
def _values_if_needed(collector: Collector) -> Iterator[None]:
    """Raise `NeedsValues` where code between two graphs fails on fake values: real ones may do."""
    try:
        yield
    except (LowtideError, dynamo.TorchDynamoException):
        raise
    except Exception as error:
        if collector.real or not collector.executions:
            raise
        raise failures.NeedsValues(failures.in_plain_words(error)) from error


def _compiled(function: Callable[..., Any], backend: Callable[..., Any]) -> dynamo.Compiled:
    if isinstance(function, types.FunctionType) and function.__closure__ is None:
        function = dynamo.own_code(function)
    return compiled(function, backend)
