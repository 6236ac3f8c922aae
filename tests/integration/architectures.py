"""The architectures of transformers that are exact when split over the sequence, each built tiny by its name."""

from __future__ import annotations

from typing import Any

import torch

_CAUSAL = """
afmoe apertus arcee aria_text axk1 beam bert bert-generation bitnet cohere cohere2 cohere2_moe ctrl cwm
deepseek_v2 deepseek_v3 diffllama dots1 electra ernie ernie4_5 ernie4_5_moe exaone4 exaone_moe flex_olmo gemma
gemma2 gemma3_text gemma4_text glm glm4 glm4_moe glm4_moe_lite gpt-sw3 gpt2 gpt_bigcode gpt_neox gpt_oss granite
granitemoe granitemoeshared helium hrm_text hunyuan_v1_dense hunyuan_v1_moe hy_v3 hyperclovax internlm3
iquestcoder jais2 kolibri1 laguna lfm2 llama longcat_flash mellum minicpm3 minimax_m2 minimax_m3_vl_text
ministral ministral3 mistral mixtral mllama_text_model modernbert-decoder moshi nanochat nemotron olmo olmo2
olmo3 olmoe persimmon phi phi3 phimoe qwen2 qwen2_moe qwen3 qwen3_moe roc_bert seed_oss smollm3 solar_open
starcoder2 vaultgemma youtu
"""
_MASKED = "albert bert distilbert electra ernie esmc eurobert gte jina_embeddings_v3 nomic_bert roc_bert"

CAUSAL = tuple(_CAUSAL.split())
"""Model types of decoders, as in config.json."""

MASKED = tuple(_MASKED.split())
"""Model types of masked-language models."""

VOCAB = 96

# Given to every configuration that has a field of the name.
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "max_position_embeddings": 256,
    "hidden_size": 32,
    "d_model": 32,
    "dim": 32,
    "embedding_size": 32,
    "intermediate_size": 48,
    "ffn_hidden_size": 48,
    "hidden_dim": 48,
    "dff": 48,
    "num_hidden_layers": 2,
    "num_layers": 2,
    "n_layers": 2,
    "num_attention_heads": 4,
    "n_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "sliding_window": 16,
    # mixtures of experts
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_topk": 2,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
    "expert_ffn_hidden_size": 16,
    "zero_expert_num": 1,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "num_nextn_predict_layers": 0,
    # latent attention
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "qk_head_dim": 16,
    "v_head_dim": 8,
    # embeddings
    "vocab_size_per_layer_input": VOCAB,
    "hidden_size_per_layer_input": 8,
    # The comparison in the tests needs none; within attention it is refused.
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
    "attention_dropout": 0.0,
    "attn_pdrop": 0.0,
    "resid_pdrop": 0.0,
    "embd_pdrop": 0.0,
}
_LATENT: dict[str, Any] = {"num_key_value_heads": 4, "head_dim": None}

# What a configuration needs beyond or against `SIZES`; None leaves a field out.
CHANGES: dict[str, dict[str, Any]] = {
    "axk1": _LATENT,
    "bert": {"is_decoder": True},
    "bert-generation": {"is_decoder": True},
    "deepseek_v2": _LATENT,
    "deepseek_v3": _LATENT,
    "dots1": {"n_shared_experts": 1, "n_routed_experts": 4, "num_experts_per_tok": 2},
    "gemma4_text": {"head_dim": None, "global_head_dim": 16, "num_key_value_heads": 2, "layer_types": None},
    "electra": {"is_decoder": True},
    "ernie": {"is_decoder": True},
    "esmc": {"num_key_value_heads": 4},
    "glm4_moe_lite": _LATENT,
    "gpt_bigcode": {"num_key_value_heads": None},
    "hunyuan_v1_moe": {"moe_topk": [2, 2]},
    "longcat_flash": {**_LATENT, "head_dim": 8},
    "minicpm3": _LATENT,
    "mllama_text_model": {"cross_attention_layers": []},
    "roc_bert": {
        "is_decoder": True,
        "pronunciation_embed_dim": 16,
        "shape_embed_dim": 16,
        "pronunciation_vocab_size": 32,
        "shape_vocab_size": 32,
    },
    "youtu": _LATENT,
}


def build(model_type: str, dtype: torch.dtype, *, masked: bool = False) -> Any:
    """Make a tiny random model, the same on every rank, in training.

    Args:
        model_type: of `CAUSAL` or `MASKED`.
        dtype: of its parameters.
        masked: with the head of a masked-language model.
    """
    from transformers import AutoModelForCausalLM, AutoModelForMaskedLM, MllamaForCausalLM
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    config_class = CONFIG_MAPPING[model_type]
    fields = {*config_class().to_dict(), *config_class.attribute_map}
    sizes = {name: value for name, value in SIZES.items() if name in fields} | CHANGES.get(model_type, {})
    config = config_class(**{n: v for n, v in sizes.items() if v is not None and not (masked and n == "is_decoder")})
    if model_type == "mllama_text_model":
        make: Any = MllamaForCausalLM._from_config
    else:
        make = (AutoModelForMaskedLM if masked else AutoModelForCausalLM).from_config
    torch.manual_seed(0)
    try:
        model = make(config, attn_implementation="sdpa")
    except ValueError:  # has eager attention only
        model = make(config, attn_implementation="eager")
    return model.to(dtype).train()
