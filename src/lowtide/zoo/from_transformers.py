"""Models of the transformers library, made from a configuration with random weights.

Each batch carries the labels, so that the output has `.loss`. Attention is transformers' default.
"""

import os
import unittest.mock
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from lowtide.errors import TargetError
from lowtide.zoo.targets import Entry

Batch = dict[str, torch.Tensor]


def build_resnet(entry: Entry, batch_size: int) -> tuple[nn.Module, Batch]:
    sizes: dict[str, Any] = {"depths": [3, 8, 36, 3], "num_labels": 1000}
    if entry.tiny:
        sizes = {
            "depths": [1, 2, 3, 1],
            "embedding_size": 16,
            "hidden_sizes": [32, 64, 128, 256],
            "num_labels": 10,
        }
    model = _make("ResNetForImageClassification", "ResNetConfig", layer_type="bottleneck", **sizes)
    return model, _images(entry, batch_size, num_labels=sizes["num_labels"])


def build_vit(entry: Entry, batch_size: int) -> tuple[nn.Module, Batch]:
    sizes: dict[str, Any] = {"num_labels": 1000}
    if entry.tiny:
        sizes = {
            "hidden_size": 64,
            "num_hidden_layers": 3,
            "num_attention_heads": 4,
            "intermediate_size": 128,
            "patch_size": 8,
            "num_labels": 10,
        }
    model = _make("ViTForImageClassification", "ViTConfig", image_size=entry.image_size, **sizes)
    return model, _images(entry, batch_size, num_labels=sizes["num_labels"])


def build_bert(entry: Entry, batch_size: int) -> tuple[nn.Module, Batch]:
    sizes = _bert_sizes(entry)
    model = _make("BertForSequenceClassification", "BertConfig", num_labels=2, **sizes)
    batch = _bert_batch(entry, batch_size, vocabulary=sizes["vocab_size"])
    return model, batch | {"labels": torch.randint(0, 2, (batch_size,))}


def build_bert_mlm(entry: Entry, batch_size: int) -> tuple[nn.Module, Batch]:
    sizes = _bert_sizes(entry)
    model = _make("BertForMaskedLM", "BertConfig", **sizes)
    batch = _bert_batch(entry, batch_size, vocabulary=sizes["vocab_size"])
    hidden = torch.rand(batch["input_ids"].shape) >= 0.15
    hidden[:, 0] = False  # at least one token to predict, so that the loss is a number
    return model, batch | {"labels": batch["input_ids"].masked_fill(hidden, -100)}


def build_gpt2(entry: Entry, batch_size: int) -> tuple[nn.Module, Batch]:
    length = _length(entry)
    sizes: dict[str, Any] = {"vocab_size": 50257, "n_positions": max(1024, length)}
    if entry.tiny:
        sizes = {"vocab_size": 512, "n_positions": length, "n_embd": 64, "n_layer": 3, "n_head": 4}
        sizes |= {"bos_token_id": 0, "eos_token_id": 0}
    # the cache is for text generation; in training it only takes memory
    model = _make("GPT2LMHeadModel", "GPT2Config", use_cache=False, **sizes)
    # the default loss; named, since transformers warns about a default
    model.loss_type = "ForCausalLM"  # type: ignore[assignment]
    tokens = torch.randint(0, sizes["vocab_size"], (batch_size, length))
    return model, {"input_ids": tokens, "labels": tokens.clone()}


def _bert_sizes(entry: Entry) -> dict[str, Any]:
    length = _length(entry)
    if entry.tiny:
        return {
            "vocab_size": 512,
            "hidden_size": 64,
            "num_hidden_layers": 3,
            "num_attention_heads": 4,
            "intermediate_size": 128,
            "max_position_embeddings": length,
        }
    return {"vocab_size": 30522, "max_position_embeddings": max(512, length)}


def _bert_batch(entry: Entry, batch_size: int, *, vocabulary: int) -> Batch:
    shape = (batch_size, _length(entry))
    return {
        "input_ids": torch.randint(0, vocabulary, shape),
        "attention_mask": torch.ones(shape, dtype=torch.long),
    }


def _images(entry: Entry, batch_size: int, *, num_labels: int) -> Batch:
    assert entry.image_size is not None
    return {
        "pixel_values": torch.randn(batch_size, 3, entry.image_size, entry.image_size),
        "labels": torch.randint(0, num_labels, (batch_size,)),
    }


def _length(entry: Entry) -> int:
    assert entry.sequence_length is not None
    return entry.sequence_length


def _make(model_name: str, config_name: str, **settings: Any) -> nn.Module:
    with quiet():
        try:
            import transformers
        except ModuleNotFoundError as missing:
            if missing.name != "transformers":
                raise
            raise TargetError(
                "this built-in target needs transformers, which is not installed: pip install lowtide[models]"
            ) from missing
        config = getattr(transformers, config_name)(**settings)
        model: nn.Module = getattr(transformers, model_name)(config)
    return model


@contextmanager
def quiet() -> Iterator[None]:
    """Silence warnings, log lines and progress bars of transformers and torch inside the block."""
    with (
        unittest.mock.patch.dict(os.environ, {"TRANSFORMERS_VERBOSITY": "error"}),
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore")
        try:
            from transformers.utils import logging
        except ModuleNotFoundError:
            yield  # the caller's import raises the error
            return
        verbosity, bar = logging.get_verbosity(), logging.is_progress_bar_enabled()
        logging.set_verbosity_error()  # type: ignore[no-untyped-call]
        logging.disable_progress_bar()  # type: ignore[no-untyped-call]
        try:
            yield
        finally:
            logging.set_verbosity(verbosity)
            if bar:
                logging.enable_progress_bar()  # type: ignore[no-untyped-call]
