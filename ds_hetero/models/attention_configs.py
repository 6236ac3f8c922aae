"""Read the attention of a config.json: sliding windows, and latent attention."""

from __future__ import annotations

from typing import Any

from ds_hetero.common.reading import MAX_LAYERS, JsonObject, is_whole, shortened
from ds_hetero.common.text import listed
from ds_hetero.errors import ModelError
from ds_hetero.models.config_values import expect_list_of_names, read_flag, read_int, read_string
from ds_hetero.models.families import (
    FULL_ATTENTION_PERIOD,
    LATENT_TYPES,
    WINDOW_FROM_LAYER_TYPES,
    WINDOW_IF_FLAG_TYPES,
    WINDOW_IN_ALL_LAYERS_TYPES,
)
from ds_hetero.models.latent import LatentAttention
from ds_hetero.models.recurrent import RecurrentLayers


def read_window(config: JsonObject, num_layers: int, recurrent: RecurrentLayers | None, name: str) -> tuple[int, int]:
    """Return the size of the sliding window in tokens, and the number of layers that have it.

    (0, 0) if all layers attend to the whole sequence. Gemma 2 with 26 layers and a window of 4,096: (4096, 13).

    Raises:
        ModelError: ``layer_types`` names a kind of layer without a cost model, or there is a window and neither a key
            nor the model type says which layers have it.
    """
    layer_types = config.get("layer_types")
    if layer_types is None:
        num_window_layers = _count_window_layers_by_type(config, num_layers, name) if _has_window(config, name) else 0
    else:
        num_window_layers = _count_listed_window_layers(layer_types, num_layers, recurrent, name)
    if not num_window_layers:
        return 0, 0
    return read_int(config, "sliding_window", name), num_window_layers


def _has_window(config: JsonObject, name: str) -> bool:
    """Return True if a configuration without ``layer_types`` switches its sliding window on."""
    is_on_by_default = read_string(config, "model_type", name) not in WINDOW_IF_FLAG_TYPES
    return bool(config.get("sliding_window")) and read_flag(config, "use_sliding_window", is_on_by_default, name)


def _count_listed_window_layers(layer_types: Any, num_layers: int, recurrent: RecurrentLayers | None, name: str) -> int:
    """Count the layers of type ``sliding_attention`` in the list of layer types."""
    expect_list_of_names(layer_types, name)
    unplanned = sorted(set(layer_types) - {"full_attention", "sliding_attention"})
    if unplanned and recurrent is None:  # `read_recurrent_layers` has checked the types of a model with recurrence
        raise ModelError(
            f"{name}: layer_types has {listed(unplanned, 8)}; only full_attention and sliding_attention can be planned."
        )
    num_window_layers: int = sum(layer_type == "sliding_attention" for layer_type in layer_types)
    if num_window_layers and len(layer_types) != num_layers:
        raise ModelError(
            f"{name}: layer_types names {len(layer_types)} layers of {num_layers}. Give one type for every layer."
        )
    return num_window_layers


def _count_window_layers_by_type(config: JsonObject, num_layers: int, name: str) -> int:
    """Count the layers with a window by the rule of the model type, for a configuration without ``layer_types``."""
    model_type = read_string(config, "model_type", name)
    if model_type in WINDOW_IN_ALL_LAYERS_TYPES:
        return num_layers
    if model_type in WINDOW_FROM_LAYER_TYPES:
        first_layer: Any = config.get("max_window_layers")
        # transformers windows layer i if i >= max_window_layers; Qwen sets it to num_hidden_layers for no window.
        if not is_whole(first_layer, 0, MAX_LAYERS):
            return 0
        num_full_layers: int = min(first_layer, num_layers)
        return num_layers - num_full_layers
    if model_type in FULL_ATTENTION_PERIOD:
        period = read_int(config, "sliding_window_pattern", name, default=FULL_ATTENTION_PERIOD[model_type])
        return num_layers - num_layers // period
    raise ModelError(
        f"{name}: sliding_window is {shortened(config['sliding_window'])}, but the configuration does not say which "
        "layers use it. List them in layer_types, or set sliding_window to null for full attention."
    )


def read_latent_attention(config: JsonObject, name: str) -> LatentAttention | None:
    """Return the shapes of latent attention; None if the model has none.

    Raises:
        ModelError: a key has a wrong value, or the model type is not known to have latent attention.
    """
    if not config.get("kv_lora_rank"):
        return None
    model_type = read_string(config, "model_type", name)
    if model_type not in LATENT_TYPES:
        raise ModelError(
            f"{name}: kv_lora_rank means latent attention, which ds_hetero has no cost model for in model type "
            f"{shortened(model_type)}. It has one for {', '.join(sorted(LATENT_TYPES))}."
        )
    return LatentAttention(
        query_rank=read_int(config, "q_lora_rank", name) if config.get("q_lora_rank") else 0,
        kv_rank=read_int(config, "kv_lora_rank", name),
        rope_dim=read_int(config, "qk_rope_head_dim", name),
        value_dim=read_int(config, "v_head_dim", name),
    )
