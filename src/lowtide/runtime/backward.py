"""A graph's backward pass, by the outputs that got a gradient."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import fx

from lowtide.analyze.gradient_sums import specialised
from lowtide.errors import Unsupported
from lowtide.generators import random_state
from lowtide.ops.random_ops import drawing_from
from lowtide.runtime.continued_sums import Continued, ScheduledSums, received
from lowtide.runtime.executor import Executor, ExecutorInParts, Function, Parts
from lowtide.runtime.graph_call import Gates, GradientGates, waiting_chain, with_handovers
from lowtide.runtime.rewrite import Rewritten, baseline_schedule, rewrite
from lowtide.runtime.shared_gradients import SharedGates, in_shared_parts
from lowtide.torch_compat import aot_autograd
from lowtide.torch_compat.autograd_engine import nodes_after_this, silence_hooks
from lowtide.torch_compat.dispatch import in_transform
from lowtide.torch_compat.gradient_edges import inside_planned_graph
from lowtide.trace.segments import Segment
from lowtide.trace.tangents import drop_zeros


def refuse_transforms(gradients: Sequence[Any] = ()) -> None:
    """Raise `Unsupported` where a planned graph, or its backward pass with `gradients`, would run inside of a
    transform."""
    if in_transform(gradients):
        raise Unsupported(
            "the planned model is called or differentiated inside of a transform (vmap, grad or jvp of "
            "torch.func, forward-mode gradients, a vectorized jacobian), and a plan is for a call and its "
            "backward(): lowtide.remove(model), or transform a copy of the model without a plan"
        )


class _Start(NamedTuple):
    """The inputs and random states before a forward pass."""

    inputs: list[Any]
    random_states: dict[str, torch.Tensor]
    """of the generators of the graph's devices"""


class FirstCalls:
    """The start of a graph's call, until a backward pass has shown which outputs get a gradient.

    A plan expects no gradient for some outputs. Where one arrives, the saved values do not suffice, and the
    forward pass runs once more from its start. After several calls before a backward pass, the call of the
    gradient is unknown, so no start is kept.
    """

    def __init__(self, segment: Segment) -> None:
        self.segment: Segment | None = segment
        self._devices = _devices_of(segment)
        self._start: _Start | None = None
        self._num_calls = 0

    def start_of(self, inputs: Sequence[Any]) -> _Start | None:
        """The start of a forward pass, taken before it runs."""
        return (
            None
            if self.segment is None
            else _Start(self._copied(inputs), {device: random_state(device) for device in self._devices})
        )

    def _copied(self, inputs: Sequence[Any]) -> list[Any]:
        """The inputs, with copies of those that the graph changes."""
        assert self.segment is not None
        changed = set(self.segment.mutated_inputs.values())
        return [value.clone() if place in changed else value for place, value in enumerate(inputs)]

    def note(self, start: _Start | None) -> None:
        """Record a forward pass that has ended."""
        self._num_calls += 1
        self._start = start if self._num_calls == 1 else None

    def are_as_planned(self) -> None:
        """A backward pass got the expected gradients: keep no start from now on."""
        self.segment = self._start = None

    def take(self, output: int) -> tuple[Segment, _Start]:
        """The graph and the start of its only call, for an unexpected gradient of `output`."""
        segment, start = self.segment, self._start
        if segment is None or start is None:
            raise Unsupported(
                f"a gradient arrived for output {output} of the model, but the plan was made for a "
                "loss that does not use it. Pass `loss=` the function that your loop really uses"
            )
        self._start, self._num_calls = None, 0
        return segment, start


_Kind = tuple[frozenset[int], Continued]
"""Outputs without a gradient, and inputs whose sums continue."""


