"""Translate configurations with unusual keys (Nemotron-H, GPT-BigCode, old files of LFM2) to the usual keys.

The usual keys are those that `ds_hetero.models.configs.model_from_config` reads.
"""

from __future__ import annotations

from ds_hetero.common.reading import MAX_LAYERS, JsonDict, JsonObject, is_list, is_whole, shortened
from ds_hetero.errors import ModelError
from ds_hetero.models.config_values import expect_list_of_names, read_flag

# Keys of Nemotron-H, each with the key that Bamba and most hybrids have for the same size.
_NEMOTRON_H_KEYS = {
    "mamba_num_heads": "mamba_n_heads",
    "mamba_head_dim": "mamba_d_head",
    "n_groups": "mamba_n_groups",
    "ssm_state_size": "mamba_d_state",
    "conv_kernel": "mamba_d_conv",
    "chunk_size": "mamba_chunk_size",
    "moe_shared_expert_intermediate_size": "shared_expert_intermediate_size",
}
# Layer types by their letter in ``hybrid_override_pattern``: "M-M*" is Mamba, MLP, Mamba, attention.
_LAYER_TYPE_OF_LETTER = {"M": "mamba", "*": "attention", "-": "mlp", "E": "moe"}


def with_usual_keys(config: JsonObject, model_type: str, num_layers: int, name: str) -> JsonObject:
    """Return the configuration with the usual keys; the same object if it has them already.

    Args:
        num_layers: number of layers; 0 if it is not known, as for Nemotron-H.

    Raises:
        ModelError: an unusual key has a wrong value.
    """
    if model_type == "nemotron_h":
        return _from_nemotron_h(config, name)
    if model_type == "gpt_bigcode" and config.get("num_key_value_heads") is None:
        return {**config, "num_key_value_heads": 1 if read_flag(config, "multi_query", True, name) else None}
    if model_type in ("lfm2", "lfm2_vl"):
        return _from_lfm2(config, num_layers, name)
    return config


def _from_lfm2(config: JsonObject, num_layers: int, name: str) -> JsonDict:
    """Translate old files of LFM2: ``full_attn_idxs`` to ``layer_types``, ``block_ff_dim`` to ``intermediate_size``."""
    translated: JsonDict = dict(config)
    if config.get("block_ff_dim"):
        translated["intermediate_size"] = config["block_ff_dim"]
    attention_layers = config.get("full_attn_idxs")
    if config.get("layer_types") is None and attention_layers is not None:
        if not is_list(attention_layers) or not all(is_whole(layer, 0, MAX_LAYERS) for layer in attention_layers):
            raise ModelError(f"{name}: full_attn_idxs must be a list of layers, got {shortened(attention_layers)}.")
        translated["layer_types"] = [
            "full_attention" if layer in attention_layers else "conv" for layer in range(num_layers)
        ]
    return translated


def _from_nemotron_h(config: JsonObject, name: str) -> JsonDict:
    """Translate Nemotron-H, in which a layer is one of attention, Mamba-2, an MLP or experts.

    "M-M*EM-" becomes 7 layers, of which ``num_dense_layers`` = 2 are an MLP.
    """
    if config.get("moe_latent_size"):
        raise ModelError(f"{name}: moe_latent_size: experts on narrower tokens have no cost model. Plan another model.")
    translated: JsonDict = {_NEMOTRON_H_KEYS.get(key, key): value for key, value in config.items()}
    layer_types = config.get("layers_block_type") or config.get("layer_types") or _layer_types_of_pattern(config, name)
    expect_list_of_names(layer_types, name)
    layer_types = list(layer_types)
    if "moe" not in layer_types:
        translated["n_routed_experts"] = 0
    return {
        **translated,
        "num_hidden_layers": len(layer_types),
        "layer_types": layer_types,
        "num_dense_layers": layer_types.count("mlp"),
    }


def _layer_types_of_pattern(config: JsonObject, name: str) -> list[str]:
    """Return the layer types that the letters of ``hybrid_override_pattern`` stand for."""
    pattern = config.get("hybrid_override_pattern")
    if not isinstance(pattern, str) or not set(pattern) <= set(_LAYER_TYPE_OF_LETTER):
        raise ModelError(
            f"{name}: layers_block_type must list kinds of layers, or hybrid_override_pattern their letters "
            f"{' '.join(_LAYER_TYPE_OF_LETTER)}, got {shortened(pattern)}."
        )
    return [_LAYER_TYPE_OF_LETTER[letter] for letter in pattern]
