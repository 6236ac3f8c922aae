"""Determine how a Trainer trains: on shards, on whole batches through sharded calls, or in a job of one rank."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch.distributed as dist
from transformers import Trainer

from ds_hetero.engine.forward_mode import Wanted, sharded_calls, wanted_results
from ds_hetero.engine.registry import Registry
from ds_hetero.frameworks.transformers.evaluation import accepts_loss_kwargs, takes_loss_from_logits


def is_alone(registry: Registry, trainer: Trainer) -> bool:
    """Return True if a Trainer trains with this engine in a job of one rank, whose model takes whole batches."""
    return registry.adapters.processes.asks_for_engine(trainer.accelerator) and dist.get_world_size() == 1


def split_of(registry: Registry, trainer: Trainer) -> Any:
    """Return the sharded model of a Trainer; None if its model is not sharded, or in a job of one rank."""
    if is_alone(registry, trainer):
        return None
    return registry.find_split(trainer.model)


def takes_whole_batches(registry: Registry, trainer: Trainer) -> bool:
    """Return True if a Trainer computes its loss from whole sequences or from all logits, not token by token."""
    return takes_loss_from_logits(trainer) or registry.adapters.trainers.needs_whole_sequences(trainer)


@contextlib.contextmanager
def calls_sharded(registry: Registry, trainer: Trainer) -> Iterator[None]:
    """Inside the context, run a Trainer as if each replica were one process.

    Calls of its models take whole batches, are sharded at the model's forward, and return the outputs of the whole
    batch. accelerate gathers one value of each replica. So loss, metrics and evaluation are those of one process.
    """
    if wanted_results() is not None:  # an evaluation during training: already inside
        yield
        return
    # Trainer.__init__ sets it to False for sequence parallelism, because it then computes the loss itself.
    former = trainer.model_accepts_loss_kwargs
    trainer.model_accepts_loss_kwargs = accepts_loss_kwargs(trainer)
    adapters = registry.adapters
    results = Wanted(own_outputs=True, logits=True, shorter_outputs=adapters.trainers.shorter_outputs)
    try:
        with sharded_calls(results), adapters.processes.gathering_over_replicas(trainer.accelerator):
            yield
    finally:
        trainer.model_accepts_loss_kwargs = former
