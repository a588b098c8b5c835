"""Every architecture of the transformers library, tiny, with random weights and a batch that trains it.

Nothing here knows a model: sizes follow from the names of fields (`shrink`), and of the batches that a
forward's arguments allow, the first that trains in eager is taken.
"""

import hashlib
import inspect
from collections.abc import Iterator
from itertools import product
from typing import Any

import torch
from torch import nn

from lowtide.trace.model_call import call, loss_of

from .case import Case, Training, adam
from .shrink import shrunk

BATCH, LENGTH, TOKENS, LABELS = 2, 16, 100, 2
SIZES: tuple[dict[str, int], ...] = (
    {"layers": 2},
    {"layers": 4},
    {"layers": 6},
    {"layers": 2, "num_key_value_heads": 4},
    {"layers": 2, "num_heads": 8},
)
"""What is tried in turn, until a model can be made and trained."""
HEADS = (
    "CAUSAL_LM",
    "SEQ_TO_SEQ_CAUSAL_LM",
    "IMAGE_TEXT_TO_TEXT",
    "MASKED_LM",
    "SPEECH_SEQ_2_SEQ",
    "CTC",
    "IMAGE_CLASSIFICATION",
    "VIDEO_CLASSIFICATION",
    "AUDIO_CLASSIFICATION",
    "SEQUENCE_CLASSIFICATION",
    "PRETRAINING",
    "OBJECT_DETECTION",
    "SEMANTIC_SEGMENTATION",
    "UNIVERSAL_SEGMENTATION",
    "DEPTH_ESTIMATION",
    "ZERO_SHOT_IMAGE_CLASSIFICATION",
    "MULTIMODAL_LM",
    "MASK_GENERATION",
    "TEXT_TO_WAVEFORM",
    "TIME_SERIES_PREDICTION",
)


def architectures() -> list[Case]:
    """One case per folder of the library: the head that comes first in `HEADS`, else the bare model."""
    found: dict[str, Case] = {}
    for kind, name in _heads():
        folder = _folder(kind)
        if folder not in found:
            found[folder] = Case(folder, "architecture", _builder(kind, name))
    return [found[folder] for folder in sorted(found, key=_mixed)]


def _mixed(name: str) -> str:
    """An order in which the first cases are a fair sample of all."""
    return hashlib.sha256(name.encode()).hexdigest()


def _heads() -> Iterator[tuple[str, str]]:
    from transformers.models.auto import modeling_auto

    tables = [getattr(modeling_auto, f"MODEL_FOR_{head}_MAPPING_NAMES") for head in HEADS]
    for table in (*tables, modeling_auto.MODEL_MAPPING_NAMES):
        for kind, names in table.items():
            yield kind, names if isinstance(names, str) else names[0]


def _folder(kind: str) -> str:
    from transformers.models.auto.configuration_auto import model_type_to_module_name

    return str(model_type_to_module_name(kind))


def _builder(kind: str, name: str) -> Any:
    return lambda: build(kind, name)


def build(kind: str, name: str) -> Training:
    """A tiny model of the class `name`; raises what eager raises where no batch trains it."""
    import transformers
    from transformers import CONFIG_MAPPING

    transformers.logging.set_verbosity_error()
    problem: Exception | None = None
    for sizes in SIZES:
        torch.manual_seed(0)
        try:
            made = getattr(transformers, name)
            config = shrunk(made.config_class or CONFIG_MAPPING[kind], **sizes)
            model: nn.Module = made(config).train()
            return Training(model, _first_that_trains(model, config), adam(model))
        except ImportError:
            raise
        except Exception as error:
            problem = problem or error
    assert problem is not None
    raise problem


def _first_that_trains(model: nn.Module, config: Any) -> dict[str, Any]:
    names = set(inspect.signature(model.forward).parameters)
    problem: Exception | None = None
    for inputs in _inputs(names, config):
        try:
            with torch.no_grad():
                call(model, inputs)
            return _labelled(model, inputs, names)
        except Exception as error:
            problem = problem or error
    raise problem or RuntimeError("no batch could be made from its arguments")


