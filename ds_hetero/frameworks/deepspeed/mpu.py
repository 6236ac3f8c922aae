"""Model parallel units (``mpu``): objects from which DeepSpeed gets its process groups.

DeepSpeed's module ``deepspeed.utils.groups`` has a global ``mpu`` and asks it for groups. While an engine is built,
``mpu`` is None, so that DeepSpeed sees no sequence parallelism. Afterwards it is the mpu of this rank's replica.
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
    """An mpu with methods ``get_KIND_parallel_group``, ``..._world_size`` and ``..._rank`` for some kinds of groups.

    Args:
        groups: this rank's process groups by kind: ``"data"``, ``"model"``, ``"sequence"``.
    """

    def __init__(self, groups: Mapping[str, ProcessGroup]) -> None:
        for kind, group in groups.items():
            results = {"group": group, "world_size": dist.get_world_size(group), "rank": dist.get_rank(group)}
            for suffix, result in results.items():
                setattr(self, f"get_{kind}_parallel_{suffix}", functools.partial(_return, result))


def _return(result: object) -> object:
    return result


class SequenceMpu(Mpu):
    """An mpu with sequence parallelism; see `Mpu`.

    Args:
        user_sp_size: the sequence-parallel size that the user gave, if any; the number of all ranks if replicas have
            different sizes.
    """

    def __init__(self, groups: Mapping[str, ProcessGroup], user_sp_size: int | None = None) -> None:
        super().__init__(groups)
        self.user_sp_size = user_sp_size

    def initialize_sequence_parallel(self, sequence_parallel_size: int) -> None:
        """Raise `ConfigError`: the groups exist already.

        The method must exist, because DeepSpeed takes an mpu without it for one of model parallelism.
        """
        raise ConfigError(
            "ds_hetero has made the sequence-parallel groups already. Remove the call of initialize_sequence_parallel."
        )


def mpu_of_replica(replica: Replica, user_sp_size: int | None) -> SequenceMpu:
    """Return an mpu with this rank's replica as the sequence-parallel group, and ZeRO partitions over all ranks."""
    return SequenceMpu({"sequence": replica.sp_group, "sequence_data": default_group()}, user_sp_size)


def mpu_of_one_worker() -> SequenceMpu:
    """Return an mpu with all ranks as one sequence-parallel group, so that frameworks count one worker."""
    return SequenceMpu({"sequence": default_group()})


def expect_one_worker(size: int) -> None:
    """Check that a sequence-parallel size is the number of all ranks. Raises `ConfigError`: it is not."""
    if size != dist.get_world_size():
        raise ConfigError(
            f"with a plan of pipelines all {dist.get_world_size()} ranks are one worker that reads global batches, but "
            f"the sequence-parallel size is {size}. Set sp_size to {dist.get_world_size()}."
        )


@contextlib.contextmanager
def sequence_parallelism_hidden(replica_state: SequenceMpu, patches: Patches) -> Iterator[None]:
    """Hide sequence parallelism from ``deepspeed.utils.groups`` inside the context; set the replica's mpu afterwards.

    The engine is built inside the context. An error inside restores the former mpu.

    Args:
        replica_state: the replica's mpu.
        patches: their undo restores the former mpu.
    """
    former = groups.mpu, groups.mesh_device
    groups.mpu = groups.mesh_device = None
    try:
        yield
    except BaseException:
        groups.mpu, groups.mesh_device = former
        raise
    groups.mpu = replica_state

    def restore() -> None:
        if groups.mpu is replica_state:
            groups.mpu, groups.mesh_device = former

    patches.on_undo(restore)
