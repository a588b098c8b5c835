"""Optimizers by name.

Make a built-in target: model, batch and optimizer.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import nn

from lowtide.errors import TargetError
from lowtide.zoo import from_transformers
from lowtide.zoo.catalog import Entry, find_entry
from lowtide.zoo.own_models import build_encoder, build_unet

_KINDS: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    "adam": (torch.optim.Adam, {"lr": 1e-3}),
    "adamw": (torch.optim.AdamW, {"lr": 1e-3}),
    "sgd": (torch.optim.SGD, {"lr": 1e-2, "momentum": 0.9}),
}
_VARIANTS: dict[str, dict[str, Any]] = {
    "foreach": {"foreach": True},
    "fused": {"fused": True},
    "single": {"foreach": False},
}


def make_optimizer(text: str, model: nn.Module) -> torch.optim.Optimizer | None:
    """`adam`, `adamw`, `sgd` (momentum 0.9) or `none`; a variant follows a colon, as in `adam:fused`.

    Variants: `foreach`, `fused`, `single` (one parameter at a time). Without one, torch chooses.
    """
    name, _, variant = text.partition(":")
    if text == "none":
        return None
    if name not in _KINDS or (variant or "fused") not in _VARIANTS:
        raise TargetError(
            f"cannot read the optimizer '{text}': write {', '.join(_KINDS)} or none, "
            f"with a variant ({', '.join(_VARIANTS)}) after a colon if wanted, as in adam:fused"
        )
    kind, options = _KINDS[name]
    return kind(model.parameters(), **options, **_VARIANTS.get(variant, {}))


class Built(NamedTuple):
    model: nn.Module
    batch: dict[str, torch.Tensor]
    optimizer: torch.optim.Optimizer | None


_FAMILIES: dict[str, Callable[[Entry, int], tuple[nn.Module, dict[str, torch.Tensor]]]] = {
    "resnet": from_transformers.build_resnet,
    "bert": from_transformers.build_bert,
    "bert-mlm": from_transformers.build_bert_mlm,
    "gpt2": from_transformers.build_gpt2,
    "vit": from_transformers.build_vit,
    "transformer": build_encoder,
    "unet": build_unet,
}


def build(
    name: str,
    *,
    batch_size: int,
    image_size: int | None = None,
    sequence_length: int | None = None,
    optimizer: str = "adam",
    seed: int = 0,
    device: Any = "cpu",
) -> Built:
    """The built-in target `name`, in training mode.

    The same arguments give the same weights and the same batch, and torch's own generators are
    left as they were. `optimizer` is read by `make_optimizer`.
    """
    entry = find_entry(name).with_size(image_size=image_size, sequence_length=sequence_length)
    if batch_size < 1:
        raise TargetError(f"the batch size must be at least 1, not {batch_size}")
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model, batch = _FAMILIES[entry.family](entry, batch_size)
    model = model.train().to(device)
    batch = {key: value.to(device) for key, value in batch.items()}
    return Built(model, batch, make_optimizer(optimizer, model))
