"""Tables by model type: properties that transformers' code decides and a config.json does not say.

A type is the value of ``model_type`` in a config.json, such as ``qwen3_moe``. A test compares every type of
`PLANNED_TYPES` with the model that transformers builds (tests/unit/models/test_sizes.py).
"""

from __future__ import annotations

from ds_hetero.common.reading import shortened
from ds_hetero.errors import ModelError

GPT2_TYPES = {"gpt2", "gpt_bigcode"}
"""Types with the layers of GPT-2: biases, learned positions, an MLP of two matrices."""

BERT_TYPES = {
    "bert",
    "bert-generation",
    "camembert",
    "data2vec-text",
    "ernie",
    "roberta",
    "roberta-prelayernorm",
    "xlm-roberta",
    "xlm-roberta-xl",
}
"""Types with the layers of BERT, used as decoders: biases, learned positions, a transform before the head."""

UNGATED_MLP_TYPES = {
    "apertus",
    "arcee",
    "ctrl",
    "falcon",
    "gpt_neox",
    "jais2",
    "nanochat",
    "nemotron",
    "nemotron_h",
    "opt",
    "persimmon",
    "phi",
    "starcoder2",
    *GPT2_TYPES,
    *BERT_TYPES,
}
"""Types whose MLPs have two matrices (up, down), not three (gate, up, down)."""

TIED_TYPES = {
    "ctrl",
    "cohere",
    "cohere2",
    "cohere2_moe",
    "cohere_compass_text",
    "ernie4_5",
    "ernie4_5_moe",
    "gemma",
    "gemma2",
    "gemma3_text",
    "granite_swa",
    "lfm2",
    "lfm2_moe",
    "lfm3",
    "minicpm3",
    "modernbert-decoder",
    "opt",
    "smollm3",
    "starcoder2",
    "vaultgemma",
    "youtu",
    *GPT2_TYPES,
    *BERT_TYPES,
}
"""Types whose embedding and head are one matrix if ``tie_word_embeddings`` is left out, as in older files."""

GATED_ATTENTION_TYPES = {"afmoe", "beam"}
"""Types whose attention output is multiplied by a gate of its width; `configs` adds those with recurrent layers."""

HEAD_NORM_PREFIXES = (
    "afmoe",
    "apertus",
    "beam",
    "dots1",
    "exaone4",
    "exaone_moe",
    "flex_olmo",
    "flint",
    "gemma3",
    "hunyuan_v1",
    "hy_v3",
    "kolibri1",
    "laguna",
    "lfm2",
    "lfm3",
    "mellum",
    "minimax_m2",
    "minimax_m3",
    "olmo2",
    "olmo3",
    "olmoe",
    "qwen3",
)
"""A type that begins with one of these normalizes queries and keys: ``qwen3`` is for ``qwen3_moe``, too."""

TEXT_CONFIG_DEFAULTS = {
    "gemma3_text": {
        "hidden_size": 2304,
        "intermediate_size": 9216,
        "num_hidden_layers": 26,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "vocab_size": 262_208,
        "sliding_window": 4096,
    },
    "llama": {
        "hidden_size": 4096,
        "intermediate_size": 11_008,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "vocab_size": 32_000,
    },
    "mistral": {
        "hidden_size": 4096,
        "intermediate_size": 14_336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": 32_000,
        "sliding_window": 4096,
    },
    "qwen2": {
        "hidden_size": 4096,
        "intermediate_size": 22_016,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 32,
        "vocab_size": 151_936,
    },
}
"""Defaults of transformers' configuration classes, which older files leave out of ``text_config`` (Gemma 3, LLaVA)."""

KIMI_LINEAR_TYPES = {"bailing_hybrid", "kimi_linear"}
"""Types that alternate layers of Kimi's delta attention and of latent attention."""

LATENT_TYPES = {"axk1", "deepseek_v2", "deepseek_v3", "glm4_moe_lite", "minicpm3", "youtu", *KIMI_LINEAR_TYPES}
"""Types with multi-head latent attention (DeepSeek-V2, arXiv:2405.04434)."""

WINDOW_IN_ALL_LAYERS_TYPES = {
    "ministral",
    "ministral3",
    "mistral",
    "mixtral",
    "moshi",
    "phi3",
    "phimoe",
    "qwen3_moe",
    "starcoder2",
}
"""Types in which every layer has the sliding window if ``layer_types`` is left out."""

FULL_ATTENTION_PERIOD = {"cohere2": 4, "gemma2": 2, "gemma3_text": 6}
"""Period of the layers with full attention, if ``layer_types`` and ``sliding_window_pattern`` are left out.

Every 6th layer of Gemma 3 attends to all tokens, the other layers have the sliding window.
"""

