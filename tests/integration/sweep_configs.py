"""Configurations of every architecture of transformers, tiny.

A configuration takes the common size of every field that it has; what a type needs beyond or against these is listed by
its ``model_type``, parts of configurations (texts, towers) included.
"""

from __future__ import annotations

import re
from copy import deepcopy
from typing import Any

from tests.integration.architectures import CHANGES, SIZES, VOCAB

# Beside `SIZES`, for the parts of configurations that describe towers and recurrent layers.
_MORE_SIZES: dict[str, Any] = {
    "depth": 2,
    "out_hidden_size": 32,
    "num_heads": 4,
    "patch_size": 4,
    "image_size": 16,
    "projection_dim": 32,
    "num_channels": 3,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48,
    "num_mel_bins": 8,
    "max_source_positions": 32,
    "n_embd": 32,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": 256,
    "n_inner": 48,
    "ffn_dim": 48,
    "word_embed_proj_dim": 32,
    "layerdrop": 0.0,
    "dropout": 0.0,
    "activation_dropout": 0.0,
    "dropout_rate": 0.0,
    "mamba_n_heads": 8,
    "mamba_d_head": 8,
    "mamba_n_groups": 2,
    "mamba_d_state": 8,
    "mamba_expand": 2,
    "mamba_chunk_size": 16,
    "mamba_num_heads": 8,
    "mamba_head_dim": 8,
    "n_groups": 2,
    "ssm_state_size": 8,
    "chunk_size": 16,
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "index_n_heads": 2,
    "index_head_dim": 8,
    "index_topk": 8,
    "out_features": None,
    "out_indices": None,
}

_LATENT = {"num_key_value_heads": 4, "head_dim": None}
_AXES = {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [1, 1, 2]}}

# None leaves a field out.
_AGAINST: dict[str, dict[str, Any]] = {
    "axk2": _LATENT,
    "bailing_hybrid": _LATENT,
    "bamba": {"attn_layer_indices": [1], "layer_types": None},
    "codegen": {"rotary_dim": 4},
    "cohere_compass_text": {
        "rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 10000.0}},
        "layer_types": ["full_attention"] * 2,
    },
    "cosmos3_edge_text": _AXES,
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "rope_theta": 10000.0},
        "ffn_config": {"ffn_hidden_size": 48, "moe_num_experts": 4, "moe_top_k": 2},
    },
    "deepseek_v32": _LATENT,
    "dots3_note": {**_LATENT, "per_layer_config": None},
    "dots3_note_text": _LATENT,
    "ernie4_5_vl_moe_text": {"moe_intermediate_size": [16, 16]},
    "falcon_h1": {"mamba_d_ssm": 64, "layer_types": None, "layers_block_type": None},
    "florence_vision": {"patch_size": [7, 3, 3, 3], "depths": [1, 1, 1, 1], "embed_dim": [16, 16, 32, 32]},
    "gemma3n_text": {
        "num_kv_shared_layers": 0,
        "intermediate_size": 48,
        "altup_num_inputs": 2,
        "laurel_rank": 8,
        "activation_sparsity_pattern": [0.0] * 2,
    },
    "fun_asr_nano": {"adaptor_config": {"intermediate_size": 8, "hidden_size": 32, "num_hidden_layers": 1}},
    "glm46v_text": _AXES,
    "glm5_next_text": {"num_key_value_heads": 4},
    "glm4v_moe_text": {**_AXES, "head_dim": 16},
    "glm4v_text": _AXES,
    "glm_moe_dsa": _LATENT,
    "glm_ocr_text": {"rope_parameters": {**_AXES["rope_parameters"], "mrope_section": [2, 2, 4]}, "head_dim": 16},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "gptj": {"rotary_dim": 4},
    "granitemoehybrid": {"layer_types": ["mamba", "attention"], "num_local_experts": 0},
    "hunyuan_vl_text": {"rope_parameters": {**_AXES["rope_parameters"], "mrope_section": [1, 1, 1, 1]}},
    "hunyuan_vl_vision": {"text_hidden_size": 32},
    "inkling2_vision": {"text_hidden_size": 32},
    "kimi_linear": {
        "layer_types": ["linear_attention", "full_attention"],
        "linear_head_dim": 8,
        "linear_num_heads": 4,
        "mlp_layer_types": ["dense", "dense"],
        "qk_head_dim": None,
        **_LATENT,
    },
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "luke": {"entity_vocab_size": 20, "entity_emb_size": 16},
    "mamba2": {"num_heads": 8, "head_dim": 8},
    "mistral4": _LATENT,
    "molmo2_adapter": {"text_hidden_size": 32},
    "molmo2_vision": {"image_size": [16, 16], "num_key_value_heads": 4},
    "mpt": {"attn_config": {"attn_pdrop": 0}},
    "muse_spark_audio": {"num_hidden_layers": 4},
    "nemotron_h": {"layers_block_type": ["mamba", "attention"], "layer_types": None},
    "neomme": {"head_dim": 16},
    "paddleocr_vl_text": _AXES,
    "perceiver": {"d_latents": 32, "num_latents": 8},
    "qwen2_5_omni_text": _AXES,
    "qwen2_5_vl_text": _AXES,
    "qwen2_vl_text": _AXES,
    "qwen2_vl_vision": {"embed_dim": 32},
    "radio": {"video_temporal_patch_size": 2},
    "qwen4_exp_text": {
        "layer_types": ["linear_attention", "indexed_attention"],
        "indexer_n_heads": 2,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 8,
        "indexer_budget": 8,
        "indexer_compress_ratio": 4,
    },
    "reformer": {"axial_pos_embds": False},
    "xmod": {"default_language": "en_XX"},
    "zamba": {
        "layers_block_type": ["linear_attention", "hybrid"] * 2,
        "num_hidden_layers": 4,
        "layer_types": None,
        "attention_head_dim": None,
        "num_key_value_heads": 4,
        "n_mamba_heads": 2,
    },
    "zamba2": {
        "layers_block_type": ["mamba", "hybrid"],
        "layer_types": None,
        "n_mamba_heads": 8,
        "mamba_headdim": 8,
        "mamba_ngroups": 2,
        "num_mem_blocks": 1,
        "attention_head_dim": 16,
        "num_key_value_heads": 4,
    },
    "zaya": {"num_experts_per_tok": 1},
}


