"""Mpu: the object that DeepSpeed, and its module ``groups`` where it has one, asks for process groups.

While an engine is built there is none, so that DeepSpeed knows no sequence parallelism; afterwards there is that of the
replica.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Mapping

import torch.distributed as dist
from deepspeed.utils import groups
from torch.distributed import ProcessGroup

from ds_hetero.engine.patching import Patches
from ds_hetero.errors import ConfigError
from ds_hetero.runtime.peers.board import default_group
from ds_hetero.runtime.replica import Replica


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


def expect_one_worker(size: int) -> None:
    """Refuse another sequence-parallel size than the number of all ranks. Raises `ConfigError`: it names both."""
    if size != dist.get_world_size():
        raise ConfigError(
            f"a plan of pipelines takes all {dist.get_world_size()} ranks as one worker, whose batch is the global "
            f"one, but the sequence-parallel size is {size}. Set sp_size to {dist.get_world_size()}."
        )


@contextlib.contextmanager
def sequence_parallelism_hidden(replica_state: SequenceMpu, patches: Patches) -> Iterator[None]:
    """Let ``groups`` know no sequence parallelism inside, where an engine is built, and the replica's afterwards."""
    before = groups.mpu, groups.mesh_device
    groups.mpu = groups.mesh_device = None
    try:
        yield
    except BaseException:
        groups.mpu, groups.mesh_device = before
        raise
    groups.mpu = replica_state

    def restore() -> None:
        if groups.mpu is replica_state:
            groups.mpu, groups.mesh_device = before

    patches.on_undo(restore)