WINDOW_FROM_LAYER_TYPES = {"dots1", "qwen2", "qwen2_moe", "qwen3"}
"""Types whose layers from index ``max_window_layers`` on have the window if ``layer_types`` is left out."""

WINDOW_IF_FLAG_TYPES = {"qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "smollm3"}
"""Types that ignore ``sliding_window`` unless ``use_sliding_window`` is true."""

_DECODERS = """
afmoe apertus arcee aria_text axk1 bailing_hybrid bamba beam bert bert-generation bitnet camembert cohere cohere2
cohere2_moe cohere_compass_text ctrl cwm data2vec-text deepseek_v2 deepseek_v3 diffllama dots1 emu3_text_model ernie
ernie4_5 ernie4_5_moe exaone4 exaone_moe falcon_h1 flex_olmo flint gemma gemma2 gemma3_text glm glm4 glm4_moe
glm4_moe_lite gpt2 gpt_bigcode gpt_neox gpt_oss granite granite_swa granitemoe granitemoe_swa granitemoehybrid
granitemoeshared helium hunyuan_v1_dense hunyuan_v1_moe hy_v3 hyperclovax internlm3 iquestcoder jais2 kimi_linear
kolibri1 laguna lfm2 lfm2_moe lfm3 llama mellum minicpm3 minimax_m2 minimax_m3_vl_text ministral ministral3 mistral
mixtral mllama_text_model modernbert-decoder moshi nanochat nemotron nemotron_h olmo olmo2 olmo3 olmo_hybrid olmoe opt
persimmon phi phi3 phimoe qwen2 qwen2_moe qwen3 qwen3_5_moe_text qwen3_5_text qwen3_moe qwen3_next roberta
roberta-prelayernorm seed_oss smollm3 solar_open stablelm starcoder2 vaultgemma xlm-roberta xlm-roberta-xl youtu
"""
_DECODERS_BESIDE_TOWERS = """
glm4v_moe_text glm4v_text glm_ocr_text granite_docling_text hunyuan_vl_text paddleocr_vl_text qwen2_5_omni_text
qwen2_5_vl_text qwen2_vl_text qwen3_omni_moe_text qwen3_vl_moe_text qwen3_vl_text
"""
_ENCODERS = "esmc eurobert gte nomic_bert"
# Multimodal types whose older files have the decoder's keys at the top level, not in text_config.
_DECODERS_AT_TOP = "qwen2_vl qwen2_5_vl"

PLANNED_TYPES = frozenset(f"{_DECODERS} {_DECODERS_BESIDE_TOWERS} {_ENCODERS} {_DECODERS_AT_TOP}".split())
"""Types that can be planned: the parameters counted from their configuration are those that transformers builds."""

UNPLANNED_TYPES = {
    "albert": "its layers share one set of weights, so that a layer is computed more often than it is stored",
    "electra": "its embedding is narrower than its layers",
    "gemma3n_text": "its layers have several streams (AltUp) and share keys, which has no cost model",
    "gemma4_text": "its layers differ in heads and have inputs of their own, which has no cost model",
    "gemma4_unified_text": "its layers differ in heads, which has no cost model",
    "hrm_text": "its two stacks of layers are computed several times in a forward, which has no cost model",
    "longcat_flash": "its layers have two attentions each, and experts without weights, whose work the router decides",
    "roc_bert": "its three embeddings are joined by a projection, which has no cost model",
    "xmod": "its layers have adapters by language, which have no cost model",
    "zamba2": "its attention layers share one set of weights, which has no cost model",
}
"""Types that cannot be planned, each with the reason, which ends the message of the refusal."""

UNPLANNED_TOWERS = {
    "got_ocr2": "the tower of images",
    "moss_transcribe_diarize": "the tower of sounds",
}
"""Multimodal types that cannot be planned because the parameters of their encoder (tower) are not counted."""


def refuse_unplanned_type(model_type: str, outer_type: str, name: str) -> None:
    """Raise `ModelError` for a model type that is not in `PLANNED_TYPES`; an empty type passes.

    Args:
        model_type: ``model_type`` of the decoder.
        outer_type: ``model_type`` of the whole configuration; the same, except in multimodal models.
        name: name of the model, for messages.
    """
    if outer_type in UNPLANNED_TOWERS:
        raise ModelError(
            f"{name}: model type {outer_type} cannot be planned: {UNPLANNED_TOWERS[outer_type]} beside its decoder is "
            "of a size not counted. Plan the decoder alone: save its text_config as a config.json."
        )
    if model_type in UNPLANNED_TYPES:
        raise ModelError(f"{name}: model type {model_type} cannot be planned: {UNPLANNED_TYPES[model_type]}.")
    if model_type and model_type not in PLANNED_TYPES:
        raise ModelError(
            f"{name}: the size of model type {shortened(model_type)} is not known. If its layers are those of a type "
            'that is planned, such as llama, give it a config.json with that "model_type".'
        )
