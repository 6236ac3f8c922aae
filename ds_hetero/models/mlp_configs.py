"""Read the MLPs and experts of a config.json: their widths, and the number of layers without experts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from ds_hetero.common.reading import JsonObject, is_list, is_whole, shortened
from ds_hetero.errors import ModelError
from ds_hetero.models.config_values import read_flag, read_int

# Keys that mean the same in the configurations of different model types.
_NUM_EXPERTS_KEYS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
_EXPERTS_PER_TOKEN_KEYS = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k")
_SHARED_WIDTH_KEYS = ("shared_expert_intermediate_size", "shared_intermediate_size")
_NUM_SHARED_KEYS = ("n_shared_experts", "num_shared_experts", "moe_num_shared_experts")
_DENSE_WIDTH_KEYS = ("dense_intermediate_size", "prefix_dense_intermediate_size")
_WIDTH_KEYS = ("intermediate_size", "ffn_dim", "dff", "n_inner")


class MlpSizes(NamedTuple):
    """MLPs of a model; the fields are those of `ModelSpec`."""

    mlp_size: int
    num_experts: int = 0
    experts_per_token: int = 0
    shared_mlp_size: int = 0
    dense_layers: int = 0
    dense_mlp_size: int = 0


def find_missing_mlp_keys(config: JsonObject, num_layers: int, name: str) -> list[str]:
    """Return the keys that `read_mlp_sizes` needs and the configuration lacks.

    Raises:
        ModelError: a key that says which layers have experts has a wrong value.
    """
    experts_key = _num_experts_key(config, num_layers, name)
    if experts_key is None:
        width = _dense_width_key(config)
        return [] if width in config or "n_embd" in config else [width]
    missing = [] if _expert_width_key(config) in config else [_expert_width_key(config)]
    return missing if _first_key(config, _EXPERTS_PER_TOKEN_KEYS) else [*missing, _EXPERTS_PER_TOKEN_KEYS[0]]


def read_mlp_sizes(config: JsonObject, num_layers: int, name: str) -> MlpSizes:
    """Return the MLPs of a configuration with ``num_layers`` layers, all of whose keys are there.

    Raises:
        ModelError: a key has a wrong value.
    """
    experts_key = _num_experts_key(config, num_layers, name)
    if experts_key is None:
        return MlpSizes(_dense_width(config, name))
    expert_size = read_int(config, _expert_width_key(config), name)
    dense_layers = _count_dense_layers(config, num_layers, name)
    dense_key = _first_key(config, _DENSE_WIDTH_KEYS) or "intermediate_size"
    return MlpSizes(
        mlp_size=expert_size,
        num_experts=read_int(config, experts_key, name),
        experts_per_token=_experts_per_token(config, name),
        shared_mlp_size=_shared_width(config, expert_size, name),
        dense_layers=dense_layers,
        dense_mlp_size=read_int(config, dense_key, name) if dense_layers else 0,
    )


def _num_experts_key(config: JsonObject, num_layers: int, name: str) -> str | None:
    """Return the key that holds the number of experts; None if no layer has experts."""
    experts_key = _first_key(config, _NUM_EXPERTS_KEYS)
    # A configuration may have keys of experts although all its layers are dense.
    if experts_key is not None and num_layers and _count_dense_layers(config, num_layers, name) == num_layers:
        return None
    return experts_key


def _first_key(config: JsonObject, keys: Sequence[str]) -> str | None:
    """Return the first of the keys whose value is there and neither null nor 0; None if there is none."""
    return next((key for key in keys if config.get(key)), None)


def _dense_width_key(config: JsonObject) -> str:
    """Return the key of the MLP's width, for a model of which no layer has experts."""
    if _first_key(config, _NUM_EXPERTS_KEYS):
        return _first_key(config, _DENSE_WIDTH_KEYS) or "intermediate_size"
    # Granite hybrid without experts: its one MLP is called shared, as in the variants with experts.
    if config.get("shared_intermediate_size"):
        return "shared_intermediate_size"
    return next((key for key in _WIDTH_KEYS if key in config), _WIDTH_KEYS[0])


