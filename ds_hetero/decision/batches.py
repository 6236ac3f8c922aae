"""Decide the batches of ``"batch"``: data parallelism in which every rank has its own micro-batch size.

    plan = plan_of_batches([6, 2], training, world_size=2)     # replicas of one rank; 8 samples a micro-step

The value is a list with the samples of every rank's micro-batch, or ``"by_speed"``. The latter begins with batches in
proportion to the devices' memory; measured speeds change them later, and their sum stays. Imports no torch.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

from ds_hetero.decision.facts import ModelFacts, TrainingFacts
from ds_hetero.errors import ConfigError
from ds_hetero.values.baselines import ulysses
from ds_hetero.values.plans import BatchSplit, Plan
from ds_hetero.values.schedule import schedules_for_world
from ds_hetero.values.section import SECTION

_KEY = f'"{SECTION}.batch"'


def plan_of_batches(
    batch: Sequence[int] | Literal["by_speed"],
    training: TrainingFacts,
    world_size: int,
    memory_bytes: Sequence[int] = (),
) -> Plan:
    """Return the plan of a job with unequal batches: every rank is a replica with its own micro-batch size.

    Args:
        batch: value of the key: samples of every rank's micro-batch, or ``"by_speed"``.
        training: facts from ds_config.json, of which batch sizes are used.
        memory_bytes: memory of every rank's device, for the first batches of ``"by_speed"``; without it they are equal.

    Raises:
        ConfigError: the list has another length than the ranks, or another sum than the configured global batch; or
            ``"by_speed"`` lacks a global batch, or one with a sample for every rank.
    """
    steps = training.accumulation_steps or 1
    total = _micro_step_samples(training, steps, world_size)
    if isinstance(batch, str):
        if total is None:
            raise ConfigError(
                f'{_KEY}: "by_speed" divides the global batch over the ranks, and the configuration has none. Give '
                '"train_micro_batch_size_per_gpu", the mean over the ranks, or "train_batch_size".'
            )
        # As if speeds were proportional to memory; a rank's first batches must fit before any speed is known.
        s_per_sample = [1 / rank_bytes for rank_bytes in memory_bytes or [1] * world_size]
        sizes = balanced_batches(total, s_per_sample, [total] * world_size)
        if sum(sizes) > total:  # every rank gets one sample, and there are fewer samples than ranks
            raise ConfigError(
                f'{_KEY}: "by_speed" has {total} samples for {world_size} ranks, and every rank takes at least one. '
                "Make the global batch larger, or start fewer processes."
            )
    else:
        sizes = tuple(batch)
        if len(sizes) != world_size:
            raise ConfigError(
                f"{_KEY} has {len(sizes)} numbers, {list(sizes)}, but the job has {world_size} processes. Give the "
                f"samples of every rank's micro-batch, such as {[sizes[0]] * world_size}."
            )
        _expect_total(sizes, training, steps, world_size)
    split = BatchSplit(micro_batch_sizes=sizes, micro_batches=(steps,) * world_size)
    return Plan.of_replicas(schedules_for_world(ulysses(1, 1, 1), world_size), split)


def balanced_batches(total: int, s_per_sample: Sequence[float], limits: Sequence[int]) -> tuple[int, ...]:
    """Share ``total`` samples so that the slowest rank takes the least time; each rank gets at least one.

    Samples are given out one by one, each to the rank that would finish it first. This is optimal: no other choice ends
    earlier. With 1 s and 2 s per sample, 6 samples become 4 and 2 (4 s each).

    Args:
        s_per_sample: seconds per sample on every rank.
        limits: samples that fit into every rank's memory; together at least ``total``.
    """
    sizes = [1] * len(limits)
    # (seconds with one sample more, rank) of the ranks that can take one more; ties go to the lower rank.
    next_ends_s = [(2 * seconds, rank) for rank, seconds in enumerate(s_per_sample) if limits[rank] > 1]
    heapq.heapify(next_ends_s)
    for _ in range(total - len(sizes)):
        _, rank = heapq.heappop(next_ends_s)
        sizes[rank] += 1
        if sizes[rank] < limits[rank]:
            heapq.heappush(next_ends_s, ((sizes[rank] + 1) * s_per_sample[rank], rank))
    return tuple(sizes)


def as_whole(model: ModelFacts) -> ModelFacts:
    """Return the facts for ranks that each run the whole model; one head stands for all, since none is split."""
    return replace(model, num_heads=1, num_kv_heads=1, is_split=False)


def _micro_step_samples(training: TrainingFacts, steps: int, world_size: int) -> int | None:
    """Return the samples of all ranks together in a micro-step; None if the configuration does not set them.

    Args:
        steps: micro-batches of an optimizer step.
    """
    if training.micro_batch_size is not None:
        return training.micro_batch_size * world_size
    if training.train_batch_size is None:
        return None
    samples, remainder = divmod(training.train_batch_size, steps)
    if remainder:
        raise ConfigError(
            f"train_batch_size {training.train_batch_size} is not a multiple of gradient_accumulation_steps {steps}. "
            "Change one of the two."
        )
    return samples


def _expect_total(sizes: Sequence[int], training: TrainingFacts, steps: int, world_size: int) -> None:
    """Raise `ConfigError` if the list disagrees with a configured batch size, which may be a rounded mean of ranks."""
    total = sum(sizes)
    micro_batch = training.micro_batch_size
    global_batch = training.train_batch_size
    means = {total // world_size, -(-total // world_size)}
    if micro_batch is not None and micro_batch not in means:
        means_text = " or ".join(map(str, sorted(means)))
        raise ConfigError(
            f"{_KEY} {list(sizes)} has {total} samples in all, which is {total / world_size:g} a rank, but the "
            f"micro-batch of a rank (train_micro_batch_size_per_gpu, per_device_train_batch_size, the loader's) is "
            f"{micro_batch}. Make that {means_text}, the mean, or change {_KEY} to numbers that sum to "
            f"{micro_batch * world_size}."
        )
    # accelerate computes train_batch_size from the micro-batch, and so from a mean that may be rounded.
    from_mean = None if micro_batch is None else micro_batch * steps * world_size
    if global_batch is not None and global_batch not in (total * steps, from_mean):
        raise ConfigError(
            f"{_KEY} {list(sizes)} with gradient_accumulation_steps {steps} makes a global batch of {total * steps}, "
            f"but train_batch_size is {global_batch}. Leave that out, or make them equal."
        )
