"""Chains of pointwise ops as one op, chunk by chunk: no value inside a chain is ever whole.

    x ── mul ── tanh ── add ── y        ==>        x ── in_chunks(program of mul, tanh, add) ── y

Every element of a chain needs only that element of its inputs. But kernels work on vectors of elements. Each
thread has a range of elements, and the last elements of a range, which fill no vector, are rounded
differently. So chunks end where vectors end, counted from the start of each thread's range. The rest of a
range is cut so small that no thread divides it further.

`forward_program` recomputes a forward value in chunks. In backward, the gradient of a formula written by hand
(a GELU, say) is a dozen ops that keep several values of its input's size live. `backward_program` makes one
program of these ops and the forward ops that they need. The program reads only the formula's input and the
gradient of its result, and may write over that gradient.
"""

from collections.abc import Container, Iterator
from typing import Any

import torch
from torch import Tensor, fx

from lowtide.ops.random_ops import apply_mask
from lowtide.ops.schema import is_backward, is_view_op, readers
from lowtide.torch_compat.dispatch import FakeTensor, is_number

aten = torch.ops.aten

GRAIN = 32768
"""Fewer elements are never divided among threads; some kernels divide from `SMALL_GRAIN` on."""
SMALL_GRAIN = 2048
VECTOR = 64
"""A multiple of the vector size of every kernel, in elements."""
CHUNK = 2 * GRAIN
"""Elements of a chunk for each thread: few enough to stay in its cache."""
LARGE_CHUNK = 8 * CHUNK
"""Fewer calls of each op, and more bytes."""
FEWEST_CHUNKS = 8
MOST_OPS = 32

POINTWISE = frozenset(
    (
        aten._to_copy.default,
        aten.abs.default,
        aten.add.Scalar,
        aten.add.Tensor,
        aten.alias.default,
        aten.clamp.default,
        aten.clamp_min.default,
        aten.cos.default,
        aten.detach.default,
        aten.div.Scalar,
        aten.div.Tensor,
        aten.elu.default,
        aten.erf.default,
        aten.exp.default,
        aten.gelu.default,
        aten.hardtanh.default,
        aten.leaky_relu.default,
        aten.masked_fill.Scalar,
        aten.mul.Scalar,
        aten.mul.Tensor,
        aten.neg.default,
        aten.pow.Tensor_Scalar,
        aten.reciprocal.default,
        aten.relu.default,
        aten.rsqrt.default,
        aten.rsub.Scalar,
        aten.sigmoid.default,
        aten.silu.default,
        aten.sin.default,
        aten.softplus.default,
        aten.sqrt.default,
        aten.sub.Scalar,
        aten.sub.Tensor,
        aten.tanh.default,
        aten.where.self,
    )
)
"""Ops that give the same bits in chunks as whole: see `tests/ops/test_pointwise_chunks.py`."""

Program = list[Any]
"""Ops in order, each with its arguments; `"%3"` is number 3 of the inputs and results, from 0."""


def in_chunks(
    program: Program,
    inputs: list[Any],
    dtype: torch.dtype,
    size: int = CHUNK,
    *,
    over: int | None = None,
) -> Tensor:
    """The last result of a program over contiguous inputs of one shape, and single numbers.

    The result is written over input `over`, or into new memory. If an input is not contiguous, unlike at
    capture, the program runs on all elements at once.
    """
    whole = next(value for value in inputs if _is_cut(value))
    if isinstance(whole, FakeTensor):
        return torch.empty_like(whole, dtype=dtype) if over is None else inputs[over]
    last = _last_uses(program, len(inputs))
    if not all(value.is_contiguous() for value in inputs if _is_cut(value)):
        return _run(program, {f"%{i}": value for i, value in enumerate(inputs)}, last)  # type: ignore[no-any-return]
    flat = [value.view(-1) if _is_cut(value) else value for value in inputs]
    out = torch.empty_like(whole, dtype=dtype) if over is None else inputs[over]
    flat_out = out.view(-1)
    for first, end in chunks(whole.numel(), torch.get_num_threads(), size):
        some = {f"%{i}": value[first:end] if _is_cut(value) else value for i, value in enumerate(flat)}
        flat_out[first:end] = _run(program, some, last)
    return out


