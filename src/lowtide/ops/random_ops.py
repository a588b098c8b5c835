"""Random ops, the generator states that they draw from, and dropout as eager computes it."""

import functools
import operator
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, fx
from torch.types import Number

from lowtide.generators import random_state, set_random_state
from lowtide.ops.calls import Call
from lowtide.ops.chunk_sizes import chunk_bytes
from lowtide.ops.schema import bound_arguments
from lowtide.torch_compat.dispatch import FakeTensor, OpOverload, real_tensors

aten = torch.ops.aten

MASK_CHUNK = 1 << 17
"""Elements per chunk of `apply_mask` on the CPU."""


COMPOSED = ("cpu", "mps")
"""Kinds of devices on which eager composes dropout of other ops. On all others torch has one kernel, which is
the op that is traced (`is_fused_kernel_acceptable` in ATen/native/Dropout.cpp)."""


def eager_dropout(value: torch.Tensor, probability: float, train: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """(result, mask) of a dropout, bit for bit as eager PyTorch composes it.

    Capture records `aten.native_dropout`, which rounds its scale differently: for one in seven probabilities
    its results differ from eager's in the last bit.
    """
    assert train, "a dropout that drops nothing is not captured as one"
    if probability == 1:
        mask = torch.zeros_like(value, dtype=torch.bool)
    else:
        mask = torch.empty_like(value, dtype=torch.bool).bernoulli_(1 - probability)
    return apply_mask(value, mask, probability), mask


def apply_mask(
    value: torch.Tensor, mask: torch.Tensor, probability: float, *, out: torch.Tensor | None = None
) -> torch.Tensor:
    """A dropout's result, or its gradient, from the kept mask, with eager's arithmetic.

    In chunks, since torch makes a float copy of any bool tensor that it multiplies with. `out` may be
    `value`.
    """
    scale = _scale(value.dtype, probability)
    # no device has smaller chunks
    whole = value.numel() <= MASK_CHUNK or isinstance(value, FakeTensor)
    if whole or not (value.is_contiguous() and mask.is_contiguous()):
        return torch.mul(value, mask, out=out).mul_(scale)
    size = chunk_bytes(value.nbytes, MASK_CHUNK * value.itemsize, value.device) // value.itemsize
    if value.numel() <= size:
        return torch.mul(value, mask, out=out).mul_(scale)
    result = torch.empty_like(value) if out is None else out
    flat = (value.view(-1), mask.view(-1), result.view(-1))
    for one, kept, some in zip(*(torch.split(tensor, size) for tensor in flat), strict=True):
        torch.mul(one, kept, out=some)
        some.mul_(scale)
    return result


@torch.library.custom_op(
    "lowtide::dropout_by_number", mutates_args=(), tags=(torch.Tag.nondeterministic_seeded,)
)
def dropout_by_number(value: Tensor, probability: Number) -> tuple[Tensor, Tensor]:
    """The traced form of `eager_dropout` where the probability is an input of the graph: torch's own ops need
    a constant."""
    return eager_dropout(value, float(probability), True)


@dropout_by_number.register_fake
def _fake_dropout(value: Tensor, probability: Number) -> tuple[Tensor, Tensor]:
    return torch.empty_like(value), torch.empty_like(value, dtype=torch.bool)


@torch.library.custom_op("lowtide::dropout_by_number_backward", mutates_args=())
def dropout_by_number_backward(grad: Tensor, mask: Tensor, probability: Number) -> Tensor:
    return apply_mask(grad, mask, float(probability))


@dropout_by_number_backward.register_fake
def _fake_dropout_backward(grad: Tensor, mask: Tensor, probability: Number) -> Tensor:
    return torch.empty_like(grad)


@functools.lru_cache(maxsize=256)
def _scale(dtype: torch.dtype, probability: float) -> float:
    """The factor of eager's dropout, rounded to the dtype as eager does."""
    if probability == 1:
        return 0.0
    with real_tensors():
        return float(torch.ones((), dtype=dtype).div_(1 - probability))


def dropout_output(node: fx.Node) -> tuple[fx.Node, fx.Node] | None:
    """(input, mask) when `node` is the result of an eager dropout."""
    if node.target is not operator.getitem or node.args[1] != 0:
        return None
    dropout = node.args[0]
    if not isinstance(dropout, fx.Node) or dropout.target is not eager_dropout:
        return None
    source = dropout.args[0]
    assert isinstance(source, fx.Node)
    for user in dropout.users:
        if user.target is operator.getitem and user.args[1] == 1:
            return source, user
    return None


def use_eager_dropout(graph: fx.Graph) -> None:
    """A pass: give dropouts that eager composes its rounding, forward and backward. Preserves all else.

        native_dropout ──┬─ result                   eager_dropout ──┬─ mask
                         └─ mask             ==>                     └─ result
        native_dropout_backward(grad, mask)          apply_mask(grad, mask)

    The mask comes before the result, so that a remat rule can recompute the result from the mask.
    """
    for node in graph.find_nodes(op="call_function", target=aten.native_dropout.default):
        if node.args[2] is not False and node.meta["val"][0].device.type in COMPOSED:
            node.target = eager_dropout
            node.args = (*node.args[:2], True)
    for node in graph.find_nodes(op="call_function", target=aten.native_dropout_backward.default):
        dropout = _dropout_of(node.args[1])
        if dropout is not None:
            node.target = apply_mask
            node.args = (*node.args[:2], dropout.args[1])
    for node in graph.find_nodes(op="call_function", target=torch.ops.lowtide.dropout_by_number.default):
        node.target = eager_dropout
        node.args = (*node.args, True)
    for node in graph.find_nodes(
        op="call_function", target=torch.ops.lowtide.dropout_by_number_backward.default
    ):
        node.target = apply_mask
    for node in graph.nodes:
        pair = dropout_output(node)
        if pair is not None:
            node.prepend(pair[1])


def extra_eager_bytes(node: fx.Node, made: torch.Tensor) -> int:
    """Extra bytes of eager's mask, which has the input's dtype; the captured mask has bytes."""
    if node.target is not eager_dropout or made.dtype is not torch.bool:
        return 0
    return made.numel() * (int(node.meta["val"][0].element_size()) - 1)


def _dropout_of(mask: object) -> fx.Node | None:
    """The eager dropout that drew this mask."""
    while isinstance(mask, fx.Node) and mask.target is aten.detach.default:
        mask = mask.args[0]
    source = mask.args[0] if isinstance(mask, fx.Node) and mask.args else None
    return source if isinstance(source, fx.Node) and source.target is eager_dropout else None


HIGH = 1 - 2**-24

ATTENTION = (
    aten._scaled_dot_product_cudnn_attention.default,
    aten._scaled_dot_product_efficient_attention.default,
    aten._scaled_dot_product_flash_attention.default,
    aten._scaled_dot_product_fused_attention_overrideable.default,
    aten._efficient_attention_forward.default,
    aten._flash_attention_forward.default,
)
"""Attention in one op on accelerators. Torch calls these ops random, with dropout or without."""


def is_random(node: fx.Node) -> bool:
    """Whether a node draws random numbers."""
    if node.target is eager_dropout:
        return True
    return (
        isinstance(node.target, OpOverload)
        and torch.Tag.nondeterministic_seeded in node.target.tags
        and not (node.target is aten.native_dropout.default and node.args[2] is False)
        and not _attends_without_dropout(node)
    )


def _attends_without_dropout(node: fx.Node) -> bool:
    """Whether a node is attention in one op of an accelerator that drops nothing: it draws no number."""
    if node.target not in ATTENTION:
        return False
    dropout = bound_arguments(Call(node.target, node.args, dict(node.kwargs)))[1]["dropout_p"]
    return isinstance(dropout, int | float) and dropout == 0


def draw_high(module: fx.GraphModule) -> None:
    """A pass for graphs that are only captured: draw single numbers close to 1.

    A model drops a layer where a draw is low: the step that drops no layer is the one to plan for.
    """
    for node in module.graph.find_nodes(op="call_function", target=aten.rand.default):
        if node.meta["val"].numel() == 1:
            node.target, node.args = aten.full.default, (node.args[0], HIGH)
    module.recompile()


def device_name(node: fx.Node) -> str:
    """`cpu` or `cuda:0`: the device of a node's (first) result, whose generator a random node draws from."""
    value = node.meta["val"]
    tensor = value[0] if isinstance(value, (list, tuple)) else value
    return str(tensor.device)


@contextmanager
def drawing_from(states: Mapping[str, torch.Tensor]) -> Iterator[None]:
    """Draw from earlier states of the devices' generators; afterwards restore their present states."""
    now = {device: random_state(device) for device in states}
    for device, state in states.items():
        set_random_state(state, device)
    try:
        yield
    finally:
        for device, state in now.items():
            set_random_state(state, device)


def random_state_bytes(device: str) -> int:
    return random_state(device).numel()


def replay(state: torch.Tensor, device: str, target: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    """Run a random op from an earlier generator state, then restore the present state."""
    with drawing_from({device: state}):
        return target(*args, **kwargs)


def replay_dropout(
    state: torch.Tensor, device: str, value: torch.Tensor, probability: float, train: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """`eager_dropout` from an earlier generator state."""
    result: tuple[torch.Tensor, torch.Tensor] = replay(
        state, device, eager_dropout, value, probability, train
    )
    return result
