"""The models of bench/gpu.py, as factories of a batch size."""

from typing import Any

import torch
from torch import nn

Built = tuple[nn.Module, dict[str, torch.Tensor]]


def resnet152(batch_size: int) -> Built:
    return _resnet(batch_size, [3, 8, 36, 3])


def resnet18(batch_size: int) -> Built:
    return _resnet(
        batch_size, [2, 2, 2, 2], layer_type="basic", hidden_sizes=[64, 128, 256, 512], embedding_size=64
    )


def resnet50(batch_size: int) -> Built:
    return _resnet(batch_size, [3, 4, 6, 3])


def resnet101(batch_size: int) -> Built:
    return _resnet(batch_size, [3, 4, 23, 3])


def _resnet(batch_size: int, depths: list[int], **options: Any) -> Built:
    from transformers import ResNetConfig, ResNetForImageClassification

    config = ResNetConfig(depths=depths, num_labels=1000, **{"layer_type": "bottleneck", **options})
    return ResNetForImageClassification(config), _images(batch_size, 224)


def regnetx_032(batch_size: int) -> Built:
    from transformers import RegNetConfig, RegNetForImageClassification

    config = RegNetConfig(
        depths=[2, 6, 15, 2],
        hidden_sizes=[96, 192, 432, 1008],
        groups_width=48,
        layer_type="x",
        num_labels=1000,
    )
    return RegNetForImageClassification(config), _images(batch_size, 224)


def vit_base(batch_size: int) -> Built:
    return _vit(batch_size)


def vit_small(batch_size: int) -> Built:
    return _vit(batch_size, hidden_size=384, num_attention_heads=6, intermediate_size=1536)


def _vit(batch_size: int, **options: Any) -> Built:
    from transformers import ViTConfig, ViTForImageClassification

    model = ViTForImageClassification(ViTConfig(num_labels=1000, **options))
    return model, _images(batch_size, 224)


def convnext_tiny(batch_size: int) -> Built:
    return _convnext(batch_size, 86, num_labels=10)


def convnext_tiny_224(batch_size: int) -> Built:
    return _convnext(batch_size, 224, num_labels=1000)


def convnext_small_224(batch_size: int) -> Built:
    return _convnext(batch_size, 224, num_labels=1000, depths=[3, 3, 27, 3])


def _convnext(batch_size: int, side: int, **options: Any) -> Built:
    from transformers import ConvNextConfig, ConvNextForImageClassification

    return ConvNextForImageClassification(ConvNextConfig(**options)), _images(batch_size, side)


def _images(batch_size: int, side: int) -> dict[str, torch.Tensor]:
    pixels = torch.empty(batch_size, 3, side, side).normal_()
    return {"pixel_values": pixels, "labels": torch.zeros(batch_size, dtype=torch.int64)}


def bert_large(batch_size: int) -> Built:
    """With a loss over all words, of which a run that predicts a few computes a part."""
    from transformers import BertForMaskedLM

    tokens = torch.zeros(batch_size, 512, dtype=torch.int64)
    return BertForMaskedLM(_bert_large_config()), {"input_ids": tokens, "labels": tokens.clone()}


def bert_large_encoder(batch_size: int) -> Built:
    """Without any head."""
    from transformers import BertModel

    return BertModel(_bert_large_config()), {"input_ids": torch.zeros(batch_size, 512, dtype=torch.int64)}


def _bert_large_config() -> Any:
    from transformers import BertConfig

    return BertConfig(
        hidden_size=1024,
        num_hidden_layers=24,
        num_attention_heads=16,
        intermediate_size=4096,
        attn_implementation="eager",  # older than torch's fused attention
    )


def bert_base(batch_size: int) -> Built:
    """With the scores of attention in memory; the loss of these rows is a sum of what it gives."""
    return _bert_base(batch_size, "eager")


def bert_base_fused(batch_size: int) -> Built:
    return _bert_base(batch_size, "sdpa")


def _bert_base(batch_size: int, attention: str) -> Built:
    from transformers import BertConfig, BertForMaskedLM

    return BertForMaskedLM(BertConfig(attn_implementation=attention)), _words(batch_size, 512, masked=True)


def distilbert(batch_size: int) -> Built:
    return _distilbert(batch_size, "eager")


