"""Batch sizes of an engine that is built as if there were no sequence parallelism.

DeepSpeed is given sizes of such an engine, and the finished engine reports those of the replicas.
"""

from __future__ import annotations

import torch.distributed as dist

from ds_hetero.engine.ds_config import DsConfig, says_batches
from ds_hetero.errors import ConfigError
from ds_hetero.frameworks.deepspeed.protocols import Engine, State
from ds_hetero.runtime.replica import Replica
from ds_hetero.values.plans import BatchSplit

BATCH_SIZES = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")


def plain_configuration(ds_config: DsConfig, replica: Replica, sp_size: int | None) -> State:
    """Make a configuration without sequence parallelism. Raises `ConfigError`: another global batch.

    Batch sizes that follow from the others are filled in, since DeepSpeed would compute them as fractions. Replicas
    that take different batches are, to DeepSpeed, one that takes batches of one sample; `report_batches_of_replicas`
    corrects that in the finished engine.

    Args:
        sp_size: the sequence-parallel size that the user gave, if any.
    """
    config = {key: value for key, value in ds_config.items() if key != "data_parallel_size"}
    total, micro, steps = (config.get(name) for name in BATCH_SIZES)
    split, num_replicas = replica.batch_split, replica.num_replicas
    if split is not None:
        if not says_batches(ds_config):  # which were compared when they became a plan
            expect_batch_of_replicas(ds_config, split, dist.get_world_size(), sp_size)
        num_replicas, total, micro, steps = 1, split.micro_steps, 1, split.micro_steps
    config["sequence_parallel_size"] = dist.get_world_size() / num_replicas
    if micro is None and total is not None:
        micro = total // ((steps or 1) * num_replicas)
    if steps is None and micro:
        steps = total // (micro * num_replicas) if total is not None else 1
    if total is None and micro and steps:
        total = micro * steps * num_replicas
    config.update({name: n for name, n in zip(BATCH_SIZES, (total, micro, steps), strict=True) if n is not None})
    return config


def expect_batch_of_replicas(ds_config: DsConfig, split: BatchSplit, world_size: int, sp_size: int | None) -> None:
    """Refuse a configuration whose global batch is not that of the replicas. Raises `ConfigError`."""
    total, micro, steps = (ds_config.get(name) for name in BATCH_SIZES)
    samples_by_setting = {"train_batch_size": total}
    if micro is not None:
        workers = world_size // (sp_size or world_size)
        product = f"train_micro_batch_size_per_gpu {micro} x gradient_accumulation_steps {steps or 1} x {workers}"
        samples_by_setting[product] = micro * (steps or 1) * workers
    for setting, samples in samples_by_setting.items():
        if samples is not None and samples != split.samples:
            raise ConfigError(
                f"the replicas of the schedule take {split} per optimizer step, but {setting} is {samples}. "
                f"Make the global batch {split.samples}, leave it out where that is possible, or change the replicas' "
                "micro_batch_size and micro_batches."
            )


def report_batches_of_replicas(engine: Engine, replica: Replica) -> None:
    """Let a finished engine count replicas, and the samples of all of them, in its reports."""
    engine.dp_world_size = replica.num_replicas  # for set_train_batch_size; ZeRO's world is seq_dp_world_size
    split = replica.batch_split
    if split is not None:
        engine._config.train_batch_size = engine.tput_timer.batch_size = split.samples
        engine._config.train_micro_batch_size_per_gpu = split.micro_batch_sizes[replica.replica_id]
