"""What DeepSpeed asks an mpu, and `deepspeed.utils.groups` where it has one: process groups by kind of parallelism."""

from __future__ import annotations

import functools
from collections.abc import Mapping

import torch.distributed as dist
from torch.distributed import ProcessGroup

from ds_hetero.errors import ConfigError
from ds_hetero.runtime.peers.board import default_group
from ds_hetero.runtime.replica import ProcessGroups, Replica


class Mpu:
    """Answers ``get_KIND_parallel_group``, ``get_KIND_parallel_world_size`` and ``get_KIND_parallel_rank``.

    Args:
        groups: of this rank, by kind: ``"data"``, ``"model"``, ``"sequence"``.
    """

    def __init__(self, groups: Mapping[str, ProcessGroup]) -> None:
        for kind, group in groups.items():
            answers = {"group": group, "world_size": dist.get_world_size(group), "rank": dist.get_rank(group)}
            for what, answer in answers.items():
                setattr(self, f"get_{kind}_parallel_{what}", functools.partial(_the, answer))


def _the(answer: object) -> object:
    return answer


class SequenceMpu(Mpu):
    """An mpu with sequence parallelism; see `Mpu`.

    Args:
        size_given: the sequence-parallel size that the user gave, if any: the number of all ranks where replicas have
            different sizes.
    """

    def __init__(self, groups: Mapping[str, ProcessGroup], size_given: int | None = None) -> None:
        super().__init__(groups)
        self.size_given = size_given

    def initialize_sequence_parallel(self, sequence_parallel_size: int) -> None:
        """Raise `ConfigError`: groups exist. Its name marks, as in DeepSpeed, an mpu without model parallelism."""
        raise ConfigError("the sequence-parallel groups are made by ds_hetero; do not initialize them again.")


def mpu_of_replica(replica: Replica, size_given: int | None) -> SequenceMpu:
    """Sequence parallelism over this rank's replica; ZeRO partitions over all ranks."""
    return SequenceMpu({"sequence": replica.sp_group, "sequence_data": default_group()}, size_given)


def mpu_of_one_worker() -> SequenceMpu:
    """Sequence parallelism over the whole job, which is then one worker."""
    return SequenceMpu({"sequence": default_group()})


def groups_of_lone_rank(groups: ProcessGroups) -> dict[str, ProcessGroup]:
    """Groups by kind of a rank with data parallelism of one, and model parallelism over all ranks.

    Args:
        groups: made so far, to be used again.

    Caller: every rank of the world, in the same order as whatever else makes process groups.
    Collectives: one new_group for every rank, and one for all, that ``groups`` does not have.
    """
    ranks = range(dist.get_world_size())
    own, everyone = [groups.of([rank]) for rank in ranks][dist.get_rank()], groups.of(ranks)
    return {"data": own, "model": everyone, "tensor_model": everyone}
