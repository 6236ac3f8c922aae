"""Read the recurrent layers of a config.json: linear attention (gated delta rule), Mamba-2, short convolutions."""

from __future__ import annotations

from typing import Any, NamedTuple

from ds_hetero.common.reading import JsonObject, is_list, is_whole, shortened
from ds_hetero.common.text import listed
from ds_hetero.errors import ModelError
from ds_hetero.models.config_values import expect_list_of_names, read_int
from ds_hetero.models.families import KIMI_LINEAR_TYPES
from ds_hetero.models.recurrent import RecurrentLayers

# Layer types, as ``layer_types`` of a config.json lists them.
_RECURRENT = ("linear_attention", "mamba", "conv")
_ATTENTION = ("full_attention", "attention", "sliding_attention")
_RECURRENT_AND_ATTENTION = ("hybrid",)
# Layer types that a model may have, by the kind of its recurrent layers.
_TYPES_WITH_DELTA_RULE = ("linear_attention", "mamba", "full_attention", "attention", "hybrid")
_TYPES_WITH_MAMBA = (*_TYPES_WITH_DELTA_RULE, "mlp", "moe")  # the last two: neither recurrence nor attention
_TYPES_WITH_CONVOLUTIONS = ("conv", *_ATTENTION)
_DELTA_RULE_CHUNK = 64  # tokens of a chunk in the delta-rule kernels of flash-linear-attention and transformers
_DEFAULT_ATTENTION_INTERVAL = 4  # layers; the default of Qwen3-Next and Qwen3.5


def read_recurrent_layers(config: JsonObject, num_layers: int, name: str) -> RecurrentLayers | None:
    """Return the recurrent layers of a model; None if it has none.

    Raises:
        ModelError: a key has a wrong value, a layer type cannot be planned, or no layer has attention.
    """
    # The keys tell the kinds apart: the first two have unlike names for the heads of linear attention.
    if config.get("linear_num_value_heads"):
        scan = _delta_rule_scan(config, name)
    elif config.get("linear_num_heads") or config.get("model_type") in KIMI_LINEAR_TYPES:
        scan = _kimi_scan(config, name)
    elif config.get("mamba_n_heads") and config.get("mamba_d_state"):
        scan = _mamba_scan(config, name)
    elif is_list(config.get("layer_types")) and "conv" in config["layer_types"]:
        scan = _convolution(config, name)
    else:
        return None
    if scan.num_heads % scan.num_key_heads:
        raise ModelError(
            f"{name}: {scan.num_heads} heads of the scan are not a multiple of its {scan.num_key_heads} key heads."
        )
    layer_types = _layer_types(config, num_layers, _planned_types(scan), name)
    num_recurrent = sum(layer_type in _RECURRENT + _RECURRENT_AND_ATTENTION for layer_type in layer_types)
    num_attention = sum(layer_type in _ATTENTION + _RECURRENT_AND_ATTENTION for layer_type in layer_types)
    if not num_attention:
        raise ModelError(f"{name}: no layer has attention, and a schedule cuts heads of attention. Plan another model.")
    return RecurrentLayers(
        num_layers=num_recurrent,
        num_attention_layers=num_attention,
        num_model_layers=num_layers,
        **scan._asdict(),
    )


class _Scan(NamedTuple):
    """Sizes of one recurrent layer; the fields are those of `RecurrentLayers`."""

    delta_rule: bool
    num_heads: int
    num_key_heads: int
    key_dim: int
    head_dim: int
    conv_size: int
    chunk: int
    channel_decay: bool = False
    gate_rank: int = 0
    conv_width: int = 0


def _delta_rule_scan(config: JsonObject, name: str) -> _Scan:
    """Return the scan of gated delta-rule layers (Qwen3-Next)."""
    return _Scan(
        delta_rule=True,
        num_heads=read_int(config, "linear_num_value_heads", name),
        num_key_heads=read_int(config, "linear_num_key_heads", name),
        key_dim=read_int(config, "linear_key_head_dim", name),
        head_dim=read_int(config, "linear_value_head_dim", name),
        conv_size=read_int(config, "linear_conv_kernel_dim", name, 4),
        chunk=_DELTA_RULE_CHUNK,
    )


