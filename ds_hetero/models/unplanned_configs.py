"""Refuse models with layers for which there is no cost model, by keys of their config.json."""

from __future__ import annotations

from collections.abc import Mapping

from ds_hetero.common.reading import JsonObject, is_list, shortened
from ds_hetero.errors import ModelError
from ds_hetero.models.recurrent import RecurrentLayers

_UNLIKE_LAYERS = "layers of unlike sizes have no cost model yet."


def refuse_unlike_layers(config: JsonObject, name: str) -> None:
    """Raise `ModelError` if keys give some layer another size than the others, as in Gemma 4."""
    _refuse_layer_sections(config, name)
    _refuse_unlike_lists(config, name)
    for key, common_key in (("global_head_dim", "head_dim"), ("num_global_key_value_heads", "num_key_value_heads")):
        size, common_size = config.get(key), config.get(common_key)
        if size is not None and size != common_size:
            sizes = f"{key}={shortened(size)} beside {common_key}={shortened(common_size)}"
            raise ModelError(f"{name}: {sizes}: {_UNLIKE_LAYERS}")


def _refuse_layer_sections(config: JsonObject, name: str) -> None:
    """Refuse sizes of a single layer: ``{"per_layer_config": {"3": {"head_dim": 256}}}``."""
    sections = config.get("per_layer_config") or {}
    if not isinstance(sections, Mapping):
        return
    for layer, sizes in sections.items():
        for key, value in sizes.items() if isinstance(sizes, Mapping) else ():
            if value != config.get(key):
                raise ModelError(
                    f"{name}: per_layer_config gives layer {layer} {key}={shortened(value)}; {_UNLIKE_LAYERS}"
                )


def _refuse_unlike_lists(config: JsonObject, name: str) -> None:
    """Refuse lists of sizes that differ between layers: ``{"num_attention_heads_per_layer": [8, 8, 16]}``."""
    for key in ("num_attention_heads_per_layer", "num_key_value_heads_per_layer"):
        counts = config.get(key)
        if not (is_list(counts) and counts):
            continue
        first_count = counts[0]
        different_count = next((count for count in counts if count != first_count), None)
        if different_count:
            raise ModelError(
                f"{name}: {key} has {shortened(first_count)} and {shortened(different_count)}; {_UNLIKE_LAYERS}"
            )


def refuse_narrow_embedding(config: JsonObject, hidden_key: str, name: str) -> None:
    """Raise `ModelError` if the embedding is narrower than the layers, as in OPT-350m.

    Args:
        hidden_key: key of the layers' width.
    """
    for key in ("word_embed_proj_dim", "embedding_size"):
        width, hidden_size = config.get(key), config.get(hidden_key)
        if width is not None and width != hidden_size:
            sizes = f"{key}={shortened(width)} beside {hidden_key}={shortened(hidden_size)}"
            raise ModelError(f"{name}: {sizes}: an embedding narrower than the layers has no cost model yet.")


def refuse_other_attention(config: JsonObject, name: str, recurrent: RecurrentLayers | None) -> None:
    """Raise `ModelError` if a key belongs to recurrent layers other than those of `read_recurrent_layers`.

    Args:
        recurrent: the recurrent layers that were read, None if there are none. If there are, their own keys pass.
    """
    planned_keys = () if recurrent is None else ("linear_num_key_heads", "mamba_d_state")
    for key in ("linear_num_key_heads", "ssm_state_size", "mamba_d_state", "attn_layer_period"):
        if config.get(key) and key not in planned_keys:
            raise ModelError(f"{name}: {key} names a kind of layer that this planner has no cost model for.")
