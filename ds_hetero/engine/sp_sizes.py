"""The sequence-parallel size of a script that gives accelerate no ParallelismConfig: that of its configuration."""

from __future__ import annotations

import os
from collections.abc import Mapping

from ds_hetero.engine.ds_config import DsConfig, enabled, read_training_facts, says_batches
from ds_hetero.values.section import SECTION


def size_of_configuration(ds_config: DsConfig | None) -> int | None:
    """Ranks that share a batch: ``sequence_parallel_size``, the ranks of an inline schedule, or all of the job.

    Where replicas take different batches, or are cut into stages, they are one worker on all ranks.

    Args:
        ds_config: DeepSpeed's configuration.

    Returns:
        None without the section, with batches by rank in it, with one rank, or with what is no size and will be
        refused later.
    """
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    if ds_config is None or not enabled(ds_config) or says_batches(ds_config) or world_size == 1:
        return None
    size: object = read_training_facts(ds_config).sp_size
    section = ds_config[SECTION]
    schedule = section.get("schedule") if isinstance(section, Mapping) else None
    if size is None and isinstance(schedule, Mapping) and isinstance(schedule.get("groups"), list):
        size = sum(len(group["ranks"]) for group in schedule["groups"] if isinstance(group, Mapping))
    size = world_size if size is None else size
    is_size = isinstance(size, int) and not isinstance(size, bool) and size > 1 and world_size % size == 0
    return size if is_size else None  # type: ignore[return-value]
