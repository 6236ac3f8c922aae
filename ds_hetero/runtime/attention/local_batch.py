"""A batch as one rank sees it, and the header by which the ranks of a replica compare it.

For which placement the shards of a batch were cut: the loader's, also where a framework has lost its mark.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from ds_hetero.errors import BatchError, ScheduleError
from ds_hetero.runtime.backends import message_device
from ds_hetero.runtime.documents import (
    BOUNDARIES,
    MASK,
    POSITIONS,
    PositionRuns,
    documents_from_cu_seqlens,
    position_moments,
    rows_of,
)
from ds_hetero.runtime.peers.watch import waiting_for_peers
from ds_hetero.runtime.replica import Replica
from ds_hetero.values.placement import Placement, stream_placement
from ds_hetero.values.schedule import Schedule

Header = Mapping[str, int]  # of one rank, by the names in `_HEADER`

_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
_HEADER = ("batch_size", "tokens", "dtype", "position_sum", "position_moment", "padding", "cu_seqlens", "placement")
ABSENT = -1


@dataclass(frozen=True, kw_only=True, eq=False)
class LocalBatch:
    """A batch as one rank sees it."""

    batch_size: int  # rows of the batch: B
    tokens: int  # tokens of one row that the rank holds: s
    dtype: torch.dtype  # the dtype in which attention will run
    position_ids: Tensor | None = None  # [B, s] or [1, s]
    attention_mask: Tensor | None = None  # [B, s]; non-zero where a token is real
    cu_seqlens: Tensor | None = None  # [documents + 1] boundaries in the flattened sequence, on every rank; B is 1
    placement: Placement | None = None  # for which the shard was cut, if that is known

    @property
    def documents_from(self) -> str:
        """Where the documents of the forward would be read from."""
        if self.cu_seqlens is not None:
            return BOUNDARIES
        return POSITIONS if self.attention_mask is None else MASK

    def header(self, device: torch.device) -> Tensor:
        """Numbers that every rank sends to the others, ``[8]`` in the order of ``_HEADER``.

        They are made where they are needed, so that no rank waits for its device before it reads those of all.
        """
        position_sum: Tensor | int = ABSENT
        position_moment: Tensor | int = ABSENT
        padding: Tensor | int = ABSENT
        boundaries: Tensor | int = ABSENT
        if self.position_ids is not None:
            positions = self.position_ids.to(torch.int64).expand(self.batch_size, -1)
            position_sum, position_moment = positions.sum(), _moment(positions)
        if self.attention_mask is not None:
            padding = self.attention_mask.eq(0).sum()
        if self.cu_seqlens is not None:  # not below 0, since they ascend from 0
            boundaries = _moment(self.cu_seqlens.to(torch.int64))
        placement = ABSENT if self.placement is None else self.placement.fingerprint
        dtype = _DTYPES.index(self.dtype)
        row = [self.batch_size, self.tokens, dtype, position_sum, position_moment, padding, boundaries, placement]
        return torch.stack([_scalar(number, device) for number in row])


def _moment(numbers: Tensor) -> Tensor:
    """Numbers weighted by 1, 2, ... and added up."""
    weights = torch.arange(1, numbers.numel() + 1, device=numbers.device)
    return (numbers * weights.view(numbers.shape)).sum()


def _scalar(number: Tensor | int, device: torch.device) -> Tensor:
    if isinstance(number, Tensor):
        return number.to(device)
    return torch.full((), number, dtype=torch.int64, device=device)  # filled there: nothing is copied from the host


def gather_headers(replica: Replica, local: LocalBatch) -> list[Header]:
    """The headers of all ranks of the replica; waits for a GPU, once in a forward. Collectives: one all_gather."""
    rows = all_gather_in_replica(replica, local.header(message_device(replica.sp_group)))
    return [dict(zip(_HEADER, row, strict=True)) for row in rows.tolist()]


def all_gather_in_replica(replica: Replica, part: Tensor) -> Tensor:
    """One tensor of every rank, all of the same shape, one behind the other; one all_gather over the replica."""
    parts = part.new_empty(len(replica.ranks), *part.shape)
    with waiting_for_peers("comparing the batch with the other ranks of its replica"):
        dist.all_gather(list(parts.unbind()), part, group=replica.sp_group)
    return parts


def expect_one_batch(replica: Replica, headers: Sequence[Header]) -> None:
    """Refuse, by equal headers on every rank, shards of several batches. Raises `BatchError`: how they differ."""
    for name, show in (
        ("batch_size", int),
        ("dtype", lambda i: str(_DTYPES[i]).removeprefix("torch.")),
        ("cu_seqlens", lambda i: "absent" if i == ABSENT else f"{i & 0xFFFF:04x}"),
    ):
        values = [show(header[name]) for header in headers]
        if len(set(values)) > 1:
            raise BatchError(
                f"the ranks of a replica must hold shards of one batch, but {name} by rank is {values} "
                f"(ranks {replica.ranks}). Shard each batch with ds_hetero's loader, or give every rank the same one."
            )
    for name in ("position_sum", "padding"):
        given = [header[name] != ABSENT for header in headers]
        if len(set(given)) > 1:
            what = "position_ids" if name == "position_sum" else "attention_mask"
            raise BatchError(f"{what} must be given on all ranks or on none, but by rank it is {given}.")


@dataclass(frozen=True, kw_only=True, eq=False)
class KnownPlacement:
    """A placement by documents that the loader made, and what tells its shards from others."""

    placement: Placement  # with the documents
    documents_from: str  # the entry of the batch that they were read from
    position_runs: PositionRuns  # the position ids of the whole batch


def known_placement(
    schedules: Sequence[Schedule], recent: Sequence[KnownPlacement], headers: Sequence[Header]
) -> KnownPlacement | None:
    """The placement by documents for which the shards were cut; None if there is none.

    It is the one that the shards name. Where a framework has lost the name, it is the latest whose shards have the
    same tokens, the same sum of position ids and the same weighted sum on every rank.
    """
    marked = {header["placement"] for header in headers} - {ABSENT}
    held = [header["tokens"] for header in headers]
    for known in recent:
        placement = known.placement
        if placement.schedule not in schedules or list(placement.rank_tokens) != held:
            continue
        if marked == {placement.fingerprint} or (
            not marked and _has_positions(placement, known.position_runs, headers)
        ):
            return known
    return None


def expect_same_documents(known: KnownPlacement, local: LocalBatch) -> None:
    """Refuse a forward that is given other documents than the loader placed; equal on every rank."""
    rows = known.placement.rows
    if local.documents_from == known.documents_from:
        if local.cu_seqlens is None:
            return
        length = known.placement.length
        if rows == rows_of(documents_from_cu_seqlens(local.cu_seqlens.tolist(), length, local.batch_size)):
            return
    raise BatchError(
        f"the loader placed a batch by the documents in its {known.documents_from}, but the model's forward is given "
        f"others, in {local.documents_from}. Pass every entry of the batch on to the model, or set "
        '"heterogeneity.placement" to "stream".'
    )


def placement_of_shards(
    schedules: Sequence[Schedule], own: Placement | None, headers: Sequence[Header], expects_plain: bool
) -> Placement:
    """The placement for which the shards were cut: the loader's, or one that fits their sizes and positions.

    Args:
        expects_plain: shards of unknown origin must have plain positions, since others are placed by documents.
    """
    held = [header["tokens"] for header in headers]
    marks = {header["placement"] for header in headers}
    marked = marks - {ABSENT}
    if own is not None and marks == {own.fingerprint} and own.schedule in schedules:
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
    if expects_plain and not marked and not any(has_plain_positions(placement, headers) for placement in fitting):
        raise BatchError(
            "these shards are of no batch that was placed by its documents lately, and their position_ids are not "
            "those of one sequence: pass position_ids on as ds_hetero's loader made them."
        )
    if len(fitting) > 1 and len({tuple(map(p.intervals, p.schedule.ranks)) for p in fitting}) > 1:
        fitting = [placement for placement in fitting if has_plain_positions(placement, headers)]
        if len(fitting) != 1:
            raise BatchError(
                "the schedule has changed, and these shards do not tell whether they were cut before or after that: "
                "pass position_ids on as ds_hetero's loader made them, not a copy."
            )
    return fitting[0]


def _stream_placements(schedules: Sequence[Schedule], length: int, marked: set[int]) -> list[Placement]:
    """Stream placements of schedules, marked alone, that the sequence suffices for. Raises `BatchError`: none."""
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


def has_plain_positions(placement: Placement, headers: Sequence[Header]) -> bool:
    """Whether the position ids of all ranks are 0 .. length - 1.

    Positions that restart never exceed the plain ones, so an equal sum alone proves them equal; the second moment
    tells other numberings apart.
    """
    return _has_positions(placement, (((0, 0),),) * headers[0]["batch_size"], headers)


def _has_positions(placement: Placement, runs: PositionRuns, headers: Sequence[Header]) -> bool:
    """Whether the position ids of all ranks are those of ``runs``, judged by two moments of each shard."""
    if len(runs) != headers[0]["batch_size"]:
        return False
    return all(
        (header["position_sum"], header["position_moment"]) == position_moments(runs, placement.intervals(rank))
        for rank, header in zip(placement.schedule.ranks, headers, strict=True)
    )
