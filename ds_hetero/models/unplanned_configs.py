"""Refusal of models whose layers cannot be planned, by the keys of their config.json."""

from __future__ import annotations

from collections.abc import Mapping

from ds_hetero.common.reading import JsonObject, is_list, shortened
from ds_hetero.common.text import listed
from ds_hetero.errors import ModelError
from ds_hetero.models.config_values import expect_names, flag_value
from ds_hetero.models.mlp_configs import SHARED_MLP_KEYS, is_dense
from ds_hetero.models.recurrent import RecurrentLayers

_UNLIKE = "layers of unlike sizes have no cost model yet."


def refuse_unlike_layers(config: JsonObject, name: str) -> None:
    """Refuse models with sizes of single layers, such as Gemma 4. Raises `ModelError`: some layer differs."""
    _refuse_layer_sections(config, name)
    _refuse_unlike_lists(config, name)
    for key, common_key in (("global_head_dim", "head_dim"), ("num_global_key_value_heads", "num_key_value_heads")):
        value, common = config.get(key), config.get(common_key)
        if value is not None and value != common:
            sizes = f"{key}={shortened(value)} beside {common_key}={shortened(common)}"
            raise ModelError(f"{name}: {sizes}: {_UNLIKE}")


def _refuse_layer_sections(config: JsonObject, name: str) -> None:
    """Refuse keys of single layers: ``{"per_layer_config": {"3": {"head_dim": 256}}}``."""
    sections = config.get("per_layer_config") or {}
    if not isinstance(sections, Mapping):
        return
    for layer, sizes in sections.items():
        for key, value in sizes.items() if isinstance(sizes, Mapping) else ():
            if value != config.get(key):
                raise ModelError(f"{name}: per_layer_config gives layer {layer} {key}={shortened(value)}; {_UNLIKE}")


def _refuse_unlike_lists(config: JsonObject, name: str) -> None:
    """Refuse different values by layer: ``{"num_attention_heads_per_layer": [8, 8, 16]}``."""
    for key in ("num_attention_heads_per_layer", "num_key_value_heads_per_layer"):
        values = config.get(key)
        if not (is_list(values) and values):
            continue
        first = values[0]
        different = next((value for value in values if value != first), None)
        if different:
            raise ModelError(f"{name}: {key} has {shortened(first)} and {shortened(different)}; {_UNLIKE}")


def refuse_other_attention(config: JsonObject, name: str, recurrent: RecurrentLayers | None) -> None:
    """Refuse layers without a cost model, or whose work cannot be split by heads and tokens. Raises `ModelError`.

    Args:
        recurrent: the recurrent layers of the configuration; their keys are not refused.
    """
    planned_keys: tuple[str, ...] = ()
    if recurrent is not None:
        planned_keys = ("linear_num_key_heads", "mamba_d_state", *SHARED_MLP_KEYS)
        if is_dense(config, recurrent.num_model_layers):
            planned_keys += ("mlp_only_layers",)
    for key in ("kv_lora_rank", "linear_num_key_heads", "ssm_state_size", "mamba_d_state", "attn_layer_period"):
        if config.get(key) and key not in planned_keys:
            raise ModelError(f"{name}: {key} names a kind of layer that this planner has no cost model for.")
    for key in ("n_shared_experts", "shared_expert_intermediate_size", "first_k_dense_replace", "mlp_only_layers"):
        if config.get(key) and key not in planned_keys:
            setting = f"{key}={shortened(config[key])}"
            raise ModelError(f"{name}: {setting}: shared experts and mixed layers have no cost model yet.")
    layer_types = config.get("layer_types")
    if layer_types is not None:
        expect_names(layer_types, name)
    unplanned_types = sorted(set(layer_types or []) - {"full_attention"})
    if unplanned_types and recurrent is None:
        raise ModelError(f"{name}: layer_types has {listed(unplanned_types, 8)}; only full_attention can be planned.")
    if config.get("sliding_window") and flag_value(config, "use_sliding_window", True, name):
        raise ModelError(
            f"{name}: sliding_window={shortened(config['sliding_window'])}: attention over a window cannot be planned. "
            "Set it to null for full attention."
        )
