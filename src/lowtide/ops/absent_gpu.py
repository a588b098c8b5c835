"""Attention and autocast as torch runs them on a GPU, for plans made on a machine without that GPU.

Attention: on a CPU, attention with a mask or with dropout keeps all scores live. GPU kernels keep one number
for each row of scores. Their fake versions run anywhere. torch chooses a kernel by dtypes, shapes and the
settings of `torch.backends.cuda`; where none fits, a GPU keeps all scores live, too.

Autocast: on a CPU it leaves norms and softmax in the short dtype. On a GPU it computes them in float32, and
their results stay in float32. Autocast for "cuda" is off on a machine without a GPU.
"""

import functools
from collections.abc import Callable
from functools import partial
from typing import Any
from unittest import mock

import torch
from torch import Tensor, fx
from torch.nn import functional
from torch.utils import _pytree as pytree

from lowtide.torch_compat.dynamo import ENTER_AUTOCAST

aten = torch.ops.aten
_PLAIN = functional.scaled_dot_product_attention
_HEADS = functional.multi_head_attention_forward

LARGEST_FLASH_HEAD = 256
FLASH_HEAD_MULTIPLE = 8
BIAS_MULTIPLE = 8
HALF_TYPES = (torch.float16, torch.bfloat16)


def use_gpu_attention(graph: fx.GraphModule, *, has_flash: bool) -> None:
    """A pass on Dynamo's graph: call the attention kernels that a GPU has. Preserves all else."""
    attention = functools.update_wrapper(partial(_attention, has_flash=has_flash), _PLAIN)
    heads = functools.update_wrapper(partial(_heads, attention), _HEADS)
    for plain, on_gpu in ((_PLAIN, attention), (_HEADS, heads)):
        for node in graph.graph.find_nodes(op="call_function", target=plain):
            node.target = on_gpu
    graph.recompile()


def _heads(attention: Callable[..., Tensor], *args: Any, **kwargs: Any) -> Any:
    """The function that `nn.MultiheadAttention` calls, with `attention` inside."""
    with mock.patch.object(functional, _PLAIN.__name__, attention):
        return _HEADS(*args, **kwargs)


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
        if short:  # the padded copies stay live; the scale is that of the real width
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
    """Whether flash attention fits. Heads may share a key. The only mask is a square causal one."""
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
    """Whether efficient attention fits: every head has its own key, of a width that the kernel can load."""
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
    """The mask as a bias of the scores, expanded without a copy. Rows that are not aligned for the kernel are
    copied into longer ones."""
    if mask.dtype is torch.bool:
        mask = torch.zeros_like(mask, dtype=query.dtype).masked_fill(mask.logical_not(), float("-inf"))
    mask = mask.to(query.dtype)
    if any(stride % BIAS_MULTIPLE for stride in mask.stride()[:-1]) or mask.stride(-1) != 1:
        width = mask.shape[-1]
        mask = functional.pad(mask, (0, BIAS_MULTIPLE - width % BIAS_MULTIPLE))[..., :width]
    return mask.expand((*query.shape[:2], query.shape[2], key.shape[2]))


def backward_bytes(target: Any, query: Tensor, key: Tensor) -> int:
    """The workspace of the backward kernels; 0 for any other op."""
    rows = query.shape[0] * query.shape[1] * query.shape[2]
    if target is aten._scaled_dot_product_flash_attention_backward.default:
        # the kernel sums gradients of the queries in float32, with rows and heads rounded up
        whole = query.shape[0] * query.shape[1] * _up(query.shape[2], 128)
        # where several heads share a key, each head has its own gradients of keys and values
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


_HERE = "cpu"

