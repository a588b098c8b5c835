"""Collectives of a mesh as ops that can only be traced: what one GPU gives to them and gets back.

    x [batch, tokens / 8, width] ── gather_tokens(8) ── [batch, tokens, width]

Traced on fake tensors they say how many bytes a real collective returns, and in backward they are each
other's gradient, as a real all-gather and reduce-scatter are. Nothing can run them. Planners do not recompute
them, as they do not recompute a real collective.
"""

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

NAMESPACE = "lowtide_mesh"


def _only_traced(name: str) -> Exception:
    return NotImplementedError(f"{NAMESPACE}::{name} stands for a collective of GPUs that are not here")


@torch.library.custom_op(f"{NAMESPACE}::gather_tokens", mutates_args=())
def gather_tokens(x: Tensor, parts: int) -> Tensor:
    """All tokens, from GPUs that have an equal part of them each."""
    raise _only_traced("gather_tokens")


@torch.library.custom_op(f"{NAMESPACE}::scatter_tokens", mutates_args=())
def scatter_tokens(x: Tensor, parts: int) -> Tensor:
    """This GPU's part of the tokens, summed over all."""
    raise _only_traced("scatter_tokens")


@torch.library.custom_op(f"{NAMESPACE}::ring_attention", mutates_args=())
def ring_attention(query: Tensor, key: Tensor, value: Tensor, parts: int) -> tuple[Tensor, Tensor]:
    """Causal attention of this GPU's tokens to those of all; and the logarithms of the sums of its scores."""
    raise _only_traced("ring_attention")


@torch.library.custom_op(f"{NAMESPACE}::ring_attention_backward", mutates_args=())
def ring_attention_backward(  # noqa: PLR0917  autograd gives them by position
    gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, sums: Tensor, parts: int
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of query, key and value."""
    raise _only_traced("ring_attention_backward")


@torch.library.custom_op(f"{NAMESPACE}::send", mutates_args=())
def send(x: Tensor) -> Tensor:
    """Give the output of a stage to the next stage; the number stands for the loss, and its gradient for what
    comes back."""
    raise _only_traced("send")


@torch.library.custom_op(f"{NAMESPACE}::receive_gradient", mutates_args=())
def receive_gradient(gradient: Tensor, x: Tensor) -> Tensor:
    """The gradient of a stage's output, from the next stage."""
    raise _only_traced("receive_gradient")


@gather_tokens.register_fake
def _(x: Tensor, parts: int) -> Tensor:
    return x.new_empty(x.shape[0], x.shape[1] * parts, *x.shape[2:])


@scatter_tokens.register_fake
def _(x: Tensor, parts: int) -> Tensor:
    return x.new_empty(x.shape[0], x.shape[1] // parts, *x.shape[2:])


@ring_attention.register_fake
def _(query: Tensor, key: Tensor, value: Tensor, parts: int) -> tuple[Tensor, Tensor]:
    return torch.empty_like(query), query.new_empty(query.shape[:3], dtype=torch.float32)


@ring_attention_backward.register_fake
def _(  # noqa: PLR0917  the arguments of the op
    gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, sums: Tensor, parts: int
) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)


@send.register_fake
def _(x: Tensor) -> Tensor:
    return x.new_empty(())


@receive_gradient.register_fake
def _(gradient: Tensor, x: Tensor) -> Tensor:
    return torch.empty_like(x)


def _keep_parts(ctx, inputs, output):  # type: ignore[no-untyped-def]
    ctx.parts = inputs[1]


def _keep_attention(ctx, inputs, output):  # type: ignore[no-untyped-def]
    *tensors, ctx.parts = inputs
    ctx.save_for_backward(*tensors, *output)


def _keep_input(ctx, inputs, output):  # type: ignore[no-untyped-def]
    ctx.save_for_backward(inputs[0])


gather_tokens.register_autograd(
    lambda ctx, gradient: (scatter_tokens(gradient, ctx.parts), None), setup_context=_keep_parts
)
scatter_tokens.register_autograd(
    lambda ctx, gradient: (gather_tokens(gradient, ctx.parts), None), setup_context=_keep_parts
)
ring_attention.register_autograd(
    lambda ctx, gradient, _: (*ring_attention_backward(gradient, *ctx.saved_tensors, ctx.parts), None),
    setup_context=_keep_attention,
)
send.register_autograd(
    lambda ctx, gradient: receive_gradient(gradient, *ctx.saved_tensors), setup_context=_keep_input
)


@register_flop_formula(torch.ops.lowtide_mesh.ring_attention)
def _attention_flops(query, key, value, parts, *, out_shape=None, **_):  # type: ignore[no-untyped-def]
    """As torch counts attention: all scores, masked ones as well."""
    batch, heads, rows, width = query
    return 4 * batch * heads * rows * rows * parts * width


@register_flop_formula(torch.ops.lowtide_mesh.ring_attention_backward)
def _attention_backward_flops(gradient, query, *others, out_shape=None, **_):  # type: ignore[no-untyped-def]
    batch, heads, rows, width = query
    return 10 * batch * heads * rows * rows * others[-1] * width
