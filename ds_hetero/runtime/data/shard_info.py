"""Information that has to arrive with a shard, on the only thing that every framework passes on: a tensor.

Frameworks take a batch apart and hand some of its tensors to the model, others to a loss, so the loader attaches a
`ShardInfo` to the shard's ``position_ids``. A copy of the tensor (``.to()``, a slice) does not have it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ds_hetero.runtime.documents import PositionRuns
from ds_hetero.values.placement import Placement

WHOLE_POSITIONS = "position_ids of whole sequences"  # the entry of a batch that `ShardInfo.whole_positions` was


@dataclass(frozen=True, kw_only=True, eq=False)
class ShardInfo:
    """Information of the loader on a shard."""

    placement: Placement  # for which the shard was cut; a rank may hold shards from before a change of schedule
    documents_from: str | None = None  # the entry that the placement's documents were read from, if any
    position_runs: PositionRuns = ()  # the position ids of the whole batch, where the documents are known
    num_items: int | None = None  # labels that count in the step, over all replicas; None if it is not known
    is_filler: bool = False  # the batch only fills the step up, see `ds_hetero.runtime.data.shards.filler_batch`
    labels: Tensor | None = None  # [B, s] labels of the shard, for a loss that is given no labels
    inputs_are_whole: bool = False  # entries beside ``position_ids`` and labels are those of whole sequences
    whole_positions: Tensor | None = None  # with these, the batch's own ``position_ids``; None if it had none
    first: int = 0  # with these, the position of the whole sequences at which the placement begins
    # Of entries as the loader made them, see `weighted_sums`.
    sums: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    number: int = 0  # of the batch among those that loaders have given to the model, from 1; 0 if it is of no loader


def loaded_sums(shard: Mapping[str, object]) -> dict[str, tuple[int, int]]:
    """Return sums of the places and labels of a shard, on the CPU, by name."""
    sums = {}
    for name in ("position_ids", "shift_labels"):
        tensor = shard.get(name)
        if isinstance(tensor, Tensor) and not tensor.is_floating_point():
            first, by_index = weighted_sums(tensor).tolist()
            sums[name] = (first, by_index)
    return sums


def weighted_sums(tensor: Tensor) -> Tensor:
    """[2] in int64: the sum of all numbers, and of all numbers times their index; on the device of ``tensor``."""
    flat = tensor.reshape(-1).long()
    return torch.stack([flat.sum(), (flat * torch.arange(len(flat), device=flat.device)).sum()])


def attach(tensor: Tensor, info: ShardInfo) -> Tensor:
    """Let ``info`` travel with ``tensor``; the same tensor, in place of what was attached to it before."""
    tensor.ds_hetero_shard = info  # type: ignore[attr-defined]
    return tensor


def shard_info(tensor: Tensor | None) -> ShardInfo | None:
    """Information that was attached to ``tensor``; None for a copy, for another's tensor and for None."""
    return getattr(tensor, "ds_hetero_shard", None)


def is_part(tensor: Tensor) -> bool:
    """Whether ``tensor`` belongs to a shard of sequences that other ranks hold parts of, too."""
    info = shard_info(tensor)
    return info is not None and info.placement.schedule.sp_size > 1


def is_placeholder(positions: Tensor) -> bool:
    """Whether the one column of a shard stands for none, on a rank without tokens."""
    return positions.shape[1] == 1 and bool(positions[0, 0] < 0)
