"""Sharded calls of a script: the model that one is of, and what it runs under; see `Handle.sharded_call`."""

from __future__ import annotations

from typing import Any

from torch import nn

from ds_hetero.engine.adapters import ResultsOfTokens
from ds_hetero.engine.forward_mode import Wanted, sharded_calls
from ds_hetero.engine.registry import Registry
from ds_hetero.engine.whole_model import WholeModel
from ds_hetero.errors import ConfigError
from ds_hetero.runtime.data.shards import Batch


def call_sharded(registry: Registry, model: Any, batch: Batch, wanted: Wanted) -> ResultsOfTokens | Any:
    """Call a model with a whole batch; see `Handle.sharded_call`. Raises `ConfigError`: it was not prepared.

    Args:
        model: an engine, or a model that one trains.
    """
    is_model = isinstance(model, nn.Module) and (registry.find(model) is not None or registry.is_unsplit(model))
    module: nn.Module = model if is_model else getattr(model, "module", model)
    prepared = registry.find(module)
    if prepared is None:
        if registry.is_unsplit(module):
            return registry.adapters.models.whole_results(model, batch, wanted)
        raise ConfigError(
            "handle.sharded_call was given a model that ds_hetero does not split: one of pipelines, or one that "
            "deepspeed.initialize was not given since ds_hetero.register(). Give it the engine."
        )
    split = prepared.model
    if isinstance(split, WholeModel):
        raise ConfigError(
            f"handle.sharded_call was given {type(module).__name__}, which runs whole on every rank; call it itself."
        )
    if split.trains_now and not split.pools:
        split.checks.check_same_batch(batch)
    with sharded_calls(wanted):
        return model(**batch)