def _kimi_scan(config: JsonObject, name: str) -> _Scan:
    """Return the scan of Kimi's delta attention: queries, keys and values have equal heads of equal width."""
    num_heads = read_int(config, "linear_num_heads", name)
    head_dim = read_int(config, "linear_head_dim", name)
    # Kimi-Linear projects to decay and gate by two matrices of rank head_dim, Bailing's hybrid by one full matrix; no
    # key of transformers says it. Plan files do, by ``linear_gate_rank``.
    has_full_gates = config.get("model_type") == "bailing_hybrid" or config.get("linear_gate_rank") == 0
    return _Scan(
        delta_rule=True,
        num_heads=num_heads,
        num_key_heads=num_heads,
        key_dim=head_dim,
        head_dim=head_dim,
        conv_size=read_int(config, "linear_conv_kernel_dim", name, 4),
        chunk=_DELTA_RULE_CHUNK,
        channel_decay=True,
        gate_rank=0 if has_full_gates else head_dim,
    )


def _mamba_scan(config: JsonObject, name: str) -> _Scan:
    """Return the scan of Mamba-2 layers."""
    num_heads = read_int(config, "mamba_n_heads", name)
    return _Scan(
        delta_rule=False,
        num_heads=num_heads,
        num_key_heads=read_int(config, "mamba_n_groups", name, 1),
        key_dim=read_int(config, "mamba_d_state", name),
        head_dim=_mamba_head_dim(config, num_heads, name),
        conv_size=read_int(config, "mamba_d_conv", name, 4),
        chunk=read_int(config, "mamba_chunk_size", name, 256),
    )


def _convolution(config: JsonObject, name: str) -> _Scan:
    """Return a gated short convolution (LFM2), as a scan of one head without elements."""
    return _Scan(
        delta_rule=False,
        num_heads=1,
        num_key_heads=1,
        key_dim=0,
        head_dim=0,
        conv_size=read_int(config, "conv_L_cache", name, 3),
        chunk=1,
        conv_width=read_int(config, "hidden_size", name),
    )


def _planned_types(scan: _Scan) -> tuple[str, ...]:
    """Return the layer types that a model with these recurrent layers may have."""
    if scan.conv_width:
        return _TYPES_WITH_CONVOLUTIONS
    return _TYPES_WITH_DELTA_RULE if scan.delta_rule else _TYPES_WITH_MAMBA


def _layer_types(config: JsonObject, num_layers: int, planned_types: tuple[str, ...], name: str) -> list[str]:
    """Return the type of every layer, from a list of types, from the model type, or from attention's layer indices."""
    layer_types = config.get("layer_types") or config.get("layers_block_type")
    if layer_types is not None:
        return _listed_layer_types(layer_types, num_layers, planned_types, name)
    if config.get("model_type") == "falcon_h1":
        return ["hybrid"] * num_layers
    if config.get("linear_num_value_heads"):
        interval = read_int(config, "full_attention_interval", name, _DEFAULT_ATTENTION_INTERVAL)
        # Interval 4: layers 3, 7, 11 ... have attention.
        return ["linear_attention" if (i + 1) % interval else "full_attention" for i in range(num_layers)]
    indices = config.get("attn_layer_indices") or ()
    if not isinstance(indices, (list, tuple)) or not all(is_whole(index, 0, num_layers - 1) for index in indices):
        last = num_layers - 1
        raise ModelError(f"{name}: attn_layer_indices must be layers from 0 to {last}, got {shortened(indices)}.")
    return ["full_attention" if i in indices else "mamba" for i in range(num_layers)]


def _listed_layer_types(layer_types: Any, num_layers: int, planned_types: tuple[str, ...], name: str) -> list[str]:
    """Return a list of layer types after a check. Raises `ModelError`: an unknown type, or not one type per layer."""
    expect_list_of_names(layer_types, name)
    unknown = sorted(set(layer_types) - set(planned_types))
    if unknown or len(layer_types) != num_layers:
        fault = f"has {listed(unknown, 8)}" if unknown else f"names {len(layer_types)} layers of {num_layers}"
        raise ModelError(
            f"{name}: layer_types {fault}; it must name one of {', '.join(planned_types)} for every layer."
        )
    return list(layer_types)


def _mamba_head_dim(config: JsonObject, num_heads: int, name: str) -> int:
    """Return the head size of Mamba-2; if it is "auto" or left out, the inner width divided by the heads.

    transformers does the same in the configurations of Bamba and Falcon-H1.
    """
    if is_whole(config.get("mamba_d_head"), 1, 2**16):
        return read_int(config, "mamba_d_head", name)
    if config.get("mamba_d_ssm"):
        inner_size = read_int(config, "mamba_d_ssm", name)
    else:
        inner_size = read_int(config, "mamba_expand", name, 2) * read_int(config, "hidden_size", name)
    if inner_size % num_heads:
        raise ModelError(
            f"{name}: mamba_n_heads={num_heads} does not divide the inner width {inner_size}. Give mamba_d_head, or "
            "change mamba_n_heads."
        )
    return inner_size // num_heads
