"""Placement for which the shards of a batch were cut: the loader's, also where a framework has lost its mark."""

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
    """A placement by documents that the loader made, and what tells its shards from others."""

    placement: Placement  # with the documents
    documents_from: str  # the entry of the batch that they were read from
    position_runs: PositionRuns  # the position ids of the whole batch


def known_placement(
    schedules: Sequence[Schedule], recent: Sequence[KnownPlacement], headers: Sequence[Header]
) -> KnownPlacement | None:
    """Return the placement by documents for which the shards were cut; None if there is none.

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
    """Return the placement for which the shards were cut: the loader's, or one that fits their sizes and positions.

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
