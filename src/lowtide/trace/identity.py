"""Names and hashes by which the stages of lowtide recognize graphs, tensors and models.

- graphs: `key_of` for a Dynamo graph, `fingerprint` and `structure` for a joint graph
- tensors: `Origin`, the user's name for an input of a graph
- models and batches: `identify`, in words that can be compared and shown
- modules: `name_modules`, their paths in the model, written into a captured graph
"""

import dataclasses
import hashlib
import operator
import re
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import fx, nn
from torch.utils import _pytree as pytree

from lowtide.facts import Graph, Kind
from lowtide.ops.calls import target_name
from lowtide.torch_compat import autograd_engine, dispatch, dynamo
from lowtide.torch_compat.dispatch import local, storage_key
from lowtide.torch_compat.fsdp2 import gathered
from lowtide.trace.model_call import tensors_in

if TYPE_CHECKING:
    from lowtide.trace.segments import Segment


STACKS = ("nn_module_stack", "fwd_nn_module_stack")
ROOT = re.compile(r"^L\['\w+'\]")
"""The module, in torch's notes, whose function runs."""


class _NoKey(Exception):
    """A graph contains something that cannot be compared."""


def key_of(graph: fx.GraphModule) -> Hashable | None:
    """A key of a Dynamo graph in the current setting; None for a graph that cannot be compared."""
    numbers: dict[fx.Node, int] = {}
    storages: dict[int, int] = {}
    try:
        nodes = []
        for node in graph.graph.nodes:
            nodes.append(_node_key(node, numbers, storages))
            numbers[node] = len(numbers)
    except _NoKey:
        return None
    return (*nodes, *_setting())


def _node_key(node: fx.Node, numbers: dict[fx.Node, int], storages: dict[int, int]) -> Hashable:
    if node.op == "placeholder":
        return _input_key(node, storages)
    if node.op not in ("call_function", "call_method", "output"):
        raise _NoKey  # a module or a constant inside of the graph
    return node.op, node.target, _freeze(node.args, numbers), _freeze(node.kwargs, numbers)


def _input_key(node: fx.Node, storages: dict[int, int]) -> Hashable:
    value = node.meta.get("example_value")
    grapharg = node.meta.get("grapharg")
    example = None if grapharg is None else grapharg.example
    if not isinstance(value, torch.Tensor) or not isinstance(example, torch.Tensor):
        raise _NoKey
    if grapharg is not None and grapharg.pass_arg_as_tensor:
        raise _NoKey  # torch may know more of a number than the graph says
    if type(example) not in (torch.Tensor, torch.nn.Parameter) or value.layout is not torch.strided:
        raise _NoKey
    return (
        str(node.target),
        type(example),
        id(example) if isinstance(example, torch.nn.Parameter) else 0,
        storages.setdefault(storage_key(example), len(storages)),
        _freeze((*value.shape, *value.stride(), value.storage_offset()), {}),
        value.dtype,
        value.device,
        value.requires_grad,
        example.is_leaf,
    )


def _freeze(value: Any, numbers: dict[fx.Node, int]) -> Hashable:
    """An argument in a form that can be compared; the type tells 1 from 1.0 and from True."""
    if isinstance(value, fx.Node):
        return "node", numbers[value]
    if isinstance(value, tuple | list):
        return type(value), *(_freeze(item, numbers) for item in value)
    if isinstance(value, dict):
        return dict, *((key, _freeze(item, numbers)) for key, item in value.items())
    if isinstance(value, slice):
        return slice, *(_freeze(item, numbers) for item in (value.start, value.stop, value.step))
    if isinstance(value, float):
        return float, value.hex()
    if isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool | torch.Tensor):
        raise _NoKey
    if dataclasses.is_dataclass(value) or value.__hash__ is None:
        raise _NoKey
    return type(value), value


def _setting() -> tuple[Hashable, ...]:
    return (
        torch.is_grad_enabled(),
        torch.get_default_dtype(),
        dispatch.dispatch_state(),
        dispatch.onednn_is_enabled(),
        torch.is_autocast_cache_enabled(),
        *autograd_engine.autocast_settings(),
    )


def structure(graph: fx.GraphModule) -> str:
    """A short hash of a graph's ops and their inputs, independent of shapes and numbers."""
    index = {node: position for position, node in enumerate(graph.graph.nodes)}
    digest = hashlib.sha256()
    for node in graph.graph.nodes:
        reads = " ".join(str(index[source]) for source in node.all_input_nodes)
        part = node.args[1] if node.target is operator.getitem else ""
        target = "" if node.op == "placeholder" else target_name(node.target)
        digest.update(f"{node.op} {target} {part} {reads}\n".encode())
    return digest.hexdigest()[:16]


