"""Stock Ulysses gives way to ours: its registration with transformers and its loader adapter.

Both are called before `deepspeed.initialize`, in some scripts before the configuration is known. Then stock does its
work first, and `StockUlysses.take_pending` returns what is to be undone once there turns out to be a "heterogeneity"
section. Its loss over tiles of the logits is refused on shards: it runs the backward of the LM head inside its forward,
as if the gradient of the loss were 1. On a shard that gradient is what the engine's average needs, known when the loss
of all ranks is put together.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import deepspeed.runtime.sequence_parallel.parallel_state_sp as stock_mpu
import torch
import torch.distributed as dist

from ds_hetero.engine.ds_config import enabled, read_training_facts
from ds_hetero.engine.forward_mode import wanted_results
from ds_hetero.engine.known_loaders import KNOWN_LOADERS
from ds_hetero.engine.loader import ModelLoader, WholeLoader
from ds_hetero.engine.patching import Function
from ds_hetero.engine.registry import Registry
from ds_hetero.engine.same_configuration import agree_on_configuration
from ds_hetero.errors import ConfigError, ModelError
from ds_hetero.frameworks.deepspeed.mpu import expect_one_worker, mpu_of_one_worker, mpu_of_replica
from ds_hetero.runtime.pipeline.batches import SameBatches

SIZE_OF_CONFIGURATION = "sequence_parallel_size of ds_config"


@dataclass
class PendingRegistration:
    """A stock registration made before the configuration was known."""

    undo: Callable[[], None]  # puts back the attention function that it replaced
    error: Exception | None = None  # what stock raised; raised again if there is no section after all
    adapters: int = 0  # loaders that stock has wrapped since

    def cancel(self) -> None:
        """Undo the registration, since there is a section. Raises `ConfigError`: stock has wrapped a loader since."""
        self.undo()
        if self.adapters:
            raise ConfigError(
                "a UlyssesSPDataLoaderAdapter was made before deepspeed.initialize, when ds_hetero did not know the "
                "configuration yet. Make it afterwards, or give the configuration earlier: "
                "ds_hetero.register(ds_config)."
            )


class StockUlysses:
    """Makes the replacements of stock's registration and adapter; remembers what is pending between them."""

    def __init__(self, registry: Registry) -> None:
        self._registry = registry
        self._pending: PendingRegistration | None = None
        self._has_pipelines = False

    def take_pending(self) -> PendingRegistration | None:
        """Return the registration that waits for the configuration, if any, once."""
        pending, self._pending = self._pending, None
        return pending

    def register(self, stock: Function, cls: type, *args: Any, **kwargs: Any) -> object:
        """Replace ``UlyssesSPAttentionHF.register_with_transformers``.

        With a known section the model is converted; without any, stock runs and may be undone later.
        """
        given = inspect.signature(stock).bind(cls, *args, **kwargs).arguments
        ds_config, size = self._registry.ds_config, given["sequence_parallel_size"]
        if ds_config is None:
            return self._register_stock(stock, given["core_attn_implementation"], cls, args, kwargs)
        agree_on_configuration(ds_config)
        if not enabled(ds_config):
            return stock(cls, *args, **kwargs)
        model = given["model_name_or_path"]
        if self._registry.request_of(ds_config).is_of_pipelines:
            self._has_pipelines = True
            expect_one_worker(size)
            return mpu_of_one_worker()
        if isinstance(model, torch.nn.Module):
            sizes = {"sequence_parallel_size": size, SIZE_OF_CONFIGURATION: read_training_facts(ds_config).sp_size}
            return mpu_of_replica(self._registry.prepare(model, ds_config, sizes).model.replica, size)
        stock_mpu.initialize_sequence_parallel(size)  # the model is converted when deepspeed.initialize has it
        return stock_mpu

    def _register_stock(self, stock: Function, core: str, cls: Any, args: Any, kwargs: Any) -> Any:
        self._pending = PendingRegistration(self._registry.adapters.models.keep_attention_function(core))
        try:
            return stock(cls, *args, **kwargs)
        except ValueError as error:
            if "divisible" not in str(error):
                raise
            self._pending.error = error  # heads that do not divide are no fault if there is a section
            return stock_mpu

    def adapt(
        self, stock: Function, adapter: Any, dl: Any, sp_rank: int, sp_group: Any, sp_world_size: int, device: Any
    ) -> None:
        """Replace ``UlyssesSPDataLoaderAdapter.__init__``.

        With a converted model the new object becomes a `ModelLoader`, before it has anything of the adapter's; in a
        loop of sharded calls, a `WholeLoader`.
        """
        split = self._registry.find_split_by_ranks(dist.get_process_group_ranks(sp_group))
        if split is None and self._has_pipelines:
            adapter.__class__ = SameBatches
            adapter.__init__(dl, torch.device(device), KNOWN_LOADERS)
        elif split is not None and wanted_results() is not None:
            adapter.__class__ = WholeLoader
            adapter.__init__(dl, torch.device(device), split)
        elif split is not None:
            adapter.__class__ = ModelLoader
            adapter.__init__(dl, split, torch.device(device))
        else:
            if self._pending is not None:
                self._pending.adapters += 1
            stock(adapter, dl, sp_rank, sp_group, sp_world_size, device)


def refuse_shards(registry: Registry, stock: Function, *args: object, **kwargs: object) -> object:
    """Replace ``TiledFusedLogitsLoss.forward``. Raises `ModelError`: some model in training takes shards."""
    models = [prepared.model for prepared in registry.in_training]
    if any(model.takes_shards and model.replica.sp_size > 1 for model in models):
        raise ModelError(
            "TiledFusedLogitsLoss gives the LM head a gradient of another scale than all other layers where a "
            "sequence is split: it runs the head's backward before the loss of all ranks is known. Use DeepSpeed's "
            "sequence_tiled_compute on a function that makes logits and loss, which tiles them alike and runs the "
            "backward at its time; or have the model return logits, for handle.loss."
        )
    return stock(*args, **kwargs)