def _inputs(names: set[str], config: Any) -> Iterator[dict[str, Any]]:
    """What the arguments of a forward allow, the most complete first."""
    kinds = [kind for kind in (_text(names), _image(names, config), _audio(names, config)) if kind]
    together = [{key: value for part in parts for key, value in part.items()} for parts in product(*kinds)]
    alone = [choice for kind in kinds for choice in kind] if len(kinds) > 1 else []
    decoder = _decoder(names)
    for cache in ({}, {"use_cache": False}) if "use_cache" in names else ({},):
        for batch in (*together, *alone):
            yield batch | decoder | cache


def _labelled(model: nn.Module, inputs: dict[str, Any], names: set[str]) -> dict[str, Any]:
    """The inputs with the first labels that train; without any if none do."""
    problem: Exception | None = None
    for labels in _labels(names):
        try:
            value = loss_of(call(model, inputs | labels), None)
            value.backward()
            if torch.isfinite(value):
                return inputs | labels
            problem = problem or RuntimeError(f"the loss is {value.item()}")
        except Exception as error:
            problem = problem or error
        finally:
            model.zero_grad(set_to_none=True)
    assert problem is not None
    raise problem


def _text(names: set[str]) -> list[dict[str, Any]]:
    if "input_ids" not in names:
        return []
    tokens = torch.randint(20, TOKENS, (BATCH, LENGTH))
    text: dict[str, Any] = {"input_ids": tokens}
    if "attention_mask" in names:
        text["attention_mask"] = torch.ones(BATCH, LENGTH, dtype=torch.long)
    if "bbox" in names:
        text["bbox"] = torch.randint(0, 10, (BATCH, LENGTH, 4)).sort(dim=-1).values
    return [text]


def _image(names: set[str], config: Any) -> list[dict[str, Any]]:
    name = next(
        (name for name in ("pixel_values", "pixel_values_videos", "flattened_patches") if name in names), ""
    )
    if not name:
        return []
    vision = getattr(config, "vision_config", config)
    size = getattr(vision, "image_size", 32)
    size = size[0] if isinstance(size, (list, tuple)) else size
    size = size if isinstance(size, int) else 32
    channels = getattr(vision, "num_channels", 3)
    channels = channels if isinstance(channels, int) else 3
    frames = getattr(vision, "num_frames", 4)
    image, video = torch.randn(BATCH, channels, size, size), torch.randn(BATCH, frames, channels, size, size)
    large = torch.randn(BATCH, channels, 64, 64)
    return [{name: image}, {name: video}, {name: large}]


def _audio(names: set[str], config: Any) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    audio = getattr(config, "audio_config", config)
    bins = next(
        (
            n
            for key in ("num_mel_bins", "feature_size", "n_mels")
            if isinstance(n := getattr(audio, key, None), int)
        ),
        16,
    )
    frames = 2 * (getattr(audio, "max_source_positions", 32) or 32)
    for name in ("input_features", "input_values"):
        if name in names:
            found += [
                {name: torch.randn(BATCH, bins, frames)},
                {name: torch.randn(BATCH, frames, bins)},
                {name: torch.randn(BATCH, 4000)},
                {name: torch.randn(BATCH, 1, 4000)},
            ]
    return found


def _decoder(names: set[str]) -> dict[str, Any]:
    if "decoder_input_ids" not in names:
        return {}
    return {"decoder_input_ids": torch.randint(20, TOKENS, (BATCH, LENGTH))}


def _labels(names: set[str]) -> list[dict[str, Any]]:
    if "labels" not in names:
        return [{"return_loss": True}, {}] if "return_loss" in names else [{}]
    tokens = torch.randint(20, TOKENS, (BATCH, LENGTH))
    classes = torch.randint(0, LABELS, (BATCH,))
    return [
        {"labels": tokens},
        {"labels": classes},
        {"labels": torch.randint(0, LABELS, (BATCH, 32, 32))},
        {},
    ]