def fingerprint(graph: fx.GraphModule, num_forward_outputs: int | None, weights: Iterable[str]) -> str:
    """A short hash of a graph: ops, order, arguments, shapes, and names of the parameters and buffers that it
    reads. The names tell equal blocks of one model apart. Processes train one model on devices of one kind:
    the index of a device is left out.
    """
    index = {node: position for position, node in enumerate(graph.graph.nodes)}

    def plain(value: Any) -> str:
        if isinstance(value, fx.Node):
            return f"%{index[value]}"
        if isinstance(value, (list, tuple)):
            return "[" + ",".join(plain(item) for item in value) + "]"
        if isinstance(value, dict):
            return "{" + ",".join(f"{key}:{plain(value[key])}" for key in sorted(value)) + "}"
        if isinstance(value, torch.device):
            return repr(torch.device(value.type))
        return target_name(value) if callable(value) else repr(value)

    def made(value: Any) -> str:
        if isinstance(value, torch.Tensor):
            return f"{value.dtype}{tuple(value.shape)}{tuple(value.stride())}{value.device.type}"
        if isinstance(value, (list, tuple)):
            return ",".join(made(item) for item in value)
        return ""

    digest = hashlib.sha256(f"{torch.__version__}|{num_forward_outputs}|{' '.join(weights)}".encode())
    for node in graph.graph.nodes:
        inputs = f"{plain(node.args)} {plain(node.kwargs)}"
        line = f"{node.op} {target_name(node.target)} {inputs} {made(node.meta.get('val'))}\n"
        digest.update(line.encode())
    return digest.hexdigest()[:16]


@dataclass(frozen=True, slots=True)
class Origin:
    """The origin of a graph's input: its kind, the user's name for it, and its identity.

    `tensor` is the `id` of the user's own tensor, 0 for other inputs. Names are for people: a batch may use
    the name of a parameter.
    """

    kind: Kind
    name: str
    tensor: int = 0


def describe_inputs(
    graph: fx.GraphModule,
    origins: Mapping[int, Origin],
    *,
    stranger: Kind,
    identity: Callable[[torch.Tensor], int] = id,
) -> list[Origin]:
    """The origin of each input of a graph. Inputs that are not in `origins` get the kind `stranger` and their
    `identity`."""
    names = [str(node.target) for node in graph.graph.find_nodes(op="placeholder")]
    return [
        origins.get(id(example)) or Origin(stranger, name, 0 if example is None else identity(example))
        for name, example in zip(names, dynamo.graph_inputs(graph), strict=True)
    ]


def name_tensors(model: nn.Module, batch: Any) -> dict[int, Origin]:
    """The user's name of each tensor that a step reads, by identity."""
    origins: dict[int, Origin] = {}
    for path, leaf in pytree.tree_flatten_with_path(batch)[0]:
        if isinstance(leaf, torch.Tensor):
            origins[id(leaf)] = Origin(Kind.INPUT, _path_name(path), id(leaf))
    for name, buffer in model.named_buffers():
        origins[id(buffer)] = Origin(Kind.BUFFER, name, id(buffer))
    for name, parameter in model.named_parameters():
        origins[id(parameter)] = Origin(Kind.PARAMETER, name, id(parameter))
    return origins


def own_origins(model: nn.Module, segment: "Segment", args: Sequence[Any]) -> list[Origin]:
    """The origins of the inputs of one call of a graph: several modules can share one graph.

    A gathered parameter has the origin of the user's own parameter, whose shard this process has.
    """
    known = {storage_key(b): Origin(Kind.BUFFER, name, id(b)) for name, b in model.named_buffers()}
    for name, parameter in model.named_parameters():
        known[storage_key(local(parameter))] = Origin(Kind.PARAMETER, name, id(parameter))
    for name, (whole, own) in gathered(model).items():
        known[storage_key(whole)] = Origin(Kind.PARAMETER, name, id(own))
    origins = list(segment.origins)
    for index, arg in enumerate(args[: len(origins)]):
        if isinstance(arg, torch.Tensor) and storage_key(arg) in known:
            origins[index] = known[storage_key(arg)]
    return origins


def origins_of_run(named: Mapping[int, Origin], segment: "Segment", args: Sequence[Any]) -> list[Origin]:
    """The origins of the inputs of one run of a graph, by the names of their storages: layers with equal code
    share a graph, and each has its own weights."""
    return [
        named.get(storage_key(arg)) or Origin(Kind.OTHER, origin.name, storage_key(arg))
        if isinstance(arg, torch.Tensor)
        else origin
        for arg, origin in zip(args, segment.origins, strict=False)
    ]


