"""Attention as torch runs it on a GPU, for steps that are planned for one on a machine without.

On a CPU, attention with a mask or with dropout is computed with all scores in memory. A GPU has kernels that
keep one number for each row of scores. Their fake versions run anywhere. Which of them torch takes depends on
types, shapes and the settings of `torch.backends.cuda`; where none fits, all scores are in memory there, too.
"""

import functools
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
from torch import Tensor, fx
from torch.nn import functional

aten = torch.ops.aten
_PLAIN = functional.scaled_dot_product_attention
_HEADS = functional.multi_head_attention_forward

LARGEST_FLASH_HEAD = 256
FLASH_HEAD_MULTIPLE = 8
BIAS_MULTIPLE = 8
HALF_TYPES = (torch.float16, torch.bfloat16)


def use_gpu_attention(graph: fx.GraphModule, *, has_flash: bool) -> None:
    """Let a graph of Dynamo call the kernels that a GPU has; preserves all else."""
    attention = _newer_attention if has_flash else _older_attention
    for node in graph.graph.find_nodes(op="call_function", target=_PLAIN):
        node.target = attention
    for node in graph.graph.find_nodes(op="call_function", target=_HEADS):
        node.target = functools.update_wrapper(functools.partial(_heads, attention), _HEADS)
    graph.recompile()


def _heads(attention: Callable[..., Tensor], *args: Any, **kwargs: Any) -> Any:
    """What `nn.MultiheadAttention` calls, with `attention` inside."""
    with mock.patch.object(functional, _PLAIN.__name__, attention):
        return _HEADS(*args, **kwargs)


def _newer_attention(*args: Any, **kwargs: Any) -> Tensor:
    return _attention(*args, has_flash=True, **kwargs)


def _older_attention(*args: Any, **kwargs: Any) -> Tensor:
    return _attention(*args, has_flash=False, **kwargs)


def _attention(  # noqa: PLR0917  the arguments of torch's own function
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    has_flash: bool,
) -> Tensor:
    kind = query.device.type
    if torch.is_autocast_enabled(kind):
        query, key, value = (tensor.to(torch.get_autocast_dtype(kind)) for tensor in (query, key, value))
    if has_flash and _fits_flash(query, key, value, attn_mask, is_causal):
        width = query.shape[-1]
        short = -width % FLASH_HEAD_MULTIPLE
        if short:  # copies that are kept; the scale is that of the real width
            scale = width**-0.5 if scale is None else scale
            query, key, value = (functional.pad(tensor, (0, short)) for tensor in (query, key, value))
        results = aten._scaled_dot_product_flash_attention(
            query, key, value, dropout_p, is_causal, False, scale=scale
        )
        return _first(results)[..., :width] if short else _first(results)
    if _fits_efficient(query, key, value, is_new=has_flash):
        bias = None if attn_mask is None else _bias(attn_mask, query, key)
        results = aten._scaled_dot_product_efficient_attention(
            query, key, value, bias, True, dropout_p, is_causal, scale=scale
        )
        return _first(results)
    results = aten._scaled_dot_product_attention_math(
        query, key, value, attn_mask, dropout_p, is_causal, None, scale=scale, enable_gqa=enable_gqa
    )
    return _first(results)


def _fits_flash(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, is_causal: bool) -> bool:
    """Several heads may share a key; a mask of its own, or of more rows than columns, is too much."""
    widths = {tensor.shape[-1] for tensor in (query, key, value)}
    return (
        torch.backends.cuda.flash_sdp_enabled()  # type: ignore[no-untyped-call]
        and query.dim() == 4
        and query.dtype in HALF_TYPES
        and mask is None
        and len(widths) == 1
        and widths.pop() <= LARGEST_FLASH_HEAD
        and (not is_causal or query.shape[-2] == key.shape[-2])
    )


def _fits_efficient(query: Tensor, key: Tensor, value: Tensor, *, is_new: bool) -> bool:
    """Every head has a key of its own, whose width its instructions can load."""
    types = (torch.float32, torch.float16, *([torch.bfloat16] if is_new else []))
    multiple = 8 if query.dtype in HALF_TYPES else 4 if is_new else 1
    return (
        torch.backends.cuda.mem_efficient_sdp_enabled()  # type: ignore[no-untyped-call]
        and query.dim() == 4
        and query.dtype in types
        and query.shape[1] == key.shape[1] == value.shape[1]
        and query.shape[-1] == key.shape[-1]
        and not query.shape[-1] % multiple
        and not value.shape[-1] % multiple
    )


def _first(results: Any) -> Tensor:
    result: Tensor = results[0]
    return result


def _bias(mask: Tensor, query: Tensor, key: Tensor) -> Tensor:
    """What is added to the scores; no larger than the mask, which is a view of them all. Rows that do not
    begin where the kernel can load them are copied into longer ones."""
    if mask.dtype is torch.bool:
        mask = torch.zeros_like(mask, dtype=query.dtype).masked_fill(mask.logical_not(), float("-inf"))
    mask = mask.to(query.dtype)
    if any(stride % BIAS_MULTIPLE for stride in mask.stride()[:-1]) or mask.stride(-1) != 1:
        width = mask.shape[-1]
        mask = functional.pad(mask, (0, BIAS_MULTIPLE - width % BIAS_MULTIPLE))[..., :width]
    return mask.expand((*query.shape[:2], query.shape[2], key.shape[2]))


def backward_bytes(target: Any, query: Tensor, key: Tensor) -> int:
    """What the backward kernels hold inside; 0 for any other op."""
    rows = query.shape[0] * query.shape[1] * query.shape[2]
    if target is aten._scaled_dot_product_flash_attention_backward.default:
        # gradients of the queries are added up in float32, with rows and heads rounded up
        whole = query.shape[0] * query.shape[1] * _up(query.shape[2], 128)
        # and those of keys and values for every head, where several share one
        is_shared = query.shape[1] != key.shape[1]
        of_heads = 2 * key.nbytes // key.shape[1] * query.shape[1] if is_shared else 0
        return 4 * whole * (_up(query.shape[3], 32) + 1) + of_heads
    if target is aten._scaled_dot_product_efficient_attention_backward.default:
        sums = 4 * (query.numel() + 2 * key.numel()) if query.dtype in HALF_TYPES else 0
        return 4 * rows + sums
    return 0


@functools.cache
def _up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple
