"""Read single values of a config.json and check each: whole numbers within bounds, text, true or false.

A message names the key, after ``name``, the name of the model.
"""

from __future__ import annotations

from typing import Any

from ds_hetero.common.reading import MAX_HEADS, MAX_LAYERS, JsonObject, expect_whole_number, is_list, shortened
from ds_hetero.errors import ModelError

# Bounds far beyond all models that exist: they catch slips, and keep products of sizes finite.
_MAX_BY_KEY = {
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
_MAX_OTHER = 2**24  # largest value of all other keys


def read_int(config: JsonObject, key: str, name: str, default: int | None = None) -> int:
    """Return the whole number of a key, or ``default``, if given, for null and for a missing key.

    Raises:
        ModelError: the value is not a whole number from 1 to the largest allowed for the key.
    """
    value: Any = config.get(key)
    if value is None and default is not None:
        return default
    return expect_whole_number(f"{name}: {key}", value, 1, _MAX_BY_KEY.get(key, _MAX_OTHER), ModelError)


def read_string(config: JsonObject, key: str, name: str) -> str:
    """Return the text of a key; empty for null and for a missing key. Raises `ModelError`: the value is not text."""
    value = config.get(key)
    if not (value is None or isinstance(value, str)):
        raise ModelError(f"{name}: {key} must be text, got {shortened(value)}.")
    return value or ""


def read_flag(config: JsonObject, key: str, default: bool, name: str) -> bool:
    """Return the flag of a key, or ``default`` for null and for a missing key.

    Raises:
        ModelError: the value is neither true nor false.
    """
    value = config.get(key)
    if not (value is None or isinstance(value, bool)):
        raise ModelError(f"{name}: {key} must be true or false, got {shortened(value)}.")
    return default if value is None else value


def expect_list_of_names(layer_types: Any, name: str) -> None:
    """Raise `ModelError` if the value of ``layer_types`` is not a list of names."""
    if not (is_list(layer_types) and all(isinstance(layer_type, str) for layer_type in layer_types)):
        raise ModelError(f"{name}: layer_types must be a list of names, got {shortened(layer_types)}.")
