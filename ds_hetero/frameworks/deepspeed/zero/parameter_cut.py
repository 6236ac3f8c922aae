"""Read how a ZeRO-3 parameter is cut into shards, and which ranks own them.

`recut` stores a weighted cut as attributes of a parameter. Parameters without these attributes have DeepSpeed's cut.
"""

from __future__ import annotations

from deepspeed import comm as dist
from torch.distributed import ProcessGroup

from ds_hetero.frameworks.deepspeed.protocols import ZeroParameter
from ds_hetero.sharding.zero_partition import cut_as_deepspeed
from ds_hetero.values.splits import Split

CUT_ATTRIBUTE, OWNERS_ATTRIBUTE = "ds_hetero_cut", "ds_hetero_owners"


def is_weighted(param: ZeroParameter) -> bool:
    """Return whether `recut` has cut a parameter by weights; otherwise it has DeepSpeed's equal shards."""
    return hasattr(param, CUT_ATTRIBUTE)


def cut_of(param: ZeroParameter) -> Split:
    """Return the present cut of a ZeRO-3 parameter between its owners: the weighted cut, or else DeepSpeed's."""
    if is_weighted(param):
        cut: Split = getattr(param, CUT_ATTRIBUTE)
        return cut
    return cut_as_deepspeed(param.ds_numel, dist.get_world_size(group=param.ds_process_group))


def owning_group(param: ZeroParameter) -> ProcessGroup:
    """Return the group of ranks that own a parameter's shards.

    With ``"zero_within"`` these are the ranks of this node, else the parameter's ``ds_process_group``.
    """
    group: ProcessGroup = getattr(param, OWNERS_ATTRIBUTE, param.ds_process_group)
    return group
