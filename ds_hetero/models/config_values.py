"""Values of a config.json, each checked: whole numbers in bounds, text, true or false."""

from __future__ import annotations

from typing import Any

from ds_hetero.common.reading import MAX_HEADS, MAX_LAYERS, JsonObject, expect_whole_number, is_list, shortened
from ds_hetero.errors import ModelError

_LARGEST = {
    "num_attention_heads": MAX_HEADS,
    "n_head": MAX_HEADS,
    "linear_num_value_heads": MAX_HEADS,
    "linear_num_key_heads": MAX_HEADS,
    "mamba_n_heads": MAX_HEADS,
    "mamba_n_groups": MAX_HEADS,
    "num_key_value_heads": MAX_HEADS,
    "num_hidden_layers": MAX_LAYERS,
    "n_layer": MAX_LAYERS,
    "num_local_experts": 100_000,
    "num_experts": 100_000,
    "num_experts_per_tok": 100_000,
    "vocab_size": 2**30,
}


def whole_value(config: JsonObject, key: str, name: str, default: int | None = None) -> int:
    """Return a whole number >= 1; the default for null and a missing key. Raises `ModelError`: it is not such a one."""
    value: Any = config.get(key)
    if value is None and default is not None:
        return default
    most = _LARGEST.get(key, 2**24)
    return expect_whole_number(f"{name}: {key}", value, 1, most, ModelError)


def text_value(config: JsonObject, key: str, name: str) -> str:
    """Return a text; empty for null and a missing key. Raises `ModelError`: it is not text."""
    value = config.get(key)
    if not (value is None or isinstance(value, str)):
        raise ModelError(f"{name}: {key} must be text, got {shortened(value)}.")
    return value or ""


def flag_value(config: JsonObject, key: str, default: bool, name: str) -> bool:
    """Return a flag; the default for null and a missing key. Raises `ModelError`: it is neither true nor false."""
    value = config.get(key)
    if not (value is None or isinstance(value, bool)):
        raise ModelError(f"{name}: {key} must be true or false, got {shortened(value)}.")
    return default if value is None else value


def expect_names(layer_types: Any, name: str) -> None:
    """Raise `ModelError` if layer_types is not a list of names."""
    if not (is_list(layer_types) and all(isinstance(kind, str) for kind in layer_types)):
        raise ModelError(f"{name}: layer_types must be a list of names, got {shortened(layer_types)}.")
