"""Batch sizes that the configuration leaves open, from the loaders."""

from __future__ import annotations

from typing import Any

from torch.utils.data import DataLoader

from ds_hetero.errors import ConfigError


def complete_batch_sizes(ds_config: dict[str, Any], objects: tuple[object, ...]) -> None:
    """Set the micro-batch size in the configuration, if it has none or "auto", to the smallest one of the loaders."""
    if ds_config.get("train_micro_batch_size_per_gpu") in (None, "auto"):
        sizes = [obj.batch_size for obj in objects if isinstance(obj, DataLoader) and obj.batch_size is not None]
        if sizes:
            ds_config["train_micro_batch_size_per_gpu"] = min(sizes)


def complete_batch_of_replicas(ds_config: dict[str, Any], objects: tuple[object, ...], num_replicas: int) -> None:
    """Complete a configuration that gives ``train_batch_size`` alone; accelerate reads the other sizes.

    Raises:
        ConfigError: the loader's batch and the gradient accumulation make another batch.
    """
    samples = ds_config.get("train_batch_size")
    if "train_micro_batch_size_per_gpu" in ds_config or not isinstance(samples, int):
        return
    complete_batch_sizes(ds_config, objects)
    micro_batch = ds_config.get("train_micro_batch_size_per_gpu")
    accum_steps = ds_config.get("gradient_accumulation_steps", 1)
    if micro_batch is None or accum_steps == "auto":
        return
    if micro_batch * accum_steps * num_replicas != samples:
        raise ConfigError(
            f'"train_batch_size": {samples} is not the batch of the loader, {micro_batch}, x '
            f"gradient_accumulation_steps {accum_steps} x {num_replicas} replicas. Change one of them."
        )
