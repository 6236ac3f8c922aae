"""What all ranks of a replica must know of a batch before the first attention layer, agreed once per forward.

    length, batch_size   of the whole sequence, not of this rank's shard
    rows                 documents of every batch row: attention acts inside a document, padding belongs to none

Documents come from one of three places: ``cu_seqlens``; a 2-D padding mask; ``position_ids`` that restart. As in
transformers, a padding mask that is given, even one without a zero, rules out a search for restarts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from itertools import groupby, pairwise

import torch
import torch.distributed as dist
from torch import Tensor

from ds_hetero.errors import BatchError, ScheduleError
from ds_hetero.runtime.attention.ring_table import RingTable, Rows
from ds_hetero.runtime.collectives import message_device, reporting_lost_peers
from ds_hetero.runtime.replica import Replica
from ds_hetero.schedule import Schedule

__all__ = ["BatchLayout", "agree_on_batch", "batch_layout"]

Documents = tuple[tuple[int, int], ...]

_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
_HEADER = ("batch_size", "tokens", "dtype", "position_sum", "position_moment", "padding", "cu_seqlens", "schedule")
_ABSENT = -1


@dataclass(frozen=True, kw_only=True, eq=False)
class BatchLayout:
    """The structure of one batch; the same on every rank of the replica.

    Args:
        schedule: the replica's schedule.
        length: tokens of the whole sequence.
        rows: batch rows with their documents, covering the batch in order.
    """

    schedule: Schedule
    length: int
    rows: tuple[Rows, ...]
    _tables: dict[tuple[bool, int | None], RingTable] = field(default_factory=dict, repr=False)

    @property
    def batch_size(self) -> int:
        """Rows of the batch."""
        return self.rows[-1].stop

    @cached_property
    def tokens(self) -> dict[int, int]:
        """Tokens of every rank."""
        return self.schedule.tokens(self.length)

    def ring_table(self, causal: bool, window: int | None) -> RingTable:
        """Blocks and transfers for one kind of mask; made once and kept."""
        key = (causal, window)
        if key not in self._tables:
            self._tables[key] = RingTable(self.schedule, self.length, self.rows, causal, window)
        return self._tables[key]


def agree_on_batch(
    replica: Replica,
    shape: Sequence[int],
    dtype: torch.dtype,
    device: torch.device,
    *,
    position_ids: Tensor | None = None,
    attention_mask: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    cut_for: int | None = None,
    earlier: Sequence[Schedule] = (),
) -> BatchLayout:
    """Exchange what this rank sees of the batch and derive the layout that all ranks share.

    Args:
        shape: (B, s) of this rank's shard.
        dtype: the dtype in which attention will run.
        device: where the shard lives.
        position_ids: [B, s] or [1, s], this rank's shard.
        attention_mask: [B, s], this rank's shard; non-zero where a token is real.
        cu_seqlens: [documents + 1] boundaries in the whole flattened sequence, the same on every rank; B must be 1.
        cut_for: fingerprint of the schedule for which the shard was cut, if it is known.
        earlier: schedules that the replica had before, latest first; shards cut for them may still come. The layout
            is that of the schedule for which the shards were cut.

    Caller: every rank of the replica, once per sharded forward.
    Collectives: one all_gather of a fixed header; one more of [B, max s] integers if positions restart or a mask pads.

    Raises:
        BatchError: on every rank, when the shards do not form one batch, or its mask cannot be honoured.
    """
    header = _header(shape, dtype, position_ids, attention_mask, cu_seqlens, cut_for)
    headers = _gather_headers(replica, header, device)
    _check(replica, headers)
    length = sum(header["tokens"] for header in headers)
    schedule = _schedule_of_shards((replica.schedule, *earlier), length, headers)
    batch_size = headers[0]["batch_size"]
    if cu_seqlens is not None:
        documents = _documents_from_cu_seqlens(cu_seqlens.tolist(), length, batch_size)
    elif attention_mask is not None:
        documents = [((0, length),)] * batch_size
        if any(header["padding"] for header in headers):
            whole = _gather_shards(replica, schedule, length, attention_mask.ne(0).expand(batch_size, -1), device)
            documents = [_documents_from_mask(row, mask) for row, mask in enumerate(whole)]
    elif position_ids is None or _plain(schedule, length, headers):
        documents = [((0, length),)] * batch_size
    else:
        whole = _gather_shards(replica, schedule, length, position_ids.expand(batch_size, -1), device)
        documents = [_documents_from_positions(row) for row in whole]
    return _layout(schedule, length, documents)


# --- the header ------------------------------------------------------------------------------------


def _header(
    shape: Sequence[int],
    dtype: torch.dtype,
    position_ids: Tensor | None,
    attention_mask: Tensor | None,
    cu_seqlens: Tensor | None,
    cut_for: int | None,
) -> list[int]:
    batch_size, tokens = shape
    position_sum = position_moment = padding = boundaries = _ABSENT
    if position_ids is not None:
        positions = position_ids.to(torch.int64).expand(batch_size, -1)
        weights = torch.arange(1, batch_size * tokens + 1, device=positions.device).view(batch_size, tokens)
        position_sum, position_moment = torch.stack([positions.sum(), (positions * weights).sum()]).tolist()
    if attention_mask is not None:
        padding = int(attention_mask.eq(0).sum())
    if cu_seqlens is not None:
        boundaries = hash(tuple(cu_seqlens.tolist()))
    schedule = _ABSENT if cut_for is None else cut_for
    return [batch_size, tokens, _DTYPES.index(dtype), position_sum, position_moment, padding, boundaries, schedule]


def _gather_headers(replica: Replica, header: list[int], device: torch.device) -> list[dict[str, int]]:
    mine = torch.tensor(header, dtype=torch.int64, device=message_device(replica.sp_group))
    return [dict(zip(_HEADER, row.tolist(), strict=True)) for row in _all_gather(replica, mine)]


def _all_gather(replica: Replica, mine: Tensor) -> list[Tensor]:
    parts = [torch.empty_like(mine) for _ in replica.ranks]
    with reporting_lost_peers("comparing the batch with the other ranks of its replica"):
        dist.all_gather(parts, mine, group=replica.sp_group)
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


def _schedule_of_shards(schedules: Sequence[Schedule], length: int, headers: list[dict[str, int]]) -> Schedule:
    """The one of ``schedules`` for which the shards were cut: as they say, or as their sizes and positions tell."""
    told = {header["schedule"] for header in headers} - {_ABSENT}
    known = [schedule for schedule in schedules if told <= {schedule.fingerprint}]
    if not known:
        raise BatchError(
            f"the shards were cut for the schedule(s) {sorted(f'{t & 0xFFFFFFFF:08x}' for t in told)}, the replica has "
            f"had {[f'{s.fingerprint & 0xFFFFFFFF:08x}' for s in schedules]}. Draw a step's batches on every rank "
            "between the same two steps."
        )
    held = [header["tokens"] for header in headers]
    fitting = [schedule for schedule in known if _tokens(schedule, length) == held]
    if not fitting:
        try:
            wanted = list(known[0].tokens(length).values())
        except ScheduleError as error:
            raise BatchError(str(error)) from None
        raise BatchError(
            f"the shards of a batch of {length} tokens have {held} tokens by rank, the schedule gives "
            f"{wanted}. Shard each batch with ds_hetero's loader (handle.dataloader); "
            "a forward on whole batches belongs in model.eval()."
        )
    cuts = {tuple(schedule.intervals(length, rank) for rank in schedule.ranks) for schedule in fitting}
    if len(cuts) > 1:
        fitting = [schedule for schedule in fitting if _plain(schedule, length, headers)]
        if len(fitting) != 1:
            raise BatchError(
                "the schedule has changed, and these shards do not tell whether they were cut before or after that: "
                "pass position_ids on as ds_hetero's loader made them, not a copy."
            )
    return fitting[0]


def _tokens(schedule: Schedule, length: int) -> list[int] | None:
    """By rank; None if the sequence is too short for the schedule."""
    try:
        return list(schedule.tokens(length).values())
    except ScheduleError:
        return None


def _plain(schedule: Schedule, length: int, headers: list[dict[str, int]]) -> bool:
    """Whether the position ids of all ranks are 0 .. length - 1, judged by two moments of each shard.

    Positions that restart never exceed the plain ones, so an equal sum alone proves them equal; the second moment
    tells other numberings apart.
    """
    for rank, header in zip(schedule.ranks, headers, strict=True):
        total = moment = 0
        tokens, batch_size = header["tokens"], header["batch_size"]
        index = 1
        for start, stop in schedule.intervals(length, rank):
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


# --- documents -------------------------------------------------------------------------------------


def _gather_shards(
    replica: Replica, schedule: Schedule, length: int, shard: Tensor, device: torch.device
) -> list[list[int]]:
    """Rows of a whole [B, length] integer tensor from the shards of all ranks."""
    tokens = schedule.tokens(length)
    widest = max(tokens.values())
    padded = torch.zeros(shard.shape[0], widest, dtype=torch.int64, device=message_device(replica.sp_group))
    padded[:, : shard.shape[1]] = shard
    whole = padded.new_empty(shard.shape[0], length)
    for part, rank in zip(_all_gather(replica, padded), replica.ranks, strict=True):
        at = 0
        for start, stop in schedule.intervals(length, rank):
            whole[:, start:stop] = part[:, at : at + stop - start]
            at += stop - start
    rows: list[list[int]] = whole.tolist()
    return rows


def _documents_from_positions(positions: Sequence[int]) -> Documents:
    starts = [p for p in range(len(positions)) if p == 0 or positions[p] != positions[p - 1] + 1]
    return tuple(zip(starts, [*starts[1:], len(positions)], strict=True))


def _documents_from_mask(row: int, mask: Sequence[int]) -> Documents:
    runs = [(real, len(list(run))) for real, run in groupby(mask)]
    if sum(1 for real, _ in runs if real) > 1:
        raise BatchError(
            f"attention_mask of batch row {row} has zeros between real tokens; only padding at the left or the right "
            "can be honoured. Pack documents with restarting position_ids instead."
        )
    at, documents = 0, []
    for real, count in runs:
        if real:
            documents.append((at, at + count))
        at += count
    return tuple(documents)


def _documents_from_cu_seqlens(boundaries: Sequence[int], length: int, batch_size: int) -> list[Documents]:
    if batch_size != 1 or boundaries[0] != 0 or boundaries[-1] != length or list(boundaries) != sorted(boundaries):
        raise BatchError(
            f"cu_seqlens must rise from 0 to the {length} tokens of a batch of one row, got {list(boundaries)[:8]} "
            f"with batch size {batch_size}."
        )
    return [tuple((a, b) for a, b in pairwise(boundaries) if a < b)]


def _layout(schedule: Schedule, length: int, documents: Sequence[Documents]) -> BatchLayout:
    rows = []
    for same, run in groupby(range(len(documents)), key=lambda row: documents[row]):
        members = list(run)
        rows.append(Rows(members[0], members[-1] + 1, same))
    return batch_layout(schedule, length, tuple(rows))


@lru_cache(maxsize=64)
def batch_layout(schedule: Schedule, length: int, rows: tuple[Rows, ...]) -> BatchLayout:
    """The layout of these rows; batches of the same structure share one, and with it its ring tables."""
    return BatchLayout(schedule=schedule, length=length, rows=rows)
