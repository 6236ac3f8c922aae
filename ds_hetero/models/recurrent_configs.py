"""Reader of the recurrent layers of a config.json: linear attention (gated delta rule) and Mamba-2."""

from __future__ import annotations

from typing import Any, NamedTuple

from ds_hetero.common.reading import JsonObject, is_whole, shortened
from ds_hetero.common.text import listed
from ds_hetero.errors import ModelError
from ds_hetero.models.config_values import expect_names, whole_value
from ds_hetero.models.recurrent import RecurrentLayers

# Kinds of layers in layer_types.
_RECURRENT = ("linear_attention", "mamba")
_ATTENTION = ("full_attention", "attention")
_BOTH = ("hybrid",)
_DELTA_CHUNK = 64  # tokens that kernels of the delta rule compute at once, of flash-linear-attention and transformers
_ATTENTION_EVERY = 4  # layers, in Qwen3-Next and Qwen3.5; used if the configuration does not say


def recurrent_layers_of(config: JsonObject, num_layers: int, name: str) -> RecurrentLayers | None:
    """Return the recurrent layers of a configuration, None if it has none.

    Raises:
        ModelError: a wrong key, a kind of layer that cannot be planned, or no layer with attention.
    """
    if config.get("linear_num_value_heads"):
        scan = _delta_rule_scan(config, name)
    elif config.get("mamba_n_heads") and config.get("mamba_d_state"):
        scan = _mamba_scan(config, name)
    else:
        return None
    if scan.heads % scan.key_heads:
        raise ModelError(
            f"{name}: {scan.heads} heads of the scan are not a multiple of its {scan.key_heads} key heads."
        )
    kinds = _kinds(config, num_layers, name)
    if not any(kind in _ATTENTION + _BOTH for kind in kinds):
        raise ModelError(f"{name}: no layer has attention, and a schedule cuts heads of attention. Plan another model.")
    return RecurrentLayers(
        num_layers=sum(kind in _RECURRENT + _BOTH for kind in kinds),
        num_attention_layers=sum(kind in _ATTENTION + _BOTH for kind in kinds),
        num_model_layers=num_layers,
        delta_rule=scan.delta_rule,
        num_heads=scan.heads,
        num_key_heads=scan.key_heads,
        key_dim=scan.key_dim,
        head_dim=scan.head_dim,
        conv_size=scan.conv_size,
        chunk=scan.chunk,
    )


class _Scan(NamedTuple):
    """Sizes of a scan, see `RecurrentLayers`."""

    delta_rule: bool
    heads: int
    key_heads: int
    key_dim: int
    head_dim: int
    conv_size: int
    chunk: int


def _delta_rule_scan(config: JsonObject, name: str) -> _Scan:
    return _Scan(
        delta_rule=True,
        heads=whole_value(config, "linear_num_value_heads", name),
        key_heads=whole_value(config, "linear_num_key_heads", name),
        key_dim=whole_value(config, "linear_key_head_dim", name),
        head_dim=whole_value(config, "linear_value_head_dim", name),
        conv_size=whole_value(config, "linear_conv_kernel_dim", name, 4),
        chunk=_DELTA_CHUNK,
    )


def _mamba_scan(config: JsonObject, name: str) -> _Scan:
    heads = whole_value(config, "mamba_n_heads", name)
    return _Scan(
        delta_rule=False,
        heads=heads,
        key_heads=whole_value(config, "mamba_n_groups", name, 1),
        key_dim=whole_value(config, "mamba_d_state", name),
        head_dim=_mamba_head_dim(config, heads, name),
        conv_size=whole_value(config, "mamba_d_conv", name, 4),
        chunk=whole_value(config, "mamba_chunk_size", name, 256),
    )


def _kinds(config: JsonObject, num_layers: int, name: str) -> list[str]:
    """Return the kind of every layer, from the list of kinds or from the indices of the layers with attention."""
    layer_types = config.get("layer_types") or config.get("layers_block_type")
    if layer_types is not None:
        return _listed_kinds(layer_types, num_layers, name)
    if config.get("model_type") == "falcon_h1":
        return ["hybrid"] * num_layers
    if config.get("linear_num_value_heads"):
        every = whole_value(config, "full_attention_interval", name, _ATTENTION_EVERY)
        return ["linear_attention" if (i + 1) % every else "full_attention" for i in range(num_layers)]
    places = config.get("attn_layer_indices") or ()
    if not isinstance(places, (list, tuple)) or not all(is_whole(place, 0, num_layers - 1) for place in places):
        last = num_layers - 1
        raise ModelError(f"{name}: attn_layer_indices must be layers from 0 to {last}, got {shortened(places)}.")
    return ["full_attention" if i in places else "mamba" for i in range(num_layers)]


def _listed_kinds(layer_types: Any, num_layers: int, name: str) -> list[str]:
    """Check a list of kinds. Raises `ModelError`: an unknown kind, or another length than the layers."""
    expect_names(layer_types, name)
    planned_kinds = _RECURRENT + _ATTENTION + _BOTH
    unknown = sorted(set(layer_types) - set(planned_kinds))
    if unknown or len(layer_types) != num_layers:
        fault = f"has {listed(unknown, 8)}" if unknown else f"names {len(layer_types)} layers of {num_layers}"
        raise ModelError(f"{name}: layer_types {fault}; what can be planned are {', '.join(planned_kinds)}.")
    return list(layer_types)


def _mamba_head_dim(config: JsonObject, heads: int, name: str) -> int:
    """Head size of Mamba-2; if it is "auto" or left out, the inner width divided by the heads, as in transformers."""
    if is_whole(config.get("mamba_d_head"), 1, 2**16):
        return whole_value(config, "mamba_d_head", name)
    if config.get("mamba_d_ssm"):
        inner = whole_value(config, "mamba_d_ssm", name)
    else:
        inner = whole_value(config, "mamba_expand", name, 2) * whole_value(config, "hidden_size", name)
    if inner % heads:
        raise ModelError(f"{name}: mamba_n_heads={heads} does not divide the inner width {inner}.")
    return inner // heads
