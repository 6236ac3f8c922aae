"""What all ranks of a replica must know of a batch before the first attention layer, agreed once per forward.

    placement   which positions each rank holds, as the loader made it; found again where a framework has lost it
    rows        documents of every batch row: attention acts inside a document, padding belongs to none

Documents come from one of three places: ``cu_seqlens``; a 2-D padding mask; ``position_ids`` that restart. As in
transformers, a padding mask that is given, even one without a zero, rules out a search for restarts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache

import torch
import torch.distributed as dist
from torch import Tensor

from ds_hetero.errors import BatchError, ScheduleError
from ds_hetero.placement import Placement, Rows, stream_placement
from ds_hetero.runtime.attention.documents import (
    Documents,
    documents_from_cu_seqlens,
    documents_from_mask,
    documents_from_positions,
    rows_of,
)
from ds_hetero.runtime.attention.ring_steps import Ring, make_rings
from ds_hetero.runtime.attention.ring_table import RingTable
from ds_hetero.runtime.collectives import message_device
from ds_hetero.runtime.peers.waiting import waiting_for_peers
from ds_hetero.runtime.replica import Replica
from ds_hetero.schedule import Schedule

__all__ = ["BatchLayout", "LocalBatch", "agree_on_batch", "batch_layout"]

_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
_HEADER = ("batch_size", "tokens", "dtype", "position_sum", "position_moment", "padding", "cu_seqlens", "placement")
_ABSENT = -1


@dataclass(frozen=True, kw_only=True, eq=False)
class BatchLayout:
    """The structure of one batch; the same on every rank of the replica.

    Args:
        placement: who holds what, with the documents of every row.
    """

    placement: Placement
    _rings: dict[tuple[int, bool, int | None], tuple[Ring, ...]] = field(default_factory=dict, repr=False)

    @property
    def batch_size(self) -> int:
        """Rows of the batch."""
        return self.placement.rows[-1].stop

    def rings(self, rank: int, causal: bool, window: int | None) -> tuple[Ring, ...]:
        """The part of ``rank`` in the ring of each of its lanes, for one kind of mask; made once and kept."""
        key = (rank, causal, window)
        if key not in self._rings:
            tables = [RingTable(self.placement, lane, causal, window) for lane in self.placement.lanes]
            self._rings[key] = make_rings(tables, rank)
        return self._rings[key]


@dataclass(frozen=True, kw_only=True, eq=False)
class LocalBatch:
    """What one rank sees of a batch.

    Args:
        batch_size: rows of the batch: B.
        tokens: tokens of one row that the rank holds: s.
        dtype: the dtype in which attention will run.
        position_ids: [B, s] or [1, s].
        attention_mask: [B, s]; non-zero where a token is real.
        cu_seqlens: [documents + 1] boundaries in the whole flattened sequence, the same on every rank; B must be 1.
        placement: for which the shard was cut, if that is known.
    """

    batch_size: int
    tokens: int
    dtype: torch.dtype
    position_ids: Tensor | None = None
    attention_mask: Tensor | None = None
    cu_seqlens: Tensor | None = None
    placement: Placement | None = None

    def header(self) -> list[int]:
        """What every rank tells the others, in the order of ``_HEADER``."""
        position_sum = position_moment = padding = boundaries = _ABSENT
        if self.position_ids is not None:
            positions = self.position_ids.to(torch.int64).expand(self.batch_size, -1)
            weights = torch.arange(1, self.batch_size * self.tokens + 1, device=positions.device)
            weights = weights.view(self.batch_size, self.tokens)
            position_sum, position_moment = torch.stack([positions.sum(), (positions * weights).sum()]).tolist()
        if self.attention_mask is not None:
            padding = int(self.attention_mask.eq(0).sum())
        if self.cu_seqlens is not None:
            boundaries = hash(tuple(self.cu_seqlens.tolist()))
        placement = _ABSENT if self.placement is None else self.placement.fingerprint
        dtype = _DTYPES.index(self.dtype)
        return [self.batch_size, self.tokens, dtype, position_sum, position_moment, padding, boundaries, placement]


def agree_on_batch(replica: Replica, local: LocalBatch, earlier: Sequence[Schedule] = ()) -> BatchLayout:
    """Exchange what the ranks see of the batch and derive the layout that all of them share.

    Args:
        replica: this rank's replica.
        local: what this rank sees of the batch.
        earlier: schedules that the replica had before, latest first; shards cut for them may still come. The layout
            is that of the schedule for which the shards were cut.

    Caller: every rank of the replica, once per sharded forward.
    Collectives: one all_gather of a fixed header; one more of [B, max s] integers if positions restart or a mask pads.

    Raises:
        BatchError: on every rank, when the shards do not form one batch, or its mask cannot be honoured.
    """
    headers = _gather_headers(replica, local)
    _check(replica, headers)
    placement = _placement_of_shards((replica.schedule, *earlier), local.placement, headers)
    return batch_layout(placement, rows_of(_documents(replica, placement, local, headers)))


@lru_cache(maxsize=64)
def batch_layout(placement: Placement, rows: tuple[Rows, ...]) -> BatchLayout:
    """The layout of these rows; batches of the same structure share one, and with it its ring tables."""
    return BatchLayout(placement=placement.with_rows(rows))


def _gather_headers(replica: Replica, local: LocalBatch) -> list[dict[str, int]]:
    header = torch.tensor(local.header(), dtype=torch.int64, device=message_device(replica.sp_group))
    return [dict(zip(_HEADER, row.tolist(), strict=True)) for row in _all_gather(replica, header)]


def _all_gather(replica: Replica, part: Tensor) -> list[Tensor]:
    parts = [torch.empty_like(part) for _ in replica.ranks]
    with waiting_for_peers("comparing the batch with the other ranks of its replica"):
        dist.all_gather(parts, part, group=replica.sp_group)
    return parts


def _check(replica: Replica, headers: list[dict[str, int]]) -> None:
    """Raise where the shards are not of one batch; every rank has seen the same headers and so does the same."""
    for name, show in (
        ("batch_size", int),
        ("dtype", lambda i: str(_DTYPES[i]).removeprefix("torch.")),
        ("cu_seqlens", lambda i: "absent" if i == _ABSENT else f"{i & 0xFFFF:04x}"),
    ):
        values = [show(header[name]) for header in headers]
        if len(set(values)) > 1:
            raise BatchError(
                f"the ranks of a replica must hold shards of one batch, but {name} by rank is {values} "
                f"(ranks {replica.ranks}). Shard each batch with ds_hetero's loader, or give every rank the same one."
            )
    for name in ("position_sum", "padding"):
        given = [header[name] != _ABSENT for header in headers]
        if len(set(given)) > 1:
            what = "position_ids" if name == "position_sum" else "attention_mask"
            raise BatchError(f"{what} must be given on all ranks or on none, but by rank it is {given}.")


def _placement_of_shards(
    schedules: Sequence[Schedule], own: Placement | None, headers: list[dict[str, int]]
) -> Placement:
    """The placement for which the shards were cut: the loader's, or one that fits their sizes and positions.

    Args:
        schedules: that the replica has and had, latest first.
        own: the placement that this rank's shard brought along.
        headers: of all ranks.
    """
    held = [header["tokens"] for header in headers]
    marked = {header["placement"] for header in headers} - {_ABSENT}
    if own is not None and marked == {own.fingerprint} and own.schedule in schedules:
        candidates = [own]
    else:
        candidates = _stream_placements(schedules, sum(held), marked)
    if not candidates:
        raise BatchError(
            f"the shards were cut for the placement(s) {[f'{mark & 0xFFFFFFFF:08x}' for mark in sorted(marked)]}, "
            f"which are not one batch under a schedule that the replica has had "
            f"({[f'{schedule.fingerprint & 0xFFFFFFFF:08x}' for schedule in schedules]}). Draw a step's batches on "
            "every rank between the same two steps."
        )
    fitting = [placement for placement in candidates if list(placement.rank_tokens) == held]
    if not fitting:
        raise BatchError(
            f"the shards of a batch of {sum(held)} tokens have {held} tokens by rank, the schedule gives "
            f"{list(candidates[0].rank_tokens)}. Shard each batch with ds_hetero's loader (handle.dataloader); "
            "a forward on whole batches belongs in model.eval()."
        )
    if len(fitting) > 1 and len({tuple(map(p.intervals, p.schedule.ranks)) for p in fitting}) > 1:
        fitting = [placement for placement in fitting if _plain(placement, headers)]
        if len(fitting) != 1:
            raise BatchError(
                "the schedule has changed, and these shards do not tell whether they were cut before or after that: "
                "pass position_ids on as ds_hetero's loader made them, not a copy."
            )
    return fitting[0]


def _stream_placements(schedules: Sequence[Schedule], length: int, marked: set[int]) -> list[Placement]:
    """Stream placements of those schedules that the sequence is long enough for; of them, only the marked one.

    Raises:
        BatchError: the sequence is too short for all of them.
    """
    tried = [_try_stream_placement(schedule, length) for schedule in schedules]
    placements = [placement for placement in tried if isinstance(placement, Placement)]
    if not placements:
        raise BatchError(str(tried[0]))
    return [placement for placement in placements if marked <= {placement.fingerprint}]


def _try_stream_placement(schedule: Schedule, length: int) -> Placement | ScheduleError:
    try:
        return stream_placement(schedule, length)
    except ScheduleError as error:
        return error


def _plain(placement: Placement, headers: list[dict[str, int]]) -> bool:
    """Whether the position ids of all ranks are 0 .. length - 1, judged by two moments of each shard.

    Positions that restart never exceed the plain ones, so an equal sum alone proves them equal; the second moment
    tells other numberings apart.
    """
    for rank, header in zip(placement.schedule.ranks, headers, strict=True):
        total = moment = 0
        tokens, batch_size = header["tokens"], header["batch_size"]
        index = 1
        for start, stop in placement.intervals(rank):
            count = stop - start
            first = count * (start + stop - 1) // 2
            total += first
            # sum over i < count of (start + i) (index + i), for the first row
            moment += index * first + start * (count * (count - 1) // 2) + (count - 1) * count * (2 * count - 1) // 6
            index += count
        rows = batch_size * (batch_size - 1) // 2
        if header["position_sum"] != total * batch_size:
            return False
        if header["position_moment"] != moment * batch_size + total * tokens * rows:
            return False
    return True


def _documents(
    replica: Replica, placement: Placement, local: LocalBatch, headers: list[dict[str, int]]
) -> Sequence[Documents]:
    """Documents of every batch row."""
    length = placement.length
    undivided = [((0, length),)] * local.batch_size
    if local.cu_seqlens is not None:
        return documents_from_cu_seqlens(local.cu_seqlens.tolist(), length, local.batch_size)
    if local.attention_mask is not None:
        if not any(header["padding"] for header in headers):
            return undivided
        masks = _gather_shards(replica, placement, local.attention_mask.ne(0).expand(local.batch_size, -1))
        return [documents_from_mask(row, mask) for row, mask in enumerate(masks)]
    if local.position_ids is None or _plain(placement, headers):
        return undivided
    positions = _gather_shards(replica, placement, local.position_ids.expand(local.batch_size, -1))
    return list(map(documents_from_positions, positions))


def _gather_shards(replica: Replica, placement: Placement, shard: Tensor) -> list[list[int]]:
    """Rows of a whole [B, length] integer tensor from the shards of all ranks."""
    widest = max(placement.rank_tokens)
    padded = torch.zeros(shard.shape[0], widest, dtype=torch.int64, device=message_device(replica.sp_group))
    padded[:, : shard.shape[1]] = shard
    gathered = padded.new_empty(shard.shape[0], placement.length)
    for part, rank in zip(_all_gather(replica, padded), replica.ranks, strict=True):
        at = 0
        for start, stop in placement.intervals(rank):
            gathered[:, start:stop] = part[:, at : at + stop - start]
            at += stop - start
    rows: list[list[int]] = gathered.tolist()
    return rows