def tiny_config(config_class: Any, head: str) -> Any:
    """The configuration with the common sizes wherever it has a field of such a name, parts included.

    Args:
        config_class: of transformers.
        head: ``"causal"`` for decoders, so that what may be either is one.
    """
    default = config_class()
    # Copied: configurations write into the dictionaries that they are given, and types share some of these.
    changes = deepcopy(CHANGES.get(config_class.model_type, {}) | _AGAINST.get(config_class.model_type, {}))
    fields = {*default.to_dict(), *config_class.attribute_map}
    sizes = {**_MORE_SIZES, **SIZES}
    values = {name: value for name, value in sizes.items() if name in fields and value is not None} | changes
    stands_for = config_class.attribute_map.get("layer_types", "")
    if isinstance(getattr(config_class, stands_for, None), property):  # made from other fields
        fields.discard("layer_types")
        values.pop("layer_types", None)
    if "layer_types" in fields and "layer_types" not in changes and getattr(default, "layer_types", None):
        kinds = list(dict.fromkeys(default.layer_types))
        values["layer_types"] = (kinds * 2)[: max(2, len(kinds))]
        values["num_hidden_layers"] = len(values["layer_types"])
    for name in getattr(config_class, "sub_configs", {}):
        part = getattr(default, name, None)
        if part is not None and name not in changes:
            values[name] = tiny_config(type(part), "")
    if head == "causal" and "is_decoder" in fields and "is_encoder_decoder" in fields:
        values.setdefault("is_decoder", True)
    if head == "masked":
        values.pop("is_decoder", None)
    values |= _small_token_ids(default, fields, values)
    fixed = {name for name in values if isinstance(getattr(config_class, name, None), property)}
    return config_class(**{n: v for n, v in values.items() if v is not None and n not in fixed - {*changes}})


def _small_token_ids(default: Any, fields: set[str], values: dict[str, Any]) -> dict[str, int]:
    """Of tokens with a meaning, such as places of images, whose default is outside of the vocabulary."""
    small: dict[str, int] = {}
    for name in re.findall(r"\w+_token_(?:id|index)\b", " ".join(sorted(fields))):
        number = getattr(default, name, None)
        if name not in values and isinstance(number, int) and number >= VOCAB:
            small[name] = VOCAB - 8 + len(small) % 8
    return small
