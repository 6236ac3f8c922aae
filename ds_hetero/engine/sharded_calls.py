"""Run a sharded call of a script, see `Handle.sharded_call`: find the model, and call it in the right mode."""

from __future__ import annotations

from typing import Any

from torch import nn

from ds_hetero.engine.adapters import ResultsOfTokens
from ds_hetero.engine.forward_mode import Wanted, sharded_calls
from ds_hetero.engine.registry import Registry
from ds_hetero.errors import ConfigError
from ds_hetero.runtime.data.shards import Batch


def call_sharded(registry: Registry, model: Any, batch: Batch, wanted: Wanted) -> ResultsOfTokens | Any:
    """Call a model with a whole batch, which its ranks split; see `Handle.sharded_call`.

    Args:
        model: an engine, or a model that an engine trains.
        batch: arguments of the model.
        wanted: what to return.

    Raises:
        ConfigError: the model is not split by ds_hetero.
    """
    is_model = isinstance(model, nn.Module) and registry.has_prepared(model)
    module: nn.Module = model if is_model else getattr(model, "module", model)
    trained = registry.find_on_replica(module)
    if trained is None:
        if registry.is_unsplit(module):
            return registry.adapters.models.whole_results(model, batch, wanted)
        raise ConfigError(
            "handle.sharded_call was given a model that ds_hetero does not split: one of pipelines, or one that "
            "deepspeed.initialize was not given since ds_hetero.register(). Give it the engine."
        )
    split = trained.sequences
    if split is None:
        raise ConfigError(
            f"handle.sharded_call was given {type(module).__name__}, which runs whole on every rank. Call the model "
            "directly."
        )
    if split.trains_now and not split.pools:
        split.checks.check_same_batch(batch)
    with sharded_calls(wanted):
        return model(**batch)