def user_tensors(model: nn.Module, batch: Any) -> list[torch.Tensor]:
    """All tensors that a step starts from: parameters, buffers and tensors of the batch."""
    return [*model.parameters(), *model.buffers(), *tensors_in(batch)]


def _path_name(path: tuple[Any, ...]) -> str:
    """`input_ids` for a keyword argument, `input_0` for a positional one."""
    keys = [str(getattr(key, "key", getattr(key, "idx", getattr(key, "name", key)))) for key in path[1:]]
    name = ".".join(keys)
    return f"input_{name}" if name[:1].isdigit() else name


def identify(model: nn.Module, batch: Any) -> tuple[tuple[str, str], ...]:
    """torch's version, the model's class and parameters, and the layout of the batch."""
    return (*identify_model(model), ("batch", layouts(batch)))


def identify_model(model: nn.Module) -> tuple[tuple[str, str], ...]:
    """The part of the identity that does not depend on a batch."""
    digest = hashlib.sha256()
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        digest.update(f"{name} {tensor.dtype}{tuple(tensor.shape)} {tensor.requires_grad}\n".encode())
    count = sum(parameter.numel() for parameter in model.parameters())
    return (
        ("torch", torch.__version__),
        ("model", f"{type(model).__module__}.{type(model).__qualname__}"),
        ("parameters", f"{count} in {digest.hexdigest()[:12]}"),
    )


def identify_inputs(segment: "Segment") -> tuple[str, ...]:
    """The inputs of a graph that come from the batch, each with its layout, in order."""
    return tuple(
        _layout(origin.name, node.meta["val"])
        for node, origin in zip(segment.primals, segment.origins, strict=False)
        if origin.kind is Kind.INPUT and isinstance(node.meta.get("val"), torch.Tensor)
    )


def layouts(batch: Any) -> str:
    """The tensors of a batch, each with its layout."""
    tensors = {id(leaf): leaf for leaf in pytree.tree_leaves(batch) if isinstance(leaf, torch.Tensor)}
    origins = name_tensors(nn.Module(), batch)
    return ", ".join(_layout(origin.name, tensors[key]) for key, origin in origins.items())


def _layout(name: str, tensor: torch.Tensor) -> str:
    """`input_ids int64[4x128]`"""
    shape = "x".join(map(str, tensor.shape))
    return f"{name} {str(tensor.dtype).removeprefix('torch.')}[{shape}]"


def why_unknown(segment: "Segment", planned: Sequence[Graph]) -> str:
    """Why no planned graph matches a graph, as far as the inputs tell."""
    now = identify_inputs(segment)
    alike = [graph.inputs for graph in planned if len(graph.inputs) == len(now)]
    if now in alike:
        return (
            "its inputs are as planned, so the model took another path through its code, or runs in another "
            "setting, such as autocast"
        )
    if not alike:
        return f"it reads {len(now)} inputs of the batch"
    new, old = next(pair for pair in zip(now, alike[0], strict=True) if pair[0] != pair[1])
    return f"its input {new} was planned as {old}"


def name_modules(graph: fx.GraphModule, model: nn.Module) -> None:
    """Write the path in `model` of each op's module into the notes of a captured graph.

    Where a model breaks into several graphs, torch names modules from the function that it resumed in: `a`,
    or `___stack0[1].a`, where the model has `blocks.1.a`. Its notes have the modules' identities as well.
    """
    names = {str(id(module)): name for name, module in model.named_modules()}
    stacks = [
        (node, kind, stack) for node in graph.graph.nodes for kind in STACKS if (stack := node.meta.get(kind))
    ]
    prefixes = {
        prefix for _, _, stack in stacks if (prefix := _prefix(next(iter(stack.items())), names)) is not None
    }
    for node, kind, stack in stacks:
        key, (_, cls) = list(stack.items())[-1]
        if key in names:
            node.meta[kind] = {key: (_path(names[key]), cls)}
    if len(prefixes) == 1 and (prefix := prefixes.pop()):
        for node in graph.graph.nodes:
            if node.op == "call_function" and not any(node.meta.get(kind) for kind in STACKS):
                node.meta[STACKS[0]] = {"": (_path(prefix), nn.Module)}


def _path(name: str) -> str:
    return f"L['self'].{name}" if name else "L['self']"


def _prefix(entry: tuple[str, tuple[str, Any]], names: Mapping[str, str]) -> str | None:
    """The path of the module whose function runs; None where an entry does not tell."""
    key, (path, _) = entry
    root, name = ROOT.match(path), names.get(key)
    if root is None or name is None:
        return None
    within = path[root.end() :].lstrip(".")
    if not within:
        return name
    return name.removesuffix(within).removesuffix(".") if f".{name}".endswith(f".{within}") else None
