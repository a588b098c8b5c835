"""DTensors (tensor parallelism): graphs that read and return them, as graphs of this process's own parts.

AOTAutograd would take DTensors apart itself, into parts and meshes, under other places than Dynamo's. So a
Dynamo graph gets nodes at its borders, and all of lowtide sees ordinary tensors, one for each input:

    DTensor ── apart ── part ──[ as DTensor ── ops ── part ]── together ── DTensor
                               |       what is planned     |

Gradients go the same way back, each with the placements that it has in eager.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import fx, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._api import _normalize_placements_for_grad

from lowtide.errors import Unsupported
from lowtide.torch_compat import fsdp2
from lowtide.torch_compat.dispatch import waited

OTHER_PLACEMENTS = (
    "result {place} of a planned graph gets a gradient with the placements {found}, and was planned for one "
    "with {expected}: let the model return ordinary tensors (.to_local(), .full_tensor(), or "
    "use_local_output=True), or lowtide.remove(model)"
)


def dtensors_of(model: nn.Module) -> list[DTensor]:
    """The parameters of a model that are divided, also while FSDP2 has them gathered."""
    every = [*model.parameters(), *fsdp2.sharded_parameters(model)]
    return [parameter for parameter in every if isinstance(parameter, DTensor)]


def is_divided(model: nn.Module) -> bool:
    """Whether each process has its own part of a model: shards of FSDP2, or parts of DTensors."""
    return bool(dtensors_of(model))


def group_of(model: nn.Module) -> dist.ProcessGroup | None:
    """The processes of a model's mesh, if all its parameters have the same one with one dimension."""
    meshes = {parameter.device_mesh for parameter in dtensors_of(model)}
    one = next(iter(meshes)) if len(meshes) == 1 else None
    return one.get_group() if one is not None and one.ndim == 1 else None


IS_PART = "lowtide_is_part"
"""In the metadata of an input of a joint graph that is a part of a DTensor."""


LEAVES_WHOLE = "lowtide_leaves_whole"
"""In the metadata of a gradient that is a view of its whole storage."""


class PartOfGradient(NamedTuple):
    """The layout of an input's gradient, and of this process's part of it, which may be larger than the
    input's: the gradient of a divided embedding is a sum over processes that is still to come. Autograd
    takes gradients of the input's shape only. So such a part leaves the graph as a view of its beginning.
    """

    spec: Any
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    def whole(self, beginning: torch.Tensor) -> torch.Tensor:
        is_whole = tuple(beginning.shape) == self.shape
        return beginning if is_whole else beginning.as_strided(self.shape, self.strides, 0)


SMALLER_GRADIENT = (
    "a parameter with the placements {expected} gets a gradient with {found}, of which a process has fewer "
    "numbers: plan a model whose parameters are divided as their gradients are"
)


@dataclass(slots=True)
class Borders:
    """The layouts (torch's specs) of the DTensors that go in and out of a graph, and of the gradients of its
    inputs, by place."""

    inputs: dict[int, Any] = field(default_factory=dict)
    gradients: dict[int, "PartOfGradient"] = field(default_factory=dict)
    results: dict[int, Any] = field(default_factory=dict)

    def around(self, compiled: Callable[..., Any]) -> Callable[..., Any]:
        """The compiled graph of parts as one of DTensors."""
        if not (self.inputs or self.results):
            return compiled

        def call(*args: Any) -> Any:
            values = list(args)
            del args
            for place in self.inputs:
                values[place] = self._part(values[place], place)
            results = list(compiled(*values))
            for place in self.results:
                results[place] = _Together.apply(results[place], self, place)  # type: ignore[no-untyped-call]
            return results

        return call

    def mark(self, joint: fx.Graph) -> None:
        """Mark the inputs of a joint graph that are parts of DTensors, and gradients that leave as views."""
        primals, results = joint.find_nodes(op="placeholder"), joint.output_node().args[0]
        assert isinstance(results, list | tuple)
        described = joint.output_node().meta.get("desc") or ()
        for place in self.inputs:
            primals[place].meta[IS_PART] = True
        for result, description in zip(results, described, strict=False):
            of = getattr(getattr(description, "grad_of", None), "idx", None)
            known = None if of is None else self.gradients.get(of)
            if isinstance(result, fx.Node) and known and tuple(result.meta["val"].shape) != known.shape:
                result.meta[LEAVES_WHOLE] = True

    def _part(self, value: Any, place: int) -> torch.Tensor:
        part: Any = _Apart.apply(value, self, place)  # type: ignore[no-untyped-call]
        part.lowtide_part_of = value, self, place
        return part  # type: ignore[no-any-return]


def whole_of(part: torch.Tensor) -> Any:
    """The DTensor that a planned graph reads this part of; any other tensor itself."""
    return part.lowtide_part_of[0] if hasattr(part, "lowtide_part_of") else part


def edges_to(tensor: torch.Tensor, number: int) -> list[torch.Tensor]:
    """An input of a graph, once for each term of its gradient, in autograd's order. The terms of a part go
    to its DTensor one by one: autograd runs the node that was made last first."""
    if not hasattr(tensor, "lowtide_part_of"):
        return [tensor] * number
    value, borders, place = tensor.lowtide_part_of
    return [borders._part(value, place) for _ in range(number)][::-1]


