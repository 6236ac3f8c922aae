"""``Accelerator.prepare`` with this engine: models, loaders, and what a checkpoint saves of the script."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader

from ds_hetero.engine.ds_config import (
    read_training_facts,
    sets_batch_by_rank,
)
from ds_hetero.engine.loader_by_mode import LoaderByMode
from ds_hetero.engine.model_calls import calls_of
from ds_hetero.engine.patching import Function
from ds_hetero.engine.registry import Registry
from ds_hetero.errors import ConfigError
from ds_hetero.frameworks.accelerate.accelerators import asks_for_engine, made_after_registration
from ds_hetero.frameworks.accelerate.batch_sizes import complete_batch_of_replicas, complete_batch_sizes
from ds_hetero.frameworks.accelerate.loaders import loaders_over_replicas
from ds_hetero.frameworks.accelerate.process_counts import steps_of_replicas

_latest_accelerator: weakref.ref[Accelerator] | None = None  # the latest one that has prepared a model for this engine


def objects_of_script() -> dict[str, Any]:
    """Return the objects, by name, that the latest Accelerator writes into a checkpoint in addition to the engine."""
    accelerator = None if _latest_accelerator is None else _latest_accelerator()
    if accelerator is None:
        return {}
    objects: dict[str, Any] = {}
    for index, scheduler in enumerate(accelerator._schedulers):
        objects[f"accelerate.scheduler{index}"] = scheduler
    for index, custom_object in enumerate(accelerator._custom_objects):
        objects[f"accelerate.object{index}"] = custom_object
    return objects


def log_stock_training(
    registry: Registry, stock: Function, accelerator: Accelerator, *objects: object, **kwargs: object
) -> object:
    """Extend ``Accelerator.prepare``: log that several ranks train with stock DeepSpeed, and why."""
    has_model = any(isinstance(prepared, nn.Module) for prepared in objects)
    if has_model and not asks_for_engine(accelerator):
        plugin = accelerator.state.deepspeed_plugin
        where = "the Accelerator has no DeepSpeedPlugin" if plugin is None else "its DeepSpeedPlugin has none"
        registry.say_stock(where, is_alone=accelerator.num_processes == 1)
    return stock(accelerator, *objects, **kwargs)


def prepare_deepspeed(registry: Registry, stock: Function, accelerator: Accelerator, *args: object) -> object:
    """Replace ``Accelerator._prepare_deepspeed``: prepare model and loaders for this engine.

    It is called when accelerate has completed the configuration, but has neither called ``deepspeed.initialize`` nor
    wrapped the loaders.

    Raises:
        ConfigError: the configuration requests this engine, but accelerate was not set up for it.
    """
    if not asks_for_engine(accelerator) or not any(isinstance(obj, nn.Module) for obj in args):
        return stock(accelerator, *args)
    parallelism = accelerator.parallelism_config
    sp_size = parallelism.sp_size if parallelism is not None else 1
    ds_config = accelerator.deepspeed_plugin.deepspeed_config
    gives_batches = sets_batch_by_rank(ds_config)  # the section gives the batch of every rank
    if gives_batches:
        complete_batch_sizes(ds_config, args)
    elif sp_size == 1 and dist.get_world_size() > 1 and accelerator not in made_after_registration:
        raise ConfigError(
            "ds_hetero.register() was called after the Accelerator was made (a Trainer makes one in its __init__, and "
            "so do TRL's trainers), so the Accelerator has counted ranks and read the configuration without ds_hetero. "
            "Call ds_hetero.register() before the Trainer or the Accelerator is made."
        )
    elif sp_size == 1 and dist.get_world_size() > 1:
        raise ConfigError(_why_not_split(ds_config, parallelism is not None))
    elif sp_size > 1:
        complete_batch_of_replicas(ds_config, args, dist.get_world_size() // sp_size)
    batches = registry.request_of(ds_config).batches_of(dist.get_rank())
    with (
        registry.using(ds_config),
        loaders_over_replicas(sp_size, batches, by_mode=gives_batches),
        steps_of_replicas(args, sp_size),
    ):
        prepared = stock(accelerator, *args)
    if batches is not None:
        accelerator.gradient_accumulation_steps = batches.split.micro_steps
    if gives_batches:
        model = next(obj for obj in args if isinstance(obj, nn.Module))
        for loader in prepared:
            if isinstance(loader, LoaderByMode):
                loader.bind(registry, model, accelerator.device)
    global _latest_accelerator
    _latest_accelerator = weakref.ref(accelerator)
    # With sequence parallelism, accelerate wraps loaders in DeepSpeed's adapter, which this engine replaces. A job of
    # one rank has no such adapter.
    if dist.get_world_size() == 1:
        prepared = _sharding_for_one_rank(registry, args, prepared, accelerator.device)
    if any(isinstance(obj, nn.Module) and registry.is_pipelined(obj) for obj in args):
        # All ranks together are one worker, and have the same values, so there is nothing to gather.
        accelerator.gather = accelerator.gather_for_metrics = lambda values, *args, **kwargs: values
    return prepared


def _sharding_for_one_rank(
    registry: Registry, objects: tuple[object, ...], prepared: Iterable[Any], device: torch.device
) -> tuple[object, ...]:
    """Return the prepared objects of a job of one rank; if ds_hetero handles its model, with our loaders in place.

    Args:
        objects: the arguments of ``prepare``.
        prepared: what stock returned for them.
    """
    model = next(obj for obj in objects if isinstance(obj, nn.Module))
    if registry.find_split(model) is None:
        return tuple(prepared)
    calls = calls_of(registry, model)
    wrapped: list[object] = []
    for original, prepared_object in zip(objects, prepared, strict=True):
        if isinstance(original, DataLoader):
            wrapped.append(calls.dataloader(prepared_object, device, None))
        else:
            wrapped.append(prepared_object)
    return tuple(wrapped)


def _why_not_split(ds_config: Any, has_parallelism: bool) -> str:
    """Return the message of the error about a sequence-parallel size of 1: why it is 1, and what to change.

    Args:
        has_parallelism: True if the Accelerator has a ParallelismConfig.
    """
    sized_by = '"sequence_parallel_size"' if read_training_facts(ds_config).sp_size == 1 else None
    if sized_by is None and has_parallelism:
        sized_by = "sp_size of the ParallelismConfig"
    if sized_by is None:
        return (
            'the "heterogeneity" section splits sequences over ranks, but accelerate does not split them. Give it '
            'ParallelismConfig(sp_backend="deepspeed", sp_size=N), in which N ranks share a sequence; or give every '
            'rank a different batch: "heterogeneity": {"batch": [6, 2]}.'
        )
    return (
        f"{sized_by} is 1, which makes every rank a replica. Under accelerate and the HF Trainer, such replicas need "
        'the samples of every rank in the section: "heterogeneity": {"batch": [6, 2]}, or "by_speed". Or let N > 1 '
        'ranks share a sequence: leave the size out, or give ParallelismConfig(sp_backend="deepspeed", sp_size=N).'
    )