def _is_cut(value: Any) -> bool:
    return isinstance(value, Tensor) and bool(value.dim())


def chunks(count: int, threads: int, size: int = CHUNK) -> Iterator[tuple[int, int]]:
    """The chunks of a tensor of `count` elements, each of about `size` elements for each thread."""
    if count < threads * GRAIN:  # some kernels would divide the whole among fewer threads than others
        yield 0, count
        return
    part = -(-count // threads)
    for begin in range(0, count, part):
        end = min(count, begin + part)
        number = (end - begin) // (threads * size)
        step = (end - begin) // max(1, number) // (VECTOR * threads) * VECTOR * threads
        for place in range(begin, begin + number * step, max(1, step)):
            yield place, place + step
        for rest in range(begin + number * step, end, SMALL_GRAIN):
            yield rest, min(end, rest + SMALL_GRAIN)


def _run(program: Program, values: dict[str, Any], last: dict[str, int]) -> Any:
    """Run a program; every value is freed after its last use."""
    result = None
    for number, (op, args, kwargs) in enumerate(program, start=len(values)):
        result = op(*(values[arg] if _is_name(arg) else arg for arg in args), **kwargs)
        for name in {arg for arg in args if _is_name(arg) and last[arg] == number}:
            del values[name]
        values[f"%{number}"] = result
    return result


def _last_uses(program: Program, num_inputs: int) -> dict[str, int]:
    """For each value, by name, the position of its last reader."""
    ops = enumerate(program, start=num_inputs)
    return {arg: number for number, (_, args, _) in ops for arg in args if _is_name(arg)}


def _is_name(arg: Any) -> bool:
    return isinstance(arg, str) and arg.startswith("%")


def forward_program(node: fx.Node) -> tuple[Program, list[fx.Node]] | None:
    """The program that makes a forward value, and its inputs; None for fewer than two pointwise ops."""
    inside = _chain(node)
    return written_out(inside) if len(inside) > 1 else None


def written_out(inside: list[fx.Node]) -> tuple[Program, list[fx.Node]]:
    """Ops in their order as a program, and the values of other ops that they read."""
    sources = [source for one in inside for source in one.all_input_nodes if source not in inside]
    inputs = list(dict.fromkeys(sources))
    names = {value: f"%{place}" for place, value in enumerate((*inputs, *inside))}
    program = [
        [
            one.target,
            [names[arg] if isinstance(arg, fx.Node) else arg for arg in one.args],
            dict(one.kwargs),
        ]
        for one in inside
    ]
    return program, inputs


def _chain(node: fx.Node) -> list[fx.Node]:
    """The pointwise ops that feed only this value in the forward pass; its own op is the last."""
    if is_view_op(node.target) or not is_pointwise(node, node):
        return []
    inside = {node}
    waiting = list(node.all_input_nodes)
    while waiting:
        source = waiting.pop()
        if source in inside or len(inside) >= MOST_OPS or not is_pointwise(source, node):
            continue
        if all(reader in inside for reader, _ in readers(source) if not is_backward(reader)):
            inside.add(source)
            waiting += source.all_input_nodes
    return in_order(node, inside)


def in_order(node: fx.Node, inside: set[fx.Node]) -> list[fx.Node]:
    """The ops `inside`, each after its inputs; `node`, which all of them feed, is the last."""
    order: dict[fx.Node, None] = {}
    stack = [(node, False)]
    while stack:
        one, done = stack.pop()
        if done:
            order[one] = None
        elif one in inside and one not in order:
            stack.append((one, True))
            stack += [(source, False) for source in reversed(one.all_input_nodes)]
    return list(order)


def is_pointwise(
    node: fx.Node, like: fx.Node, *, ops: Container[Any] = POINTWISE, backward: bool = False
) -> bool:
    """Whether an op of one of the two passes works element by element on contiguous tensors of one shape."""
    if node.op != "call_function" or node.target not in ops or is_backward(node) != backward:
        return False
    if not set(node.kwargs) <= {"dtype", "approximate"} or any(
        isinstance(a, (list, tuple)) for a in node.args
    ):
        return False
    shape = like.meta["val"].shape
    values = [one.meta.get("val") for one in (node, *node.all_input_nodes)]
    return (
        isinstance(values[0], Tensor)
        and bool(values[0].dim())
        and all(_is_contiguous(v, shape) for v in values)
    )


def _is_contiguous(value: Any, shape: Any) -> bool:
    """On the CPU alone: the places where chunks may end are those of its vectors and threads."""
    if is_number(value):
        return True
    if not isinstance(value, Tensor) or value.device.type != "cpu" or value.is_complex():
        return False
    return not value.dim() or (value.shape == shape and value.is_contiguous())


POINTWISE_BACKWARD = POINTWISE | {
    aten.elu_backward.default,
    aten.gelu_backward.default,
    aten.hardtanh_backward.default,
    aten.leaky_relu_backward.default,
    aten.sigmoid_backward.default,
    aten.silu_backward.default,
    aten.softplus_backward.default,
    aten.tanh_backward.default,
    aten.threshold_backward.default,
    apply_mask,
}
"""Ops of the backward pass that give the same bits in chunks as whole: see
`tests/ops/test_backward_chunks.py`."""


def backward_program(end: fx.Node) -> tuple[Program, list[fx.Node]] | None:
    """The program that makes a backward op's result, and its inputs; None where a program does not keep fewer
    values live."""
    backward = _backward_part(end)
    if not backward:
        return None
    inside = _with_forward(end, backward)
    order = in_order(end, inside)
    return written_out(order) if len(order) > 1 and _keeps_less_live(order) else None


def replaced_ops(end: fx.Node) -> list[fx.Node]:
    """The backward ops that the program of `end` replaces, without `end` itself."""
    return [node for node in in_order(end, _backward_part(end)) if node is not end]


def _backward_part(end: fx.Node) -> set[fx.Node]:
    """The pointwise ops that feed only `end`, and that run right before it."""
    if not _fits(end, end) or is_view_op(end.target):
        return set()
    found = {end}
    waiting = list(end.all_input_nodes)
    while waiting:
        source = waiting.pop()
        if source in found or len(found) >= MOST_OPS or not _fits(source, end):
            continue
        if all(user in found for user in source.users):
            found.add(source)
            waiting += source.all_input_nodes
    # earlier ops, moved here, would keep their inputs live for longer
    near = {end}
    node = end.prev
    while node.op == "call_function" and (not is_backward(node) or is_view_op(node.target) or node in found):
        near.add(node)
        node = node.prev
    return found & near


def _fits(node: fx.Node, end: fx.Node) -> bool:
    return is_pointwise(node, end, ops=POINTWISE_BACKWARD, backward=True)


def _with_forward(end: fx.Node, backward: set[fx.Node]) -> set[fx.Node]:
    """The ops `backward`, and forward ops whose recompute among them lowers the number of inputs."""
    inside = set(backward)
    read = _read_whole(inside)
    found = {value: _cone(value, end) for value in read if is_pointwise(value, end)}
    cones = {value: cone for value, cone in found.items() if cone}
    everything = inside.union(*cones.values())
    if len(_read_whole(everything)) < len(read) and len(everything) <= MOST_OPS:
        return everything
    for cone in cones.values():
        more = inside | cone
        if len(_read_whole(more)) < len(_read_whole(inside)) and len(more) <= MOST_OPS:
            inside = more
    return inside


def _cone(value: fx.Node, end: fx.Node) -> set[fx.Node]:
    """All forward pointwise ops behind a value; empty if they are too many."""
    found: set[fx.Node] = set()
    waiting = [value]
    while waiting:
        node = waiting.pop()
        if node not in found and is_pointwise(node, end):
            found.add(node)
            waiting += node.all_input_nodes
        if len(found) > MOST_OPS // 2:
            return set()
    return found


def _read_whole(inside: set[fx.Node]) -> list[fx.Node]:
    """The tensors of other ops that the ops `inside` read, sorted by node name."""
    found = {
        source
        for node in inside
        for source in node.all_input_nodes
        if source not in inside and source.meta["val"].dim()
    }
    return sorted(found, key=lambda node: node.name)


def _keeps_less_live(order: list[fx.Node]) -> bool:
    """Whether a program keeps fewer values live than its ops one by one, each written over its input."""
    if not all(is_backward(node) for node in order):
        return True
    inside = set(order)
    values = [*_read_whole(inside), *order]
    return any(
        sum(reader in inside for reader, _ in readers(value)) > 1 for value in values if is_backward(value)
    )
