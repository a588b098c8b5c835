"""Autocast as it is on a GPU, for steps that are planned for one on a machine without.

Autocast of a CPU leaves norms and softmax in the short type; that of a GPU computes them in float32, and
their results are kept so. What is wanted for "cuda" is off on a machine without a GPU.
"""

from collections.abc import Callable
from functools import partial
from typing import Any
from unittest import mock

import torch
from torch import Tensor, fx
from torch.nn import functional
from torch.utils import _pytree as pytree

from lowtide.torchside.ops.gpu_attention import HALF_TYPES

_HERE = "cpu"

_IN_FLOAT32 = (
    "acos asin cosh erfinv exp expm1 log log10 log2 log1p reciprocal rsqrt sinh tan pow softplus layer_norm "
    "native_layer_norm rms_norm group_norm cosine_similarity poisson_nll_loss cosine_embedding_loss nll_loss "
    "hinge_embedding_loss kl_div l1_loss smooth_l1_loss huber_loss mse_loss margin_ranking_loss "
    "multilabel_margin_loss soft_margin_loss triplet_margin_loss multi_margin_loss "
    "binary_cross_entropy_with_logits dist pdist cdist renorm logsumexp interpolate upsample prod cumprod "
    "cumsum sum norm vector_norm matrix_norm"
)
"""torch's list for CUDA (ATen/autocast_mode.h), by the names that users call them by."""


def use_gpu_autocast(graph: fx.GraphModule) -> None:
    """Let a graph of Dynamo cast as on a GPU wherever autocast is on; preserves all else."""
    for node in graph.graph.nodes:
        if node.target is torch.amp.autocast_mode._enter_autocast:
            node.args = _entered(*node.args)
        elif node.op in ("call_function", "call_method"):
            otherwise = _OTHERWISE.get(_name(node.target))
            if otherwise is not None:
                node.target = partial(otherwise, _function(node))
                node.op = "call_function"
    graph.recompile()


def _entered(kind: str, dtype: torch.dtype | None = None, *others: Any) -> tuple[Any, ...]:
    return (_HERE, torch.get_autocast_dtype(kind) if dtype is None else dtype, *others)


def _name(target: Any) -> str:
    return target if isinstance(target, str) else str(getattr(target, "__name__", ""))


def _function(node: fx.Node) -> Callable[..., Any]:
    """What a node calls; a method as a function of the object."""
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
    """A log-softmax, and what takes its values."""
    is_plain = _is_cast(value) and not args and not kwargs.get("label_smoothing")
    if not is_plain or target.is_floating_point():
        return function(value, target, *args, **kwargs)
    others = {name: option for name, option in kwargs.items() if name != "label_smoothing"}
    logarithms = _log_softmax(functional.log_softmax, value, 1 if value.dim() > 1 else 0)
    return functional.nll_loss(logarithms, target, **others)


def _heads(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """What `nn.MultiheadAttention` calls has a softmax inside."""
    with mock.patch.object(functional, "softmax", partial(_softmax, functional.softmax)):
        return function(*args, **kwargs)


_OTHERWISE: dict[str, Callable[..., Any]] = {
    "softmax": _softmax,
    "log_softmax": _log_softmax,
    "cross_entropy": _cross_entropy,
    "multi_head_attention_forward": _heads,
    **dict.fromkeys(_IN_FLOAT32.split(), _in_float32),
}
