"""Configure DeepSpeed's engine so that it exchanges nothing with other ranks.

In a job of pipelines, ds_hetero moves activations between stages and adds gradients up, so DeepSpeed must not reduce or
broadcast anything. Its mpu says that each rank is a data-parallel group by itself, and that all ranks together are one
model-parallel group. DeepSpeed then averages over one rank, and each rank writes its own checkpoint file.

    4 ranks     data-parallel groups of DeepSpeed      [0] [1] [2] [3]
                model-parallel group                   [0, 1, 2, 3]

accelerate and the Trainer get the number of all ranks as ``sp_size`` for the same reason: they then count one worker,
and read the same batches on every rank. That splits no sequence.
"""

from __future__ import annotations

import torch.distributed as dist
from deepspeed.runtime.constants import GRADIENT_CLIPPING, GRADIENT_CLIPPING_DEFAULT
from torch.distributed import ProcessGroup

from ds_hetero.engine.ds_config import DsConfig
from ds_hetero.frameworks.deepspeed.batch_sizes import BATCH_SIZES
from ds_hetero.frameworks.deepspeed.protocols import State
from ds_hetero.runtime.process_groups import ProcessGroups

# Keys that are removed from DeepSpeed's configuration, because ds_hetero itself implements them for pipelines.
_HANDLED_HERE = (
    "zero_optimization",
    "bf16",
    "fp16",
    "bfloat16",
    "optimizer",
    GRADIENT_CLIPPING,
    "data_types",
    "sequence_parallel_size",
)


def max_gradient_norm(ds_config: DsConfig) -> float:
    """Return the norm to which gradients are clipped, as DeepSpeed reads it; 0 means no clipping."""
    value = ds_config.get(GRADIENT_CLIPPING, GRADIENT_CLIPPING_DEFAULT)
    return float(value) if isinstance(value, int | float) else 0.0


def single_rank_configuration(ds_config: DsConfig, samples: int) -> State:
    """Return the configuration that DeepSpeed gets: fp32, without ZeRO and without clipping.

    Args:
        ds_config: the user's configuration.
        samples: samples of an optimizer step of the plan.
    """
    passed_on = {key: value for key, value in ds_config.items() if key not in _HANDLED_HERE}
    batches = dict(zip(BATCH_SIZES, (samples, samples, 1), strict=True))
    return {**passed_on, **batches, "zero_optimization": {"stage": 0}, GRADIENT_CLIPPING: 0.0}


def single_rank_groups(groups: ProcessGroups) -> dict[str, ProcessGroup]:
    """Return process groups by kind: this rank alone for data, all ranks for model parallelism.

    Args:
        groups: process groups that exist already and are used again.

    Caller: every rank of the world, in the same order as other calls that make process groups.
    Collectives: one new_group for each rank, and one for all ranks, unless ``groups`` has them.
    """
    ranks = range(dist.get_world_size())
    group_of_each_rank = [groups.of([rank]) for rank in ranks]  # all of them: new_group is a collective
    all_ranks = groups.of(ranks)
    return {"data": group_of_each_rank[dist.get_rank()], "model": all_ranks, "tensor_model": all_ranks}
