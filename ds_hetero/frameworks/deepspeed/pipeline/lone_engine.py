"""A stock engine that sees itself alone: DeepSpeed broadcasts and reduces nothing, and every rank has its own files.

DeepSpeed is shown a job in which every rank is a data-parallel group of one, and one of as many model-parallel ranks as
there are processes. What ranks exchange is the pipeline's and the gradient synchronizer's part.

accelerate and the Trainer are given ``sp_size`` of all ranks, so that they count one worker and read the same batches
on every rank; nothing is split over the sequence on that account.
"""

from __future__ import annotations

import torch.distributed as dist
from deepspeed.runtime.constants import GRADIENT_CLIPPING, GRADIENT_CLIPPING_DEFAULT
from torch.distributed import ProcessGroup

from ds_hetero.engine.ds_config import DsConfig
from ds_hetero.frameworks.deepspeed.batch_sizes import BATCH_SIZES
from ds_hetero.frameworks.deepspeed.protocols import State
from ds_hetero.runtime.process_groups import ProcessGroups

_OURS = ("zero_optimization", "bf16", "fp16", "bfloat16", "optimizer", GRADIENT_CLIPPING, "data_types")


def clipping_of(ds_config: DsConfig) -> float:
    """Return the largest gradient norm, as DeepSpeed reads it; 0 does not clip."""
    value = ds_config.get(GRADIENT_CLIPPING, GRADIENT_CLIPPING_DEFAULT)
    return float(value) if isinstance(value, int | float) else 0.0


def lone_configuration(ds_config: DsConfig, samples: int) -> State:
    """Make the configuration of an engine of one rank, fp32, no ZeRO or clipping; ``samples`` of a step of the plan."""
    kept = {key: value for key, value in ds_config.items() if key not in (*_OURS, "sequence_parallel_size")}
    batches = dict(zip(BATCH_SIZES, (samples, samples, 1), strict=True))
    return {**kept, **batches, "zero_optimization": {"stage": 0}, GRADIENT_CLIPPING: 0.0}


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