def distilbert_fused(batch_size: int) -> Built:
    return _distilbert(batch_size, "sdpa")


def _distilbert(batch_size: int, attention: str) -> Built:
    from transformers import DistilBertConfig, DistilBertForMaskedLM

    model = DistilBertForMaskedLM(DistilBertConfig(attn_implementation=attention))
    return model, _words(batch_size, 256)


def pythia_410m(batch_size: int) -> Built:
    from transformers import GPTNeoXConfig, GPTNeoXForCausalLM

    config = GPTNeoXConfig(
        vocab_size=50304,
        hidden_size=1024,
        num_hidden_layers=24,
        num_attention_heads=16,
        intermediate_size=4096,
    )
    return GPTNeoXForCausalLM(config), _words(batch_size, 512, masked=True)


def gpt2(batch_size: int) -> Built:
    from transformers import GPT2Config, GPT2LMHeadModel

    words = _words(batch_size, 16, masked=True)
    return GPT2LMHeadModel(GPT2Config()), {**words, "labels": words["input_ids"].clone()}


def _words(batch_size: int, length: int, *, masked: bool = False) -> dict[str, torch.Tensor]:
    words = {"input_ids": torch.zeros(batch_size, length, dtype=torch.int64)}
    return {**words, "attention_mask": torch.ones_like(words["input_ids"])} if masked else words


def vit_large(batch_size: int) -> Built:
    return _VitLarge(), _images(batch_size, 224)


def vit_large_in_float16(batch_size: int) -> Built:
    """Under autocast."""
    return _VitLarge(torch.float16), _images(batch_size, 224)


def vit_large_of_2_0(batch_size: int) -> Built:
    """With flash attention as torch 2.0 had it."""
    return _VitLarge(layer=_LayerOf20), _images(batch_size, 224)


def vit_large_in_float16_of_2_0(batch_size: int) -> Built:
    return _VitLarge(torch.float16, layer=_LayerOf20), _images(batch_size, 224)


class _LayerOf20(nn.TransformerEncoderLayer):
    """Flash attention of torch 2.0 gave its result image by image, for any strides of the queries. Queries of
    `nn.MultiheadAttention` have the positions outermost, so the next layer needs a copy in their order."""

    def _sa_block(self, x: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        heads = self.self_attn
        parts = nn.functional.linear(x.transpose(0, 1), heads.in_proj_weight, heads.in_proj_bias)
        parts = parts.unflatten(-1, (3, -1)).unsqueeze(0).transpose(0, -2).squeeze(-2).contiguous()
        query, key, value = (
            part.unflatten(-1, (heads.num_heads, -1)).permute(1, 2, 0, 3) for part in parts.unbind()
        )
        mixed = nn.functional.scaled_dot_product_attention(query, key, value)
        copied = mixed.permute(2, 0, 1, 3).clone(memory_format=torch.contiguous_format)
        result: torch.Tensor = heads.out_proj(copied.flatten(2)).transpose(0, 1)
        return result


class _VitLarge(nn.Module):
    """torchvision's `vit_l_16`, op by op, with ten classes."""

    def __init__(
        self,
        autocast: torch.dtype | None = None,
        *,
        layer: type[nn.TransformerEncoderLayer] = nn.TransformerEncoderLayer,
    ) -> None:
        super().__init__()
        self.autocast = autocast
        self.patches = nn.Conv2d(3, 1024, 16, 16)
        self.token = nn.Parameter(torch.zeros(1, 1, 1024))
        self.places = nn.Parameter(torch.zeros(1, 197, 1024))
        options = {"dropout": 0.0, "activation": "gelu", "norm_first": True, "batch_first": True}
        self.layers = nn.ModuleList(layer(1024, 16, 4096, **options) for _ in range(24))
        self.norm, self.head = nn.LayerNorm(1024), nn.Linear(1024, 10)

    def forward(self, pixel_values: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cuda", self.autocast, enabled=self.autocast is not None):
            x = self.patches(pixel_values).flatten(2).transpose(1, 2)
            x = torch.cat([self.token.expand(len(x), -1, -1), x], 1) + self.places
            for layer in self.layers:
                x = layer(x)
            classes = self.head(self.norm(x)[:, 0])
        return nn.functional.cross_entropy(classes.float(), labels)
