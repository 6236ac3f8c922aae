"""Cut of a ZeRO-3 parameter into shards, and the ranks that own them: ours or DeepSpeed's."""

from __future__ import annotations

from deepspeed import comm as dist
from torch.distributed import ProcessGroup

from ds_hetero.frameworks.deepspeed.protocols import ZeroParameter
from ds_hetero.sharding.zero_partition import cut_as_deepspeed
from ds_hetero.values.splits import Split

CUT_ATTRIBUTE, OWNERS_ATTRIBUTE = "ds_hetero_cut", "ds_hetero_owners"


def is_weighted(param: ZeroParameter) -> bool:
    """Whether `recut` gave a parameter its shards; else they are DeepSpeed's."""
    return hasattr(param, CUT_ATTRIBUTE)


def cut_of(param: ZeroParameter) -> Split:
    """Return how a ZeRO-3 parameter is cut now, by `recut` or by DeepSpeed."""
    if is_weighted(param):
        cut: Split = getattr(param, CUT_ATTRIBUTE)
        return cut
    return cut_as_deepspeed(param.ds_numel, dist.get_world_size(group=param.ds_process_group))


def owning_group(param: ZeroParameter) -> ProcessGroup:
    """Return the ranks that a parameter is cut for: those of this node with `Nodes`, else its ``ds_process_group``."""
    group: ProcessGroup = getattr(param, OWNERS_ATTRIBUTE, param.ds_process_group)
    return group
