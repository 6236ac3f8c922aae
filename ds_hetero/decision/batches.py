"""``"batch"``: plain data parallelism in which every rank takes micro-batches of its own size. Imports no torch.

    plan = plan_of_batches([6, 2], training, world_size=2)     # replicas of one rank; 8 samples a micro-step

A list says the samples of every rank's micro-batch. ``"by_speed"`` begins with batches by the memory of the devices and
keeps their sum.
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
    """Return the plan of replicas of one rank, whose micro-batches have these samples.

    Args:
        memory_bytes: of every rank's device, by which ``"by_speed"`` begins; equal batches where it is not known.

    Raises:
        ConfigError: there is not one number per rank, or the configuration says another global batch; or none, of which
            ``"by_speed"`` could give every rank a part.
    """
    steps = training.accumulation_steps or 1
    total = _micro_step_samples(training, steps, world_size)
    if isinstance(batch, str):
        if total is None:
            raise ConfigError(
                f'{_KEY}: "by_speed" shares the global batch out, which the configuration does not say. Give '
                '"train_micro_batch_size_per_gpu", the mean over the ranks, or "train_batch_size".'
            )
        sizes = balanced_batches(total, [1 / m for m in memory_bytes or [1] * world_size], [total] * world_size)
        if sum(sizes) > total:
            raise ConfigError(
                f'{_KEY}: "by_speed" has {total} samples for {world_size} ranks, of which every one takes at least '
                "one. Make the global batch larger, or start fewer processes."
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


def balanced_batches(total: int, s_per_sample: Sequence[float], most: Sequence[int]) -> tuple[int, ...]:
    """Samples of every rank by which the slowest takes the least time; every rank gets one at least.

    Samples are dealt out one by one to the rank that would have computed them first, which is the optimum.

    Args:
        s_per_sample: seconds of one on every rank.
        most: samples that the memory of every rank has room for; together at least ``total``.
    """
    sizes = [1] * len(most)
    ends = [(2 * seconds, rank) for rank, seconds in enumerate(s_per_sample) if most[rank] > 1]
    heapq.heapify(ends)
    for _ in range(total - len(sizes)):
        _, rank = heapq.heappop(ends)
        sizes[rank] += 1
        if sizes[rank] < most[rank]:
            heapq.heappush(ends, ((sizes[rank] + 1) * s_per_sample[rank], rank))
    return tuple(sizes)


def as_whole(model: ModelFacts) -> ModelFacts:
    """Facts of a model that every rank runs whole; the schedules of `plan_of_batches` have one head."""
    return replace(model, num_heads=1, num_kv_heads=1, is_split=False)


def _micro_step_samples(training: TrainingFacts, steps: int, world_size: int) -> int | None:
    """Samples that all ranks together take in a micro-step; None where the configuration does not say."""
    if training.micro_batch_size is not None:
        return training.micro_batch_size * world_size
    if training.train_batch_size is None:
        return None
    samples, rest = divmod(training.train_batch_size, steps)
    if rest:
        raise ConfigError(
            f"train_batch_size {training.train_batch_size} is no multiple of gradient_accumulation_steps {steps}."
        )
    return samples


def _expect_total(sizes: Sequence[int], training: TrainingFacts, steps: int, world_size: int) -> None:
    """Refuse a global batch that is not the list's sum; a mean may be rounded. Raises `ConfigError`."""
    total, micro = sum(sizes), training.micro_batch_size
    given = training.train_batch_size
    means = {total // world_size, -(-total // world_size)}
    if micro is not None and micro not in means:
        wanted = " or ".join(map(str, sorted(means)))
        raise ConfigError(
            f"{_KEY} {list(sizes)} has {total} samples in all, which is {total / world_size:g} a rank, but the "
            f"micro-batch of a rank (train_micro_batch_size_per_gpu, per_device_train_batch_size, the loader's) is "
            f"{micro}. Make that {wanted}, the mean, or change {_KEY} to numbers that sum to {micro * world_size}."
        )
    # accelerate fills this one in from a mean, which may be rounded
    of_mean = None if micro is None else micro * steps * world_size
    if given is not None and given not in (total * steps, of_mean):
        raise ConfigError(
            f"{_KEY} {list(sizes)} with gradient_accumulation_steps {steps} makes a global batch of {total * steps}, "
            f"but train_batch_size is {given}. Leave that out, or make them equal."
        )
