"""Make a `ModelSpec` from the content of a Hugging Face config.json.

The steps of `model_from_config`:

1. Take the decoder's keys, which multimodal models have in ``text_config``, and rename keys that only one model type
   uses (`ds_hetero.models.usual_keys`).
2. Refuse layers for which there is no cost model (`ds_hetero.models.unplanned_configs`).
3. Read recurrent layers, attention and MLPs, each by the module of that name.
4. Add properties that follow from the model type and not from a key (`ds_hetero.models.families`).
5. Count the remaining weights, such as biases (`ds_hetero.models.other_weights`).

In all these modules ``name`` is the model's name, with which every message begins.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from ds_hetero.common.reading import MAX_LAYERS, JsonObject, is_whole, shortened
from ds_hetero.common.text import listed
from ds_hetero.errors import ModelError
from ds_hetero.models.attention_configs import read_latent_attention, read_window
from ds_hetero.models.config_values import read_flag, read_int, read_string
from ds_hetero.models.families import (
    GATED_ATTENTION_TYPES,
    HEAD_NORM_PREFIXES,
    TEXT_CONFIG_DEFAULTS,
    TIED_TYPES,
    UNGATED_MLP_TYPES,
    refuse_unplanned_type,
)
from ds_hetero.models.latent import LatentAttention
from ds_hetero.models.mlp_configs import find_missing_mlp_keys, read_mlp_sizes
from ds_hetero.models.other_weights import count_other_layer_weights, count_other_weights
from ds_hetero.models.recurrent import RecurrentLayers
from ds_hetero.models.recurrent_configs import read_recurrent_layers
from ds_hetero.models.saved_tensors import read_saved_tensors
from ds_hetero.models.shapes import ModelSpec
from ds_hetero.models.unplanned_configs import (
    refuse_narrow_embedding,
    refuse_other_attention,
    refuse_unlike_layers,
)
from ds_hetero.models.usual_keys import with_usual_keys


class _SizeKeys(NamedTuple):
    """Keys of a config.json that hold the sizes of the decoder."""

    num_layers: str
    hidden_size: str
    num_heads: str


_KEYS = _SizeKeys("num_hidden_layers", "hidden_size", "num_attention_heads")
_GPT2_KEYS = _SizeKeys("n_layer", "n_embd", "n_head")
_GATED_ATTENTION_PREFIXES = ("qwen3_next", "qwen3_5")  # model types with recurrent layers and gated attention


class _Heads(NamedTuple):
    """Attention heads of one layer."""

    num_heads: int  # query heads
    num_kv_heads: int  # key/value heads; divides ``num_heads``
    head_dim: int  # elements of a query


def model_from_config(config: Any, name: str) -> ModelSpec:
    """Return the shape of the model that a config.json describes.

    Args:
        config: content of the file.
        name: name of the model, for messages and as `ModelSpec.name`.

    Raises:
        ModelError: a key is missing or has a wrong value, or no cost model covers the model type, its layers or its
            attention; the message names the key or the type.
    """
    decoder = _decoder_config(config, name)
    model_type = read_string(decoder, "model_type", name)
    if decoder is not config:  # transformers fills a text_config, and no other file, with the defaults of its class
        decoder = {**TEXT_CONFIG_DEFAULTS.get(model_type, {}), **decoder}
    refuse_unplanned_type(model_type, read_string(config, "model_type", name), name)
    keys = _GPT2_KEYS if "n_embd" in decoder else _KEYS
    decoder = with_usual_keys(decoder, model_type, _num_layers(decoder, keys), name)
    num_layers = _num_layers(decoder, keys)  # may have changed: Nemotron-H's usual keys count its list of layers
    refuse_unlike_layers(decoder, name)
    refuse_narrow_embedding(decoder, keys.hidden_size, name)
    recurrent = read_recurrent_layers(decoder, num_layers, name) if num_layers else None
    refuse_other_attention(decoder, name, recurrent)
    window, num_window_layers = read_window(decoder, num_layers, recurrent, name)
    _expect_keys(decoder, [*keys, "vocab_size", *find_missing_mlp_keys(decoder, num_layers, name)], name)
    # From here on all keys are there; wrong values are refused one by one.
    latent = read_latent_attention(decoder, name)
    heads = _read_heads(decoder, keys, latent, name)
    mlps = read_mlp_sizes(decoder, num_layers, name)
    spec = ModelSpec(
        name=name,
        num_layers=read_int(decoder, keys.num_layers, name),
        hidden_size=read_int(decoder, keys.hidden_size, name),
        num_heads=heads.num_heads,
        num_kv_heads=heads.num_kv_heads,
        head_dim=heads.head_dim,
        mlp_size=mlps.mlp_size,
        vocab_size=read_int(decoder, "vocab_size", name),
        gated_mlp=_has_gated_mlp(decoder, model_type, name),
        tied_embeddings=_has_tied_embeddings(decoder, config, model_type, name),
        num_experts=mlps.num_experts,
        experts_per_token=mlps.experts_per_token,
        shared_mlp_size=mlps.shared_mlp_size,
        gated_attention=_has_gated_attention(model_type, recurrent),
        head_norms=model_type.startswith(HEAD_NORM_PREFIXES),
        recurrent=recurrent,
        dense_layers=mlps.dense_layers,
        dense_mlp_size=mlps.dense_mlp_size,
        window=window,
        window_layers=num_window_layers,
        latent=latent,
        saved=read_saved_tensors(decoder, model_type),
    )
    return replace(
        spec,
        other_layer_parameters=count_other_layer_weights(decoder, model_type, spec),
        other_parameters=count_other_weights(decoder, config, name, spec),
    )


def _decoder_config(config: Any, name: str) -> JsonObject:
    """Return the decoder's keys: ``text_config`` of a multimodal model, else the whole configuration.

    Raises:
        ModelError: the configuration or its ``text_config`` is not an object.
    """
    if not isinstance(config, Mapping):
        raise ModelError(f"{name}: a model config is a JSON object, got {shortened(config)}.")
    decoder = config.get("text_config")
    if decoder is None:
        return config
    if not isinstance(decoder, Mapping):
        raise ModelError(f"{name}: text_config must be an object, got {shortened(decoder)}.")
    return decoder


def _num_layers(config: JsonObject, keys: _SizeKeys) -> int:
    """Return the number of layers; 0 if the key is missing or wrong, which `model_from_config` refuses later."""
    num_layers = config.get(keys.num_layers)
    return int(config[keys.num_layers]) if is_whole(num_layers, 1, MAX_LAYERS) else 0


def _expect_keys(config: JsonObject, keys: Sequence[str], name: str) -> None:
    """Raise `ModelError` with the keys that the configuration lacks, and with those that it has."""
    missing = [key for key in keys if key not in config]
    if missing:
        raise ModelError(
            f"{name}: the model config lacks {', '.join(missing)}; it has {listed(sorted(map(str, config)))}."
        )


def _read_heads(config: JsonObject, keys: _SizeKeys, latent: LatentAttention | None, name: str) -> _Heads:
    """Return the heads that the attention kernel sees.

    Latent attention expands its narrow vector to keys and values of all heads before the kernel. A query of it has an
    unrotated and a rotated part: 128 + 64 elements in DeepSeek-V3.

    Raises:
        ModelError: the heads do not divide by the key/value heads, or, without ``head_dim``, the width by the heads.
    """
    num_heads = read_int(config, keys.num_heads, name)
    if latent is not None:
        return _Heads(num_heads, num_heads, read_int(config, "qk_nope_head_dim", name) + latent.rope_dim)
    hidden_size = read_int(config, keys.hidden_size, name)
    num_kv_heads = read_int(config, "num_key_value_heads", name, default=num_heads)
    if config.get("head_dim") is not None:
        head_dim = read_int(config, "head_dim", name)
    elif hidden_size % num_heads:
        raise ModelError(
            f"{name}: {keys.hidden_size}={hidden_size} is not a multiple of {keys.num_heads}={num_heads}. Give "
            "head_dim."
        )
    else:
        head_dim = hidden_size // num_heads
    if num_heads % num_kv_heads:
        raise ModelError(
            f"{name}: {keys.num_heads}={num_heads} is not a multiple of num_key_value_heads={num_kv_heads}. The query "
            "heads are divided evenly over the key/value heads: change one of the two."
        )
    return _Heads(num_heads, num_kv_heads, head_dim)


def _has_gated_mlp(config: JsonObject, model_type: str, name: str) -> bool:
    """Return True for MLPs of three matrices (gate, up, down), False for two (up, down)."""
    activation_key = "hidden_act" if "hidden_act" in config else "activation_function"
    activation = read_string(config, activation_key, name).lower()
    is_gpt2 = "n_embd" in config
    return not (is_gpt2 or model_type in UNGATED_MLP_TYPES or activation == "relu")


def _has_tied_embeddings(decoder: JsonObject, config: JsonObject, model_type: str, name: str) -> bool:
    """Return True if embedding and head are one matrix.

    The decoder's key decides, then that of the whole configuration, then the default of the model type.
    """
    type_default = model_type in TIED_TYPES or "n_embd" in decoder
    config_default = read_flag(config, "tie_word_embeddings", type_default, name)
    return read_flag(decoder, "tie_word_embeddings", config_default, name)


def _has_gated_attention(model_type: str, recurrent: RecurrentLayers | None) -> bool:
    """Return True if attention's output is multiplied by a gate of its width, as transformers builds this type."""
    is_gated_hybrid = recurrent is not None and model_type.startswith(_GATED_ATTENTION_PREFIXES)
    return is_gated_hybrid or model_type in GATED_ATTENTION_TYPES
