"""View of a job of pipelines for frameworks that know sequence parallelism: one worker on all ranks.

accelerate and the Trainer are given ``sp_size`` of all ranks, so that they count one worker and read the same batches
on every rank; nothing is split over the sequence on that account.
"""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from ds_hetero.errors import ConfigError
from ds_hetero.frameworks.deepspeed.pipeline.lone_engine import LoneRank


class OneWorker:
    """An mpu whose sequence-parallel group is the whole job."""

    def initialize_sequence_parallel(self, sequence_parallel_size: int) -> None:
        """Groups exist already."""
        raise ConfigError("the groups of the pipelines are made by ds_hetero; do not initialize them again.")

    def get_sequence_parallel_group(self) -> Any:
        """All ranks."""
        return dist.group.WORLD

    def get_sequence_parallel_world_size(self) -> int:
        """Ranks of the job."""
        return dist.get_world_size()

    def get_sequence_parallel_rank(self) -> int:
        """This rank."""
        return dist.get_rank()


class LoneWorker(OneWorker, LoneRank):
    """The answers of `deepspeed.utils.groups` once the engine has been built: a lone rank, and one worker."""


def expect_one_worker(size: int) -> None:
    """Refuse another sequence-parallel size than the number of all ranks.

    Raises:
        ConfigError: names both.
    """
    if size != dist.get_world_size():
        raise ConfigError(
            f"a plan of pipelines takes all {dist.get_world_size()} ranks as one worker, whose batch is the global "
            f"one, but the sequence-parallel size is {size}. Set sp_size to {dist.get_world_size()}."
        )
