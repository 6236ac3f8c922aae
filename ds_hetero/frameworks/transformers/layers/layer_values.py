"""Fields of a transformers configuration that may have a value of its own in every layer, such as Gemma 4's.

Read from the configuration itself, such a field is an error of transformers'.
"""

from __future__ import annotations

from typing import Any

from ds_hetero.errors import ModelError


def values_by_layer(config: Any, name: str) -> tuple[Any, ...]:
    """The value of every layer; one alone where all layers have it, None where there is no such field."""
    if getattr(config, "is_heterogeneous", False):
        values = tuple(getattr(layer, name, None) for layer in config.per_layer_config)
        return values[:1] if all(value == values[0] for value in values) else values
    return (getattr(config, name, None),)


def common_value(config: Any, name: str) -> Any:
    """The value that all layers have; None where there is no such field.

    Raises:
        ModelError: layers differ in it.
    """
    value, *others = values_by_layer(config, name)
    if others:
        raise ModelError(
            f"{name} must be the same in every layer, but the config has {[value, *others]}, one for each. A model "
            'whose layers differ in it trains with "sequence_parallel_size": 1.'
        )
    return value