def local_graph(graph: fx.GraphModule, inputs: Sequence[Any]) -> tuple[Sequence[Any], Borders]:
    """The inputs of a Dynamo graph and its borders, with this process's parts in place of DTensors; the
    graph is changed to take and to return these."""
    borders = Borders({p: value._spec for p, value in enumerate(inputs) if isinstance(value, DTensor)})
    output = graph.graph.output_node()
    (results,) = output.args
    assert isinstance(results, list | tuple)
    returned = [
        place
        for place, node in enumerate(results)
        if isinstance(node, fx.Node) and isinstance(node.meta.get("example_value"), DTensor)
    ]
    if not (borders.inputs or returned):
        return inputs, borders
    parts = parts_of(graph, inputs, borders)
    placeholders = graph.graph.find_nodes(op="placeholder")
    with graph.graph.inserting_after(placeholders[-1]):
        for place in borders.inputs:
            node = placeholders[place]
            made = graph.graph.call_function(_taking(borders, place), (node,))
            made.meta = dict(node.meta)
            node.replace_all_uses_with(made, delete_user_cb=lambda user, made=made: user is not made)
    (results,) = output.args
    assert isinstance(results, list | tuple)
    given = list(results)
    with graph.graph.inserting_before(output):
        for place in returned:
            given[place] = graph.graph.call_function(_giving(borders, place), (given[place],))
    output.args = (type(results)(given),)
    graph.recompile()
    return parts, borders


def parts_of(graph: fx.GraphModule, inputs: Sequence[Any], borders: Borders) -> Sequence[Any]:
    """The inputs of a Dynamo graph, with this process's parts in place of DTensors."""
    parts, placeholders = list(inputs), graph.graph.find_nodes(op="placeholder")
    for place in borders.inputs:
        value = placeholders[place].meta["example_value"]
        parts[place] = value._local_tensor.detach().requires_grad_(value.requires_grad)
    return parts


def _taking(borders: Borders, place: int) -> Callable[[torch.Tensor], Any]:
    def as_dtensor(part: torch.Tensor) -> Any:
        return _AsDTensor.apply(part, borders, place)  # type: ignore[no-untyped-call]

    return as_dtensor


def _giving(borders: Borders, place: int) -> Callable[[Any], Any]:
    def part_of(value: Any) -> Any:
        return _Part.apply(value, borders, place)  # type: ignore[no-untyped-call]

    return part_of


_dtensor: Any = DTensor
"""As torch's own code makes one of a part and a layout."""


class _AsDTensor(torch.autograd.Function):
    """Inside of a graph: an input's part as the DTensor that the model's code reads."""

    @staticmethod
    def forward(ctx: Any, part: torch.Tensor, borders: Borders, place: int) -> Any:
        ctx.set_materialize_grads(False)
        ctx.borders, ctx.place, ctx.shape = borders, place, part.shape
        ctx.passes_sum = True
        return _dtensor(part.detach(), borders.inputs[place], requires_grad=part.requires_grad)

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        if gradient is None:
            return None, None, None
        whole = waited(gradient._local_tensor)
        if whole.shape != ctx.shape:
            whole = whole.contiguous()
        found = PartOfGradient(gradient._spec, tuple(whole.shape), whole.stride())
        ctx.borders.gradients[ctx.place] = found
        if whole.shape == ctx.shape:
            return whole, None, None
        if whole.numel() < ctx.shape.numel():
            raise Unsupported(
                SMALLER_GRADIENT.format(
                    found=gradient.placements, expected=ctx.borders.inputs[ctx.place].placements
                )
            )
        strides = torch.empty(ctx.shape, device="meta").stride()
        return whole.as_strided(ctx.shape, strides, 0), None, None


class _Part(torch.autograd.Function):
    """Inside of a graph: the part of a DTensor that the model's code returns."""

    @staticmethod
    def forward(ctx: Any, value: Any, borders: Borders, place: int) -> torch.Tensor:
        ctx.set_materialize_grads(False)
        ctx.spec = borders.results[place] = value._spec
        return waited(value._local_tensor)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor | None) -> Any:
        return None if gradient is None else _with_gradient_spec(gradient, ctx.spec), None, None


class _Apart(torch.autograd.Function):
    """Outside of a graph: the part of an input."""

    @staticmethod
    def forward(ctx: Any, value: Any, borders: Borders, place: int) -> torch.Tensor:
        ctx.set_materialize_grads(False)
        ctx.borders, ctx.place = borders, place
        part = waited(value._local_tensor)
        return part.view_as(part)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor | None) -> Any:
        if gradient is None:
            return None, None, None
        known = ctx.borders.gradients[ctx.place]
        return _dtensor(known.whole(gradient), known.spec, requires_grad=False), None, None


class _Together(torch.autograd.Function):
    """Outside of a graph: the DTensor of a part that the graph returned."""

    @staticmethod
    def forward(ctx: Any, part: torch.Tensor, borders: Borders, place: int) -> Any:
        ctx.set_materialize_grads(False)
        ctx.place, ctx.spec = place, borders.results[place]
        return _dtensor(part.detach(), ctx.spec, requires_grad=part.requires_grad)

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        if gradient is None:
            return None, None, None
        expected = _normalize_placements_for_grad(ctx.spec.placements)
        if gradient.placements != expected:
            raise Unsupported(
                OTHER_PLACEMENTS.format(place=ctx.place, found=gradient.placements, expected=expected)
            )
        return waited(gradient._local_tensor), None, None


def _with_gradient_spec(gradient: torch.Tensor, spec: Any) -> Any:
    """The part of a gradient as the DTensor that eager's `to_local` would make of it."""
    placements = _normalize_placements_for_grad(spec.placements)
    return DTensor.from_local(
        gradient, spec.mesh, placements, run_check=False, shape=spec.shape, stride=spec.stride
    )
