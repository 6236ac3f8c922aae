"""Replace stock Ulysses: its registration with transformers, its loader adapter, and its tiled loss.

Scripts call registration and adapter before `deepspeed.initialize`, some before the configuration is known. Then stock
DeepSpeed runs, and `StockUlysses` remembers how to undo it. If `deepspeed.initialize` finds a "heterogeneity" section,
it calls `StockUlysses.take_pending` and undoes the registration.

The tiled loss ``TiledFusedLogitsLoss`` is refused on shards. It runs the backward of the LM head inside its forward, as
if the gradient of the loss were 1. On a shard this gradient is another number, which is known only after the losses of
all ranks are combined.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import deepspeed.runtime.sequence_parallel.parallel_state_sp as stock_mpu
import torch
import torch.distributed as dist

from ds_hetero.decision.kind_choice import section_of_kind
from ds_hetero.engine.ds_config import has_active_section, read_training_facts
from ds_hetero.engine.forward_mode import wanted_results
from ds_hetero.engine.known_loaders import KNOWN_LOADERS
from ds_hetero.engine.loader import ModelLoader, WholeLoader
from ds_hetero.engine.patching import Function
from ds_hetero.engine.registry import Registry
from ds_hetero.engine.same_configuration import agree_on_configuration
from ds_hetero.errors import ConfigError, ModelError
from ds_hetero.frameworks.deepspeed.mpu import expect_one_worker, mpu_of_one_worker, mpu_of_replica
from ds_hetero.planner.jobs.kinds import SEQUENCE
from ds_hetero.runtime.pipeline.batches import SameBatches

SIZE_OF_CONFIGURATION = "sequence_parallel_size of ds_config"


@dataclass
class PendingRegistration:
    """A registration of stock Ulysses that was made before the configuration was known."""

    undo: Callable[[], None]  # restores the attention function that the registration replaced
    error: Exception | None = None  # error of the registration; raised again if there turns out to be no section
    num_adapters: int = 0  # loaders that stock DeepSpeed has wrapped since the registration

    def cancel(self) -> None:
        """Undo the registration, since the configuration has a section.

        Raises:
            ConfigError: stock DeepSpeed has wrapped a loader since the registration, which cannot be undone.
        """
        self.undo()
        if self.num_adapters:
            raise ConfigError(
                "a UlyssesSPDataLoaderAdapter was made before deepspeed.initialize, when ds_hetero did not know the "
                "configuration yet. Make it afterwards, or give the configuration earlier: "
                "ds_hetero.register(ds_config)."
            )


class StockUlysses:
    """Replaces stock Ulysses' registration and adapter, and holds the registration that waits for the configuration."""

    def __init__(self, registry: Registry) -> None:
        self._registry = registry
        self._pending: PendingRegistration | None = None
        self._has_pipelines = False

    def take_pending(self) -> PendingRegistration | None:
        """Return the registration that waits for the configuration, if any, and stop waiting."""
        pending, self._pending = self._pending, None
        return pending

    def register(self, stock: Function, cls: type, *args: Any, **kwargs: Any) -> object:
        """Replace ``UlyssesSPAttentionHF.register_with_transformers``.

        If the configuration has a section, the model is converted. If no configuration is known yet, stock DeepSpeed
        registers, which may be undone later.

        Returns:
            The mpu, as stock does.
        """
        arguments = inspect.signature(stock).bind(cls, *args, **kwargs).arguments
        ds_config, size = self._registry.ds_config, arguments["sequence_parallel_size"]
        if ds_config is None:
            return self._register_stock(stock, arguments["core_attn_implementation"], cls, args, kwargs)
        agree_on_configuration(ds_config)
        if not has_active_section(ds_config):
            return stock(cls, *args, **kwargs)
        model = arguments["model_name_or_path"]
        request = self._registry.request_of(ds_config)
        if request.section is not None and request.section.parallel == "best":
            # The script asks for sequence parallelism, and may split the model here: it has chosen the kind.
            self._registry.set_section(ds_config, section_of_kind(request.section, SEQUENCE))
        if request.is_of_pipelines:
            self._has_pipelines = True
            expect_one_worker(size)
            return mpu_of_one_worker()
        if isinstance(model, torch.nn.Module):
            sizes = {"sequence_parallel_size": size, SIZE_OF_CONFIGURATION: read_training_facts(ds_config).sp_size}
            return mpu_of_replica(self._registry.prepare(model, ds_config, sizes).replica, size)
        stock_mpu.initialize_sequence_parallel(size)  # the model is converted when deepspeed.initialize has it
        return stock_mpu

    def _register_stock(self, stock: Function, core: str, cls: Any, args: Any, kwargs: Any) -> Any:
        """Let stock DeepSpeed register, and remember how to undo it.

        Args:
            core: name of the attention implementation that stock Ulysses replaces.
        """
        self._pending = PendingRegistration(self._registry.adapters.models.keep_attention_function(core))
        try:
            return stock(cls, *args, **kwargs)
        except ValueError as error:
            if "divisible" not in str(error):
                raise
            self._pending.error = error  # heads that ranks do not divide: no fault if there is a section
            return stock_mpu

    def adapt(
        self, stock: Function, adapter: Any, dl: Any, sp_rank: int, sp_group: Any, sp_world_size: int, device: Any
    ) -> None:
        """Replace ``UlyssesSPDataLoaderAdapter.__init__``: turn ``adapter`` into a loader of ds_hetero.

        Its class becomes `ModelLoader` for a converted model, `WholeLoader` in a loop of sharded calls, and
        `SameBatches` with pipelines. Otherwise stock DeepSpeed initializes ``adapter``.
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
                self._pending.num_adapters += 1
            stock(adapter, dl, sp_rank, sp_group, sp_world_size, device)


def refuse_shards(registry: Registry, stock: Function, *args: object, **kwargs: object) -> object:
    """Replace ``TiledFusedLogitsLoss.forward``: raise `ModelError` if a model in training takes shards."""
    if any(trained.takes_shards and trained.replica.sp_size > 1 for trained in registry.in_training):
        raise ModelError(
            "TiledFusedLogitsLoss gives the LM head a gradient of another scale than all other layers where a "
            "sequence is split: it runs the head's backward before the loss of all ranks is known. Use DeepSpeed's "
            "sequence_tiled_compute on a function that computes logits and loss, which uses tiles as well but runs the "
            "backward later; or let the model return logits, and use handle.loss."
        )
    return stock(*args, **kwargs)
