"""Makes a `ModelSpec` of the content of a Hugging Face config.json, by its keys and not by its type."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ds_hetero.common.reading import MAX_LAYERS, JsonObject, is_whole, shortened
from ds_hetero.common.text import listed
from ds_hetero.errors import ModelError
from ds_hetero.models.config_values import flag_value, text_value, whole_value
from ds_hetero.models.mlp_configs import is_dense, mlp_keys
from ds_hetero.models.recurrent_configs import recurrent_layers_of
from ds_hetero.models.shapes import ModelSpec
from ds_hetero.models.unplanned_configs import refuse_other_attention, refuse_unlike_layers


def model_from_config(config: Any, name: str) -> ModelSpec:
    """Return the model of a Hugging Face config.json.

    Raises:
        ModelError: keys are missing or wrong, or the layers are not alike, or attention is not plain softmax attention
            over the whole sequence; the message names the key.
    """
    config = _decoder_config(config, name)
    is_gpt2 = "n_embd" in config
    layers_key, hidden_key, heads_key = _GPT2_KEYS if is_gpt2 else _KEYS
    num_layers = int(config[layers_key]) if is_whole(config.get(layers_key), 1, MAX_LAYERS) else 0
    refuse_unlike_layers(config, name)
    recurrent = recurrent_layers_of(config, num_layers, name) if num_layers else None
    refuse_other_attention(config, name, recurrent)
    experts_key = next((key for key in ("num_local_experts", "num_experts") if config.get(key)), None)
    if recurrent is not None and is_dense(config, num_layers):
        experts_key = None
    mlp_key, shared_key = mlp_keys(config, experts_key, recurrent)
    needed = [layers_key, hidden_key, heads_key, "vocab_size"]
    if not is_gpt2:
        needed.append(mlp_key)
    if experts_key:
        needed.append("num_experts_per_tok")
    _expect_keys(config, needed, name)
    hidden_size = whole_value(config, hidden_key, name)
    num_heads, num_kv_heads, head_dim = _head_sizes(config, heads_key, hidden_key, name)
    if is_gpt2:
        mlp_size = whole_value(config, "n_inner", name) if config.get("n_inner") else 4 * hidden_size
    else:
        mlp_size = whole_value(config, mlp_key, name)
    activation_key = "hidden_act" if "hidden_act" in config else "activation_function"
    activation = text_value(config, activation_key, name).lower()
    model_type = text_value(config, "model_type", name)
    is_ungated = is_gpt2 or model_type in _UNGATED or activation == "relu"
    return ModelSpec(
        name=name,
        num_layers=whole_value(config, layers_key, name),
        hidden_size=hidden_size,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        mlp_size=mlp_size,
        vocab_size=whole_value(config, "vocab_size", name),
        gated_mlp=not is_ungated,
        tied_embeddings=flag_value(config, "tie_word_embeddings", is_gpt2, name),
        num_experts=whole_value(config, experts_key, name) if experts_key else 0,
        experts_per_token=whole_value(config, "num_experts_per_tok", name) if experts_key else 0,
        shared_mlp_size=whole_value(config, shared_key, name) if shared_key else 0,
        gated_attention=recurrent is not None and model_type.startswith(_GATED_ATTENTION),
        head_norms=model_type.startswith(_HEAD_NORMS),
        recurrent=recurrent,
    )


def _decoder_config(config: Any, name: str) -> JsonObject:
    """Return the keys of the decoder, which multimodal models have in text_config. Raises `ModelError`: no object."""
    if not isinstance(config, Mapping):
        raise ModelError(f"{name}: a model config is a JSON object, got {shortened(config)}.")
    decoder = config.get("text_config")
    if decoder is None:
        return config
    if not isinstance(decoder, Mapping):
        raise ModelError(f"{name}: text_config must be an object, got {shortened(decoder)}.")
    return decoder


def _expect_keys(config: JsonObject, keys: Sequence[str], name: str) -> None:
    missing = [key for key in keys if key not in config]
    if missing:
        raise ModelError(
            f"{name}: the model config lacks {', '.join(missing)}; it has {listed(sorted(map(str, config)))}."
        )


# Keys of layers, width and heads.
_KEYS = ("num_hidden_layers", "hidden_size", "num_attention_heads")
_GPT2_KEYS = ("n_layer", "n_embd", "n_head")
# Beginnings of model types, as transformers' models of these types are built.
_GATED_ATTENTION = ("qwen3_next", "qwen3_5")
_HEAD_NORMS = ("qwen3", "olmo2", "olmo3", "gemma3", "exaone4", "apertus")
# Model types whose MLPs have two matrices.
_UNGATED = {"gpt2", "gpt_neox", "gpt_bigcode", "phi", "starcoder2", "falcon", "opt", "persimmon", "nemotron"}


def _head_sizes(config: JsonObject, heads: str, hidden: str, name: str) -> tuple[int, int, int]:
    """Query heads, key/value heads and the width of a head; ``heads`` and ``hidden`` are the config's keys."""
    kv_key = "num_key_value_heads"
    num_heads = whole_value(config, heads, name)
    hidden_size = whole_value(config, hidden, name)
    num_kv_heads = whole_value(config, kv_key, name) if config.get(kv_key) is not None else num_heads
    if config.get("head_dim") is not None:
        head_dim = whole_value(config, "head_dim", name)
    elif hidden_size % num_heads:
        raise ModelError(f"{name}: {hidden}={hidden_size} is not a multiple of {heads}={num_heads}. Give head_dim.")
    else:
        head_dim = hidden_size // num_heads
    if num_heads % num_kv_heads:
        raise ModelError(f"{name}: {heads}={num_heads} is not a multiple of {kv_key}={num_kv_heads}.")
    return num_heads, num_kv_heads, head_dim
