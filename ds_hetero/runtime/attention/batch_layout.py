"""Layout of a batch, on which all ranks of a replica agree before the first attention layer, once per forward.

    placement   which positions each rank holds: the one that the loader has attached to ``position_ids``, or if a
                framework has copied that tensor, the one that fits the shards (`shard_placement`)
    rows        documents of every batch row: attention acts inside a document; padding belongs to none

A placement by documents has its rows. For other placements one of three arguments shows the documents, see
`ds_hetero.runtime.documents`: ``cu_seqlens``; a 2-D padding mask; ``position_ids`` that restart.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache

import torch
from torch import Tensor

from ds_hetero.batch.ring_steps import Ring, make_rings
from ds_hetero.batch.ring_table import RingTable
from ds_hetero.errors import BatchError
from ds_hetero.runtime.attention.local_batch import (
    ABSENT,
    Header,
    LocalBatch,
    all_gather_in_replica,
    expect_one_batch,
    expect_one_model,
    gather_headers,
)
from ds_hetero.runtime.attention.shard_placement import (
    KnownPlacement,
    expect_same_documents,
    has_plain_positions,
    known_placement,
    placement_of_shards,
)
from ds_hetero.runtime.backends import message_device
from ds_hetero.runtime.documents import (
    MASK,
    Documents,
    documents_from_cu_seqlens,
    documents_from_mask,
    documents_from_positions,
    rows_of,
)
from ds_hetero.runtime.replica import Replica, part_of_replica
from ds_hetero.values.placement import Placement, Rows
from ds_hetero.values.schedule import Schedule


@dataclass(frozen=True, kw_only=True, eq=False)
class BatchLayout:
    """Placement of one batch, and the rings of attention that follow from it; the same on every rank of the replica."""

    placement: Placement  # with the documents of every row
    _parts: dict[Replica, tuple[tuple[Replica, BatchLayout], ...]] = field(default_factory=dict, repr=False)
    _rings: dict[tuple[int, bool, int | None], tuple[Ring, ...]] = field(default_factory=dict, repr=False)

    @property
    def batch_size(self) -> int:
        """Rows of the batch."""
        return self.placement.rows[-1].stop

    def parts(self, replica: Replica) -> tuple[tuple[Replica, BatchLayout], ...]:
        """Return the parts of the placement, each with a replica of the groups that exchange heads in it; cached."""
        parts = self.placement.parts
        if len(parts) == 1 and parts[0].placement is self.placement:
            return ((replica, self),)
        if replica not in self._parts:
            placements = [part.placement for part in parts]
            self._parts[replica] = tuple(
                (part_of_replica(replica, placement.schedule), BatchLayout(placement=placement))
                for placement in placements
            )
        return self._parts[replica]

    def rings(self, rank: int, causal: bool, window: int | None) -> tuple[Ring, ...]:
        """Return the part of ``rank`` in the ring of each of its lanes, for one kind of mask; cached."""
        key = (rank, causal, window)
        if key not in self._rings:
            tables = [RingTable(self.placement, lane, causal, window) for lane in self.placement.lanes]
            self._rings[key] = make_rings(tables, rank)
        return self._rings[key]


def agree_on_batch(
    replica: Replica, local: LocalBatch, earlier: Sequence[Schedule] = (), recent: Sequence[KnownPlacement] = ()
) -> BatchLayout:
    """Compare the batch of all ranks of the replica, and return the layout on which they agree.

    Args:
        local: the batch on this rank.
        earlier: schedules that the replica had before, latest first. Shards that were cut for such a schedule may still
            come, and then get the layout of that schedule.
        recent: placements by documents that the loader made, latest first; the same on all ranks.

    Caller: every rank of the replica, once per sharded forward.
    Collectives: one all_gather of a fixed header; one more of [B, max s] integers if positions restart or a mask pads
        in a batch that was not placed by its documents.

    Raises:
        BatchError: the ranks have different batches, or no layout fits; on every rank.
    """
    headers = gather_headers(replica, local)
    expect_one_batch(replica, headers)
    expect_one_model(headers)
    schedules = (replica.schedule, *earlier)
    known = known_placement(schedules, recent, headers)
    if known is not None:
        return batch_layout(known.placement, _rows_of_known(replica, known, local, headers))
    # The loader places batches by their documents, so a shard without a mark can only be of one whole document.
    expects_plain = any(not known.placement.is_stream for known in recent)
    placement = placement_of_shards(schedules, local.placement, headers, expects_plain)
    return batch_layout(placement, rows_of(_documents(replica, placement, local, headers)))


def _rows_of_known(
    replica: Replica, known: KnownPlacement, local: LocalBatch, headers: Sequence[Header]
) -> tuple[Rows, ...]:
    """Return the documents of a batch whose placement the loader made.

    A stream placement allows any documents, so they are read from the forward's arguments. For a placement by documents
    they are the loader's, and the forward must agree. If the shards have lost their mark, the mask has to be compared
    as well, since batches with the same positions may have different masks.
    """
    placement, is_marked = known.placement, any(header["placement"] != ABSENT for header in headers)
    is_same_entry = local.documents_from == known.documents_from
    if placement.is_stream and not (is_marked and is_same_entry and local.cu_seqlens is None):
        return rows_of(_documents(replica, placement, local, headers))
    expect_same_documents(known, local)
    if not is_marked and known.documents_from == MASK:
        rows = rows_of(_documents(replica, placement, local, headers))
        if rows != placement.rows:
            raise BatchError(
                "these shards were cut for another batch with the same positions and another attention_mask: pass "
                "position_ids on as ds_hetero's loader made them, not a copy, or set "
                '"heterogeneity.placement" to "stream".'
            )
    return placement.rows


@lru_cache(maxsize=64)
def batch_layout(placement: Placement, rows: tuple[Rows, ...]) -> BatchLayout:
    """Return the layout of a placement with these documents; batches of the same structure share it and its rings."""
    return BatchLayout(placement=placement.with_rows(rows))


def _documents(
    replica: Replica, placement: Placement, local: LocalBatch, headers: Sequence[Header]
) -> Sequence[Documents]:
    """Return the documents of every batch row, from the forward's arguments.

    Collectives: one all_gather, if a mask pads or positions restart.
    """
    length = placement.length
    undivided = [((0, length),)] * local.batch_size
    if local.cu_seqlens is not None:
        return documents_from_cu_seqlens(local.cu_seqlens.tolist(), length, local.batch_size)
    if local.attention_mask is not None:
        if not any(header["padding"] for header in headers):
            return undivided  # the mask hides nothing on any rank, so it need not be gathered
        mask = local.attention_mask.ne(0).expand(local.batch_size, -1)
        return documents_from_mask(_gather_shards(replica, placement, mask).cpu())
    if local.position_ids is None or has_plain_positions(placement, headers):
        return undivided
    positions = local.position_ids.expand(local.batch_size, -1)
    return documents_from_positions(_gather_shards(replica, placement, positions).cpu())


def _gather_shards(replica: Replica, placement: Placement, shard: Tensor) -> Tensor:
    """All-gather a tensor of integers [B, s] along the sequence: [B, length]."""
    max_tokens = max(placement.rank_tokens)  # all_gather takes parts of one size
    padded = torch.zeros(shard.shape[0], max_tokens, dtype=torch.int64, device=message_device(replica.sp_group))
    padded[:, : shard.shape[1]] = shard
    gathered = padded.new_empty(shard.shape[0], placement.length)
    for part, rank in zip(all_gather_in_replica(replica, padded), replica.ranks, strict=True):
        next_token = 0  # a rank's tokens lie in the order of its intervals
        for start, stop in placement.intervals(rank):
            gathered[:, start:stop] = part[:, next_token : next_token + stop - start]
            next_token += stop - start
    return gathered