def _dense_width(config: JsonObject, name: str) -> int:
    """Return the width of the MLP, for a model of which no layer has experts."""
    if "n_embd" in config and not _first_key(config, ("n_inner", "dff")):
        return 4 * read_int(config, "n_embd", name)
    width = read_int(config, _dense_width_key(config), name)
    model_type = config.get("model_type")
    if model_type == "moshi":  # its ffn_dim is the rows of one matrix for gate and up
        return width // 2
    if model_type in ("lfm2", "lfm2_vl") and read_flag(config, "block_auto_adjust_ff_dim", True, name):
        return _adjusted_width(config, 2 * width // 3, name)
    return width


def _adjusted_width(config: JsonObject, width: int, name: str) -> int:
    """Return ``width`` times ``block_ffn_dim_multiplier``, rounded up to a multiple of ``block_multiple_of`` (LFM2).

    6,826 by 1.3 is 8,873, and the next multiple of 256 is 8,960.
    """
    factor = config.get("block_ffn_dim_multiplier")
    if not isinstance(factor, (int, float)):
        return width
    multiple = read_int(config, "block_multiple_of", name, default=256)
    return -(-int(factor * width) // multiple) * multiple


def _expert_width_key(config: JsonObject) -> str:
    """Return the key of the width of one expert."""
    has_own_key = "moe_intermediate_size" in config and config.get("model_type") != "hunyuan_v1_moe"
    return "moe_intermediate_size" if has_own_key else "intermediate_size"


def _experts_per_token(config: JsonObject, name: str) -> int:
    """Return the number of experts that a token uses; HunYuan lists the number of every layer."""
    key = _first_key(config, _EXPERTS_PER_TOKEN_KEYS) or _EXPERTS_PER_TOKEN_KEYS[0]
    values = config.get(key)
    if not is_list(values):
        return read_int(config, key, name)
    if not values or any(value != values[0] for value in values):
        raise ModelError(
            f"{name}: {key} must be the same in every layer, got {shortened(values)}; unlike layers have no cost model."
        )
    return read_int({key: values[0]}, key, name)


def _shared_width(config: JsonObject, expert_size: int, name: str) -> int:
    """Return the width of the shared experts together, which every token passes; 0 if there are none."""
    width_key, count_key = _first_key(config, _SHARED_WIDTH_KEYS), _first_key(config, _NUM_SHARED_KEYS)
    if width_key:
        return read_int(config, width_key, name)
    if config.get("model_type") == "hunyuan_v1_moe":
        return read_int(config, "intermediate_size", name)
    return read_int(config, count_key, name) * expert_size if count_key else 0


def _count_dense_layers(config: JsonObject, num_layers: int, name: str) -> int:
    """Return the number of layers without experts; model types say it by four kinds of keys."""
    mlp_types = config.get("mlp_layer_types")
    if mlp_types is not None:
        is_valid = is_list(mlp_types) and all(mlp_type in ("dense", "sparse") for mlp_type in mlp_types)
        if not is_valid or len(mlp_types) != num_layers:
            raise ModelError(
                f'{name}: mlp_layer_types must be "dense" or "sparse" for each of {num_layers} layers, got '
                f"{shortened(mlp_types)}."
            )
        return sum(mlp_type == "dense" for mlp_type in mlp_types)
    for key in ("first_k_dense_replace", "num_dense_layers"):
        if config.get(key):
            return min(read_int(config, key, name), num_layers)
    if "moe_layer_start_index" in config:
        return num_layers - len(_expert_layers_in_range(config, num_layers, name))
    return _count_dense_layers_by_period(config, num_layers, name)


def _expert_layers_in_range(config: JsonObject, num_layers: int, name: str) -> list[int]:
    """Return the layers with experts of ERNIE 4.5: every ``moe_layer_interval``-th from a first to a last layer.

    Start 1, end 6 and interval 2 are the layers 1, 3 and 5; an end of -1 is the last layer.
    """
    first: Any = config.get("moe_layer_start_index")
    last: Any = config.get("moe_layer_end_index", -1)
    if not is_whole(first, 0, 2**24) or not is_whole(last, -1, 2**24):
        raise ModelError(
            f"{name}: moe_layer_start_index and moe_layer_end_index must be indices of layers, got {first}, {last}."
        )
    period = read_int(config, "moe_layer_interval", name, default=1)
    stop = num_layers if last == -1 else last + 1
    return [layer for layer in range(num_layers) if first <= layer < stop and (layer + 1) % period == 0]


def _count_dense_layers_by_period(config: JsonObject, num_layers: int, name: str) -> int:
    """Return the number of layers without experts, if every ``decoder_sparse_step``-th layer has experts.

    Layers in ``mlp_only_layers`` have none: 8 layers, step 2 and ``mlp_only_layers`` [1] leave the layers 3, 5 and 7
    with experts, so 5 are without.
    """
    listed_layers = config.get("mlp_only_layers") or ()
    if not is_list(listed_layers) or not all(is_whole(layer, 0, 2**24) for layer in listed_layers):
        raise ModelError(f"{name}: mlp_only_layers must be a list of layers, got {shortened(listed_layers)}.")
    period = read_int(config, "decoder_sparse_step", name, default=1)
    return sum(layer in listed_layers or (layer + 1) % period != 0 for layer in range(num_layers))