_IN_FLOAT32 = (
    "acos asin cosh erfinv exp expm1 log log10 log2 log1p reciprocal rsqrt sinh tan pow softplus layer_norm "
    "native_layer_norm rms_norm group_norm cosine_similarity poisson_nll_loss cosine_embedding_loss nll_loss "
    "hinge_embedding_loss kl_div l1_loss smooth_l1_loss huber_loss mse_loss margin_ranking_loss "
    "multilabel_margin_loss soft_margin_loss triplet_margin_loss multi_margin_loss "
    "binary_cross_entropy_with_logits dist pdist cdist renorm logsumexp interpolate upsample prod cumprod "
    "cumsum sum norm vector_norm matrix_norm"
)
"""torch's list for CUDA (ATen/autocast_mode.h), by public names."""


def use_gpu_autocast(graph: fx.GraphModule) -> None:
    """A pass on Dynamo's graph: cast as on a GPU wherever autocast is on. Preserves all else."""
    for node in graph.graph.nodes:
        if node.target is ENTER_AUTOCAST:
            node.args = _entered(*node.args)
        elif node.op in ("call_function", "call_method"):
            on_gpu = _GPU_AUTOCAST.get(_name(node.target))
            if on_gpu is not None:
                node.target = partial(on_gpu, _function(node))
                node.op = "call_function"
    graph.recompile()


def _entered(kind: str, dtype: torch.dtype | None = None, *others: Any) -> tuple[Any, ...]:
    return (_HERE, torch.get_autocast_dtype(kind) if dtype is None else dtype, *others)


def _name(target: Any) -> str:
    return target if isinstance(target, str) else str(getattr(target, "__name__", ""))


def _function(node: fx.Node) -> Callable[..., Any]:
    """The function that a node calls; a method as a function of the object."""
    if not isinstance(node.target, str):
        return node.target
    name = node.target
    return lambda receiver, *args, **kwargs: getattr(receiver, name)(*args, **kwargs)


def _is_cast(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dtype in HALF_TYPES and torch.is_autocast_enabled(_HERE)


def _in_float32(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    args, kwargs = pytree.tree_map(lambda leaf: leaf.float() if _is_cast(leaf) else leaf, (args, kwargs))
    return function(*args, **kwargs)


def _softmax(function: Callable[..., Any], value: Any, *args: Any, **kwargs: Any) -> Any:
    return _soft(torch.ops.aten._softmax, function, value, *args, **kwargs)


def _log_softmax(function: Callable[..., Any], value: Any, *args: Any, **kwargs: Any) -> Any:
    return _soft(torch.ops.aten._log_softmax, function, value, *args, **kwargs)


def _soft(kernel: Any, function: Callable[..., Any], value: Any, *args: Any, **kwargs: Any) -> Any:
    """One kernel reads float16 and writes float32; bfloat16 is cast before."""
    dim = args[0] if args else kwargs.get("dim")
    if not _is_cast(value) or not isinstance(dim, int) or len(args) > 1 or kwargs.get("dtype") is not None:
        return function(value, *args, **kwargs)
    if value.dtype is torch.float16:
        return kernel(value, dim, True)
    return kernel(value.float(), dim, False)


def _cross_entropy(function: Callable[..., Any], value: Any, target: Any, *args: Any, **kwargs: Any) -> Any:
    """A log-softmax, and the loss that reads it."""
    is_plain = _is_cast(value) and not args and not kwargs.get("label_smoothing")
    if not is_plain or target.is_floating_point():
        return function(value, target, *args, **kwargs)
    others = {name: option for name, option in kwargs.items() if name != "label_smoothing"}
    logarithms = _log_softmax(functional.log_softmax, value, 1 if value.dim() > 1 else 0)
    return functional.nll_loss(logarithms, target, **others)


def _autocast_heads(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """`nn.MultiheadAttention` has a softmax inside."""
    with mock.patch.object(functional, "softmax", partial(_softmax, functional.softmax)):
        return function(*args, **kwargs)


_GPU_AUTOCAST: dict[str, Callable[..., Any]] = {
    "softmax": _softmax,
    "log_softmax": _log_softmax,
    "cross_entropy": _cross_entropy,
    "multi_head_attention_forward": _autocast_heads,
    **dict.fromkeys(_IN_FLOAT32.split(), _in_float32),
}
