"""Loaders of the Hugging Face Trainer: all ranks of a replica read the same batches, each of which counts once."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

import torch.distributed as dist
from transformers import Trainer
from transformers.trainer_pt_utils import LengthGroupedSampler

from ds_hetero.engine.patching import Function
from ds_hetero.engine.registry import Registry
from ds_hetero.errors import ConfigError
from ds_hetero.frameworks.transformers.evaluation import evaluates_shards, is_sharded
from ds_hetero.frameworks.transformers.resumed_epochs import epochs_of, forget_epochs
from ds_hetero.frameworks.transformers.train_loader import (
    CountedLoader,
    count_batches,
    making_train_loader,
    seed_workers_by_replica,
)
from ds_hetero.frameworks.transformers.trainer_modes import takes_whole_batches
from ds_hetero.frameworks.transformers.unlike_batches import complete_configuration, takes_unlike_batches
from ds_hetero.job.start import ReplicaBatches
from ds_hetero.runtime.data.sampling import ReplicaSampler, ReplicaStream, micro_steps_in_epoch, reader_of


def get_dataloader(registry: Registry, stock: Function, trainer: Trainer, *args: object, **kwargs: object) -> object:
    """Replace ``Trainer._get_dataloader``: all ranks of a replica read the same batches.

    loader        model or trainer                                     batches
    training      sharded, pipelined, or with unequal batches          the same on all ranks of a replica
    evaluation    runs over shards (`evaluates_shards`)                the same on all ranks of a replica
    evaluation    pipelined, or its loss needs whole batches           the same on all ranks of a replica
    any other     any other                                            divided among ranks, as in stock

    Raises:
        ConfigError: compute_metrics needs logits of a pipelined model.
    """
    is_pipelined = registry.is_pipelined(trainer.model)
    if is_pipelined:
        if trainer.compute_metrics is not None:
            raise ConfigError(
                "compute_metrics needs logits, which stay on the last stages of pipelines. Leave it out, and use "
                "eval_loss."
            )
        # All ranks evaluate the same batch, so there is nothing to gather.
        trainer.gather_function = lambda values, *args, **kwargs: values
    is_training = bool(kwargs.get("is_training"))
    is_unlike = takes_unlike_batches(registry, trainer)
    needs_whole_batches = not is_unlike and takes_whole_batches(registry, trainer)
    loaders_over_replicas = registry.adapters.processes.loaders_over_replicas
    if not is_training and evaluates_shards(registry, trainer):
        with loaders_over_replicas(trainer.get_sp_size(), None, evaluates=True):
            return stock(trainer, *args, **kwargs)
    is_read_by_replicas = is_training or is_pipelined or needs_whole_batches
    has_replicas = is_unlike or is_sharded(registry, trainer)
    if not is_read_by_replicas or not has_replicas:
        return stock(trainer, *args, **kwargs)
    with loaders_over_replicas(trainer.get_sp_size(), replica_batches(registry, trainer)):
        loader = stock(trainer, *args, **kwargs)
    seed_workers_by_replica(trainer, loader)
    return loader


def get_train_sampler(registry: Registry, stock: Function, trainer: Trainer, *args: object, **kwargs: object) -> Any:
    """Replace ``Trainer._get_train_sampler``: ``group_by_length`` sorts samples within one global batch.

    Stock sorts within ``train_batch_size * gradient_accumulation_steps``, which is a global batch only in one process.
    """
    sampler = stock(trainer, *args, **kwargs)
    if isinstance(sampler, LengthGroupedSampler):
        batches = replica_batches(registry, trainer)
        if batches is not None:
            sampler.batch_size = batches.split.samples
        elif is_sharded(registry, trainer) and not registry.is_pipelined(trainer.model):
            sampler.batch_size *= dist.get_world_size() // trainer.get_sp_size()
    return sampler


def set_initial_training_values(
    registry: Registry, stock: Function, trainer: Trainer, args: Any, dataloader: Any
) -> object:
    """Replace ``Trainer.set_initial_training_values``: count each batch of an epoch once.

    The stock method multiplies the length of the loader by ``get_sp_size()``, because DeepSpeed's loader adapter yields
    every batch once for each rank of a sequence-parallel group. This engine's loader yields it once, so the stock
    method gets a size of 1.
    """
    is_split = is_sharded(registry, trainer)
    reader = reader_of(dataloader)
    ranks_in_turn = 1  # ranks whose batches are trained one after the other, see `TrainedEpochs.watch`
    counted_loader = dataloader  # the loader by whose length the stock method counts
    if is_split and not registry.is_pipelined(trainer.model) and reader is None:
        length = count_batches(trainer, dataloader, needs_whole_batches=takes_whole_batches(registry, trainer))
        ranks_in_turn = length.ranks_in_turn
        counted_loader = CountedLoader(dataloader.dataset, length.batches)
    if registry.adapters.processes.asks_for_engine(trainer.accelerator):
        forget_epochs(trainer)
        epochs_of(trainer).watch(dataloader, ranks_in_turn=ranks_in_turn)
    if not (is_split or takes_unlike_batches(registry, trainer)):
        return stock(trainer, args, dataloader)
    global_batch_size = trainer.get_total_train_batch_size(args)
    if reader is not None:
        global_batch_size = reader.split.samples
        counted_loader = CountedLoader(dataloader.dataset, _micro_steps_in_epoch(reader))
    trainer.get_sp_size = lambda: 1
    trainer.get_total_train_batch_size = lambda args: global_batch_size
    try:
        return stock(trainer, args, counted_loader)
    finally:
        del trainer.get_sp_size, trainer.get_total_train_batch_size


def _micro_steps_in_epoch(reader: ReplicaSampler | ReplicaStream) -> int | None:
    """Return the micro-batches of an epoch; None for a data set without a length."""
    try:
        return micro_steps_in_epoch(reader)
    except TypeError:
        return None


def replica_batches(registry: Registry, trainer: Trainer) -> ReplicaBatches | None:
    """Return how this rank's replica shares samples if replicas take different batches; else None.

    Caller: every rank of the world.
    """
    is_unlike = takes_unlike_batches(registry, trainer)
    if not (is_unlike or is_sharded(registry, trainer)) or registry.is_pipelined(trainer.model):
        return None
    if is_unlike:
        complete_configuration(trainer)
    trained = registry.find(trainer.model)
    if trained is not None:
        replica = trained.replica
        if replica.batch_split is None:
            return None
        return ReplicaBatches(replica.batch_split, replica.replica_id)
    # Before deepspeed.initialize there is no replica yet, so the configuration is read.
    ds_config = trainer.accelerator.state.deepspeed_plugin.deepspeed_config
    return registry.request_of(ds_config).batches_of(dist.get_rank())


@contextlib.contextmanager
def making_loaders(registry: Registry, trainer: Trainer, batches: ReplicaBatches | None) -> Iterator[None]:
    """Inside the context, make training loaders for replicas, also by the script's ``get_train_dataloader``."""
    if not (takes_unlike_batches(registry, trainer) or is_sharded(registry, trainer)):
        yield
        return
    sp_size = trainer.get_sp_size()
    preparing = functools.partial(registry.adapters.processes.loaders_over_replicas, sp_size, batches)
    with making_train_loader(trainer, preparing, batches, is_of_rank=sp_size == 1):
        yield
