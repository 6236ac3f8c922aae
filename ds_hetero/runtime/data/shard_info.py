"""Information about a shard, attached to its ``position_ids`` tensor by the loader.

Frameworks take a batch apart, pass some tensors to the model and others to a loss, and drop objects that are no
tensors. So the loader attaches a `ShardInfo` to ``position_ids``. A copy of the tensor (``.to()``, a slice) does not
have it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ds_hetero.runtime.documents import PositionRuns
from ds_hetero.values.placement import Placement, Range

WHOLE_POSITIONS = "position_ids of whole sequences"  # name of the batch entry that becomes `ShardInfo.whole_positions`


@dataclass(frozen=True, kw_only=True, eq=False)
class ShardInfo:
    """The loader's information about a shard.

    Attributes:
        placement: for which the shard was cut; a rank may hold shards from before a change of schedule.
        documents_from: name of the batch entry that shows the placement's documents, if any.
        position_runs: position ids of the full batch, if its documents are known.
        num_items: labels that count in the step, over all replicas; None if not known.
        is_filler: the batch is a filler, see `ds_hetero.runtime.data.shards.filler_batch`.
        labels: [B, s] labels of the shard, for a loss that is called without labels.
        inputs_are_whole: all entries except ``position_ids`` and labels belong to whole sequences.
        whole_positions: with whole inputs, the batch's own ``position_ids``; None if it had none.
        first: with whole inputs, the position in the whole sequences at which the placement begins.
        sums: `weighted_sums` of entries as the loader made them, by name.
        number: index, from 1, of the batch among the batches of all loaders of the model; 0 without a loader.
    """

    placement: Placement
    documents_from: str | None = None
    position_runs: PositionRuns = ()
    num_items: int | None = None
    is_filler: bool = False
    labels: Tensor | None = None
    inputs_are_whole: bool = False
    whole_positions: Tensor | None = None
    first: int = 0
    sums: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    number: int = 0


def loaded_sums(shard: Mapping[str, object]) -> dict[str, tuple[int, int]]:
    """Return `weighted_sums` of the ``position_ids`` and ``shift_labels`` of a shard on the CPU, by name."""
    sums = {}
    for name in ("position_ids", "shift_labels"):
        tensor = shard.get(name)
        if isinstance(tensor, Tensor) and not tensor.is_floating_point():
            first, by_index = weighted_sums(tensor).tolist()
            sums[name] = (first, by_index)
    return sums


def weighted_sums(tensor: Tensor) -> Tensor:
    """Return two sums as int64 [2] on the tensor's device: of its numbers, and of its numbers times their index."""
    flat = tensor.reshape(-1).long()
    return torch.stack([flat.sum(), (flat * torch.arange(len(flat), device=flat.device)).sum()])


def attach(tensor: Tensor, info: ShardInfo) -> Tensor:
    """Attach ``info`` to ``tensor``, in place of any information attached before, and return the same tensor."""
    tensor.ds_hetero_shard = info  # type: ignore[attr-defined]
    return tensor


def shard_info(tensor: Tensor | None) -> ShardInfo | None:
    """Return the information attached to ``tensor``; None for a copy, any other tensor, and None."""
    return getattr(tensor, "ds_hetero_shard", None)


def is_part(tensor: Tensor) -> bool:
    """Whether ``tensor`` belongs to a shard of sequences that are split over several ranks."""
    info = shard_info(tensor)
    return info is not None and info.placement.schedule.sp_size > 1


def may_be_one_document(positions: Tensor | None, rank: int) -> bool:
    """Whether the shard of ``rank`` consists of one whole document of the batch; True as well if that is not known.

    Args:
        positions: ``position_ids`` of the shard; None if they are not known.
    """
    info = shard_info(positions)
    if info is None or info.labels is None:
        return True
    if len(info.labels) > 1:  # [B, s]: a rank holds a part of every row
        return False
    placement = info.placement
    documents = placement.rows[0].documents if placement.rows else ((0, placement.length),)
    documents_of_rank = [document for document in documents if _num_held(document, placement, rank)]
    if len(documents_of_rank) != 1:
        return False
    start, stop = documents_of_rank[0]
    return _num_held((start, stop), placement, rank) == stop - start


def _num_held(document: Range, placement: Placement, rank: int) -> int:
    """Return the tokens of a document that a rank holds."""
    start, stop = document
    return sum(max(min(stop, end) - max(start, begin), 0) for begin, end in placement.intervals(rank))


def is_placeholder(positions: Tensor) -> bool:
    """Whether a shard is the placeholder of a rank without tokens: one column with a negative position id."""
    return positions.shape[1] == 1 and bool(positions[0, 0] < 0)
