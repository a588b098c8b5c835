"""Make a transformers configuration tiny, by the names of its fields alone."""

import re
from typing import Any

SIZES: tuple[tuple[str, int], ...] = (
    (r"mamba_d_head", 16),
    (r"d_head", 8),
    (r".*vocab_size(_\w+)?|.*codebook_size|n_vocab|num_codevectors.*", 128),
    (r"(num_)?(local_|routed_)?experts|n_routed_experts|num_local_experts|moe_num_experts|.*num_experts", 4),
    (r"num_experts_per_tok(en)?|moe_top_k|top_k_experts|moe_k|num_selected_experts|.*experts_per_tok\w*", 2),
    (r"n_group|topk_group|num_expert_group\w*|n_shared_experts|num_shared_experts", 1),
    (r"(num_)?(key_value|kv)_heads|num_key_value_heads|\w+_num_key_value_heads|n_kv_heads?", 2),
    (r"(num_|n_)?(\w+_)?(attention_|attn_)?heads?|n_heads?|num_heads|\w+_attention_heads|num_\w+_heads", 4),
    (r"(qk_|v_|linear_\w+_|mamba_|global_|swa_|\w+_)?head_dim", 8),
    (r"d_kv|kv_channels|attention_head_size", 8),
    (r"qk_rope_head_dim|qk_nope_head_dim|v_head_dim|rotary_dim|index_head_dim", 8),
    (r"q_lora_rank|kv_lora_rank|o_lora_rank|\w*lora_rank|lora_r", 8),
    (r"(num_|n_)?(\w+_)?(hidden_)?layers|n_layers?|depth|num_blocks|\w+_depth|num_\w*layers|\w+_layers", 2),
    (r"(\w+_)?(intermediate|ffn|ff|inner|mlp|feed_forward)_(size|dim|hidden_size)|d_ff|d_inner|n_inner", 64),
    (
        r"\w*ffn_dim|\w*intermediate_size|\w*ffn_hidden_size|\w*mlp_dim|dim_feedforward|ffn_size|block_ff_dim",
        64,
    ),
    (r"image_size|img_size|input_size|\w+_image_size|crop_size", 32),
    (r"patch_size|\w+_patch_size", 8),
    (r"max_position_embeddings|n_positions|max_seq_len|max_sequence_length|n_ctx|seq_length", 128),
    (r"max_source_positions|max_target_positions|max_length|\w+_max_positions", 64),
    (r"num_queries|num_object_queries|num_query_tokens|num_latents|num_labels", 8),
    (r"num_frames|frames|tubelet_num", 4),
    (r"num_mel_bins|n_mels|feature_size|num_mels|mel_bins|input_feat_per_channel", 16),
    (
        r"sliding_window|attention_window|local_window_size|block_size|chunk_size|mamba_chunk_size",
        8,
    ),
    (r"\w*window_size", 2),
    (r"num_groups", 4),
    (r"state_size|mamba_d_state|ssm_state_size|d_state|time_step_rank", 8),
    (r"mamba_n_heads|mamba_num_heads|linear_num_\w+_heads|n_mamba_heads", 4),
    (
        r"(\w+_)?(hidden_size|hidden_dim|embed_dim|embedding_size|d_model|n_embd|projection_dim|dim|out_dim)",
        32,
    ),
    (r"\w*(embedding|embed|hidden|projection|decoder|encoder|output|proj|token|feature)_(size|dim|dims)", 32),
    (
        r"mamba_d_ssm|lru_width|conv_dim|num_channels_\w+|fpn_hidden_size|out_channels|classifier_proj_size",
        32,
    ),
)
LISTS: tuple[tuple[str, int], ...] = (
    (r"depths|num_(\w+_)?blocks|layers|\w*depths|num_layers|block_repeats", 1),
    (r"num_(attention_)?heads|num_heads|\w+num_heads|\w*heads", 2),
    (
        r"hidden_sizes|embed_dims?|dims|\w*hidden_sizes|out_channels|\w*channels|neck_hidden_sizes|conv_dim",
        16,
    ),
)
LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
FIRST_TOKEN = 3
NUMBERED = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}
TOKEN = re.compile(r"\w+_token_id|\w+_token_index|\w+_id|\w+_index")
KEPT = re.compile(
    r"num_feat_extract_layers|qk_head_dim|num_channels|in_channels|num_input_channels|hidden_act|use_\w+|\w*_version"
)


def shrunk(kind: type, default: Any = None, *, layers: int = 2, **sizes: int) -> Any:
    """A tiny configuration of `kind`; fields that follow from others are left to the class itself.

    Some alternate between kinds of layers, and need more `layers` to have one of each; `sizes` are for
    fields that have to fit to others.
    """
    from transformers import PreTrainedConfig

    default = kind() if default is None else default
    changes: dict[str, Any] = {}
    counts = {getattr(default, name, None) for name in LAYERS}
    token = FIRST_TOKEN
    for name, value in sorted(vars(default).items()):
        if name.startswith("_") or KEPT.fullmatch(name):
            continue
        if isinstance(value, PreTrainedConfig):
            changes[name] = shrunk(type(value), value, layers=layers, **sizes)
        elif value is None and name == "head_dim":
            changes[name] = 8
        elif isinstance(value, bool) or value is None:
            continue
        elif isinstance(value, int):
            small = _small(name, value)
            if name in LAYERS and small is not None:
                small = layers
            small = sizes.get(name, small)
            if TOKEN.fullmatch(name) and value >= FIRST_TOKEN:
                small, token = NUMBERED.get(name, token), token + 1
            if small is not None:
                changes[name] = small
        elif isinstance(value, (list, tuple)) and value and all(isinstance(each, int) for each in value):
            many = _small_list(name, list(value))
            if many is not None:
                changes[name] = type(value)(many)
        elif (
            isinstance(value, list) and len(value) in counts and all(isinstance(each, str) for each in value)
        ):
            changes[name] = value[:layers]
    return _made(kind, default, changes)


def _small(name: str, value: int) -> int | None:
    for pattern, size in SIZES:
        if re.fullmatch(pattern, name):
            return size if value > size else None
    return None


def _small_list(name: str, values: list[int]) -> list[int] | None:
    if name in ("image_size", "patch_size"):
        return [32 if name == "image_size" else 8] * len(values)
    if name == "mrope_section":
        return [2, 1, 1]
    for pattern, size in LISTS:
        if re.fullmatch(pattern, name) and len(values) > 1:
            return [size * (index + 1 if size > 4 else 1) for index in range(len(values))]
    return None


def _made(kind: type, default: Any, changes: dict[str, Any]) -> Any:
    """With the changes that the class takes: some only fit together with others that it derives itself."""
    changes |= _rope(default)
    try:
        return kind(**changes)
    except Exception:
        plain = {name: value for name, value in changes.items() if not isinstance(value, (list, tuple))}
        return kind(**plain)


def _rope(default: Any) -> dict[str, Any]:
    settings = getattr(default, "rope_parameters", None)
    if not isinstance(settings, dict) or any(isinstance(value, dict) for value in settings.values()):
        return {}
    return {"rope_parameters": {**settings, "mrope_section": [2, 1, 1]}}
