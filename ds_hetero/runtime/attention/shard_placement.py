"""Find the placement for which the shards of a batch were cut, even if a framework has lost the loader's mark.

The mark is a `ShardInfo`, which the loader attaches to ``position_ids``. A copy of that tensor does not have it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ds_hetero.errors import BatchError, ScheduleError
from ds_hetero.runtime.attention.local_batch import ABSENT, Header, LocalBatch
from ds_hetero.runtime.documents import (
    PositionRuns,
    documents_from_cu_seqlens,
    position_moments,
    rows_of,
)
from ds_hetero.values.placement import Placement, stream_placement
from ds_hetero.values.schedule import Schedule


@dataclass(frozen=True, kw_only=True, eq=False)
class KnownPlacement:
    """A placement by documents that the loader made, with the data by which its shards are recognized."""

    placement: Placement  # with the documents
    documents_from: str  # the entry of the batch that showed them
    position_runs: PositionRuns  # the position ids of the whole batch


def known_placement(
    schedules: Sequence[Schedule], recent: Sequence[KnownPlacement], headers: Sequence[Header]
) -> KnownPlacement | None:
    """Return the placement by documents for which the shards were cut; None if there is none.

    Marked shards name their placement. If a framework has lost the mark, the latest placement is returned whose shards
    have as many tokens as these, the same sum of position ids, and the same sum weighted by index, on every rank.

    Args:
        schedules: of the replica, now and before.
        recent: placements that the loader made, latest first.
    """
    marked = {header["placement"] for header in headers} - {ABSENT}
    tokens_by_rank = [header["tokens"] for header in headers]
    for known in recent:
        placement = known.placement
        if placement.schedule not in schedules or list(placement.rank_tokens) != tokens_by_rank:
            continue
        has_its_mark = marked == {placement.fingerprint}
        if has_its_mark or (not marked and _has_positions(placement, known.position_runs, headers)):
            return known
    return None


def expect_same_documents(known: KnownPlacement, local: LocalBatch) -> None:
    """Raise `BatchError` on every rank if a forward has other documents than the loader has placed."""
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
    schedules: Sequence[Schedule], marked_placement: Placement | None, headers: Sequence[Header], expects_plain: bool
) -> Placement:
    """Return the placement for which shards were cut, if they are not placed by documents.

    Marked shards name their placement. For shards without a mark, the stream placement is returned that fits their
    sizes and positions.

    Args:
        schedules: of the replica, now and before.
        marked_placement: placement in the mark of this rank's shard; None without a mark.
        expects_plain: shards without a mark must have the positions 0 .. L - 1, since the loader places batches with
            other positions by their documents.

    Raises:
        BatchError: no placement fits, or several do; the same on every rank.
    """
    tokens_by_rank = [header["tokens"] for header in headers]
    marks = {header["placement"] for header in headers}
    marked = marks - {ABSENT}
    if (
        marked_placement is not None
        and marks == {marked_placement.fingerprint}
        and (marked_placement.schedule in schedules)
    ):
        candidates = [marked_placement]
    else:
        candidates = _stream_placements(schedules, sum(tokens_by_rank), marked)
    if not candidates:
        raise BatchError(
            f"the shards were cut for the placement(s) {[f'{mark & 0xFFFFFFFF:08x}' for mark in sorted(marked)]}, "
            f"which are not one batch under a schedule that the replica has had "
            f"({[f'{schedule.fingerprint & 0xFFFFFFFF:08x}' for schedule in schedules]}). Draw a step's batches on "
            "every rank between the same two steps."
        )
    fitting = [placement for placement in candidates if list(placement.rank_tokens) == tokens_by_rank]
    if not fitting:
        raise BatchError(
            f"the shards of a batch of {sum(tokens_by_rank)} tokens have {tokens_by_rank} tokens by rank, the schedule "
            f"gives {list(candidates[0].rank_tokens)}. Shard each batch with ds_hetero's loader (handle.dataloader); "
            "a forward on whole batches belongs in model.eval()."
        )
    if expects_plain and not marked and not any(has_plain_positions(placement, headers) for placement in fitting):
        raise BatchError(
            "these shards do not belong to a recent batch that was placed by its documents, and their position_ids are "
            "not those of one sequence: pass position_ids on as ds_hetero's loader made them."
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
    """Return the stream placements of the schedules for a length.

    If ``marked`` has fingerprints of placements, only placements with these fingerprints are returned.

    Raises:
        BatchError: the sequence is too short for all schedules.
    """
    tried = [_try_stream_placement(schedule, length) for schedule in schedules]
    placements = [placement for placement in tried if isinstance(placement, Placement)]
    if not placements:
        raise BatchError(str(tried[0]))
    return [placement for placement in placements if marked <= {placement.fingerprint}]


def _try_stream_placement(schedule: Schedule, length: int) -> Placement | ScheduleError:
    """Return the stream placement of a schedule for a length, or the error that it raises."""
    try:
        return stream_placement(schedule, length)
    except ScheduleError as error:
        return error


def has_plain_positions(placement: Placement, headers: Sequence[Header]) -> bool:
    """Whether the position ids of all ranks are 0 .. length - 1.

    Positions that restart are never larger than these, so an equal sum proves that they are equal. The second moment
    distinguishes other numberings.
    """
    return _has_positions(placement, (((0, 0),),) * headers[0]["batch_size"], headers)


def _has_positions(placement: Placement, runs: PositionRuns, headers: Sequence[Header]) -> bool:
    """Whether the position ids of all ranks may be ``runs``: sums and weighted sums are equal in each shard."""
    if len(runs) != headers[0]["batch_size"]:
        return False
    return all(
        (header["position_sum"], header["position_moment"]) == position_moments(runs, placement.intervals(rank))
        for rank, header in zip(placement.schedule.ranks, headers, strict=True)
    )
