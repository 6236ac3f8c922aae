"""Batch sizes of DeepSpeed's engine, which is built as if there were no sequence parallelism.

`plain_configuration` returns the batch sizes with which the engine is built. `report_batches_of_replicas` then
overwrites the sizes that the finished engine reports with those of the replicas.

Example: 4 ranks are 2 replicas of 2 ranks each, with micro-batches of 3 samples and 5 accumulation steps. DeepSpeed
gets ``train_batch_size`` 30 = 3 * 5 * 2, and ``sequence_parallel_size`` 4 / 2 = 2.
"""

from __future__ import annotations

import torch.distributed as dist

from ds_hetero.engine.ds_config import DsConfig, sets_batch_by_rank
from ds_hetero.errors import ConfigError
from ds_hetero.frameworks.deepspeed.protocols import Engine, State
from ds_hetero.runtime.replica import Replica
from ds_hetero.values.plans import BatchSplit

BATCH_SIZES = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")


def plain_configuration(ds_config: DsConfig, replica: Replica, sp_size: int | None) -> State:
    """Return the configuration with which DeepSpeed builds an engine without sequence parallelism.

    Batch sizes that follow from the others are filled in, since DeepSpeed would compute them as fractions. Replicas
    that take different batches are described to DeepSpeed as one replica with batches of one sample;
    `report_batches_of_replicas` corrects that in the finished engine.

    Args:
        ds_config: the user's configuration.
        replica: this rank's replica.
        sp_size: the sequence-parallel size that the user gave, if any.

    Raises:
        ConfigError: the configuration has another global batch than the replicas together.
    """
    config = {key: value for key, value in ds_config.items() if key != "data_parallel_size"}
    global_batch, micro_batch, accum_steps = (config.get(name) for name in BATCH_SIZES)
    split, num_replicas = replica.batch_split, replica.num_replicas
    if split is not None:
        if not sets_batch_by_rank(ds_config):  # with "batch" the sizes were compared when the plan was made
            expect_batch_of_replicas(ds_config, split, dist.get_world_size(), sp_size)
        # One replica that takes one sample in each micro-batch: its global batch is the number of micro-batches.
        num_replicas = micro_batch = 1
        global_batch = accum_steps = split.micro_steps
    config["sequence_parallel_size"] = dist.get_world_size() / num_replicas
    if micro_batch is None and global_batch is not None:
        micro_batch = global_batch // ((accum_steps or 1) * num_replicas)
    if accum_steps is None and micro_batch:
        accum_steps = global_batch // (micro_batch * num_replicas) if global_batch is not None else 1
    if global_batch is None and micro_batch and accum_steps:
        global_batch = micro_batch * accum_steps * num_replicas
    sizes = dict(zip(BATCH_SIZES, (global_batch, micro_batch, accum_steps), strict=True))
    return {**config, **{name: size for name, size in sizes.items() if size is not None}}


def expect_batch_of_replicas(ds_config: DsConfig, split: BatchSplit, world_size: int, sp_size: int | None) -> None:
    """Check that a configuration has the global batch of the replicas. Raises `ConfigError`: it has another one.

    Args:
        ds_config: the user's configuration.
        split: samples that each replica takes in an optimizer step.
        world_size: number of all ranks.
        sp_size: the sequence-parallel size that the user gave; None counts all ranks as one worker.
    """
    global_batch, micro_batch, accum_steps = (ds_config.get(name) for name in BATCH_SIZES)
    accum_steps = accum_steps or 1
    samples_by_setting = {"train_batch_size": global_batch}
    if micro_batch is not None:
        num_workers = world_size // (sp_size or world_size)
        product = (
            f"train_micro_batch_size_per_gpu {micro_batch} x gradient_accumulation_steps {accum_steps} x {num_workers}"
        )
        samples_by_setting[product] = micro_batch * accum_steps * num_workers
    for setting, samples in samples_by_setting.items():
        if samples is not None and samples != split.samples:
            raise ConfigError(
                f"the replicas of the schedule take {split} per optimizer step, but {setting} is {samples}. "
                f"Set the global batch to {split.samples}, leave its keys out, or change micro_batch_size and "
                "micro_batches of the replicas in the schedule."
            )


def report_batches_of_replicas(engine: Engine, replica: Replica) -> None:
    """Set the numbers of replicas and of samples that a finished engine reports."""
    engine.dp_world_size = replica.num_replicas  # read by set_train_batch_size; ZeRO reads seq_dp_world_size
    split = replica.batch_split
    if split is not None:
        engine._config.train_batch_size = engine.tput_timer.batch_size = split.samples
        engine._config.train_micro_batch_size_per_gpu = split.micro_batch_sizes[replica.replica_id]