class Backward:
    """Runs a graph's backward pass. `used` gets the outputs with an unexpected gradient.

    Where the inputs have `gates`, or gates of `shared` inputs, the graph returns the first gradients, and
    the gates run the rest. Where later uses of inputs gave their gradients, the graph continues the sums
    (`sums`).
    `skips_parameters`: some parameters get no gradient under any loss.
    """

    def __init__(
        self,
        rewritten: Rewritten,
        planned_missing: frozenset[int],
        apart: frozenset[int],
        inputs: Sequence[Any],
        executor: Executor,
        *,
        first_calls: FirstCalls,
        used: Callable[[frozenset[int]], None],
        gates: GradientGates | None = None,
        shared: SharedGates | None = None,
        sums: ScheduledSums | None = None,
        skips_parameters: bool = False,
    ) -> None:
        self.rewritten = rewritten
        self.planned_missing = planned_missing
        self.apart = apart
        self.inputs = tuple(inputs)
        self.executor = executor
        self.first_calls = first_calls
        self.used = used
        self.gates = [each for each in (gates, shared) if each is not None]
        self.sums = sums
        self.skips_parameters = skips_parameters
        self._functions: dict[_Kind, Function] = {
            (planned_missing, ()): executor(rewritten.backward, inputs, is_backward=True)
        }
        self._parts: dict[tuple[_Kind, bool], Parts] = {}

    def __call__(self, args: list[Any]) -> Any:
        tangents = self.rewritten.tangents
        given = args[self.rewritten.num_saved :]
        missing = frozenset(output for output, value in zip(tangents, given, strict=True) if value is None)
        del given
        if self.planned_missing - missing:
            return self._from_the_start(args, missing)
        if self.first_calls.segment is not None:
            self.first_calls.are_as_planned()
        if missing or self.skips_parameters:
            silence_hooks()
        kind = missing, self._receive(args)
        chain = waiting_chain(self.gates) if self.gates else None
        if chain is not None:
            return chain.begin(self._in_parts(kind, chain.gates), args)
        if kind not in self._functions:
            self._functions[kind] = self.executor(self._backward(kind), self.inputs, is_backward=True)
        with inside_planned_graph():
            return self._functions[kind](args)

    def _receive(self, args: list[Any]) -> Continued:
        """Append the gradients that later uses of the graph's inputs have given."""
        if self.sums is None:
            return ()
        continued, gradients = received(nodes_after_this())
        args += gradients
        return continued

    def _in_parts(self, kind: _Kind, gates: Gates) -> Parts:
        is_shared = isinstance(gates, SharedGates)
        key = kind, is_shared
        if key not in self._parts:
            assert isinstance(self.executor, ExecutorInParts)
            planned = kind == (self.planned_missing, ())
            module = self.rewritten.backward if planned else self._backward(kind)
            in_parts = in_shared_parts if is_shared else with_handovers
            parts = in_parts(module, gates.groups)
            self._parts[key] = self.executor.in_parts(parts, self.inputs)
        return self._parts[key]

    def _backward(self, kind: _Kind) -> fx.GraphModule:
        missing, continued = kind
        source = self.rewritten.backward
        if continued:
            assert self.sums is not None
            source = self.sums.backward(continued)
        graph = fx.Graph()
        graph.output(graph.graph_copy(source.graph, {}))
        module = aot_autograd.graph_module(source, graph)
        inputs = module.graph.find_nodes(op="placeholder")[self.rewritten.num_saved :]
        by_output = dict(zip(self.rewritten.tangents, inputs, strict=False))
        drop_zeros(module, tangents=set(inputs), missing={by_output[output] for output in missing})
        return module

    def _from_the_start(self, args: list[Any], missing: frozenset[int]) -> Any:
        """Run the forward pass again, save all values as eager does, and then run backward."""
        surprising = self.planned_missing - missing
        segment, start = self.first_calls.take(min(surprising))
        self.used(surprising)
        baseline = specialised(segment, missing=missing, apart=self.apart)
        schedule, in_place = baseline_schedule(baseline), self.executor.in_place
        rewritten = rewrite(baseline, schedule, in_place=in_place)
        if continued := self._receive(args):
            sums = ScheduledSums(baseline, schedule, rewritten, in_place)
            rewritten = replace(rewritten, backward=sums.backward(continued))
        forward = self.executor(rewritten.forward, _fake_inputs(rewritten.forward), is_backward=False)
        backward = self.executor(rewritten.backward, _fake_inputs(rewritten.backward), is_backward=True)
        given = args[self.rewritten.num_saved :]
        args.clear()
        with drawing_from(start.random_states):
            results = forward(start.inputs)
        saved = list(results[segment.num_forward_outputs :])
        del results
        return backward([*saved, *given])


def _devices_of(segment: Segment) -> list[str]:
    """The devices of a graph's values, and the CPU, where dropout of whole layers draws."""
    values = [node.meta.get("val") for node in segment.joint.graph.nodes]
    return sorted({"cpu", *(str(value.device) for value in values if isinstance(value, torch.Tensor))})


def _fake_inputs(module: fx.GraphModule) -> list[Any]:
    return [node.meta["val"] for node in module.graph.find_nodes(op="placeholder")]
