"""The three ways to get batches, and how the ranks agree on one.

SharedBatches    all ranks of a replica are given the same batch: one step
OwnBatches       each rank is given a batch of its own: they are used in turn, one step each
DividedBatches   replicas take different batches: all micro-batches of one optimizer step, as many on every rank
"""

from __future__ import annotations

import json
import logging
import zlib
from collections.abc import Sequence
from dataclasses import replace

from torch.utils.data import DataLoader

from ds_hetero.errors import HeteroError, PeerError
from ds_hetero.runtime.collectives import on_all_ranks
from ds_hetero.runtime.data.batch_mode import (
    DIVIDED,
    OWN,
    SHARED,
    LoaderReport,
    decide_batch_mode,
    describe_loader,
    expect_unsharded,
)
from ds_hetero.runtime.data.fetch import Fetcher, FetchReport, FetchReports, Progress, ShortStep
from ds_hetero.runtime.data.sampling import ReplicaSampler, ReplicaStream, steps_in_epoch
from ds_hetero.runtime.data.shard_exchange import exchange_shards, manifest
from ds_hetero.runtime.data.shards import Entries, PlacedBatch, WholeBatch, filler_batch, place
from ds_hetero.runtime.data.whole_batches import WholeBatches
from ds_hetero.runtime.peers.watch import waiting_for_peers
from ds_hetero.runtime.replica import Replica
from ds_hetero.values.placement import Placer
from ds_hetero.values.plans import BatchSplit

logger = logging.getLogger(__name__)

_UNKNOWN = -1


class SharedBatches(Fetcher):
    """All ranks of a replica hold the same batch and each cuts its part out of it."""

    mode = SHARED

    def num_steps(self, batches: WholeBatches, num_skipped: int) -> int:
        """See `Fetcher`; what is skipped is left out of the wrapped loader itself."""
        return len(batches.dataloader)

    def progress_after(self, num_steps: int) -> Progress:
        """See `Fetcher`."""
        return Progress(num_steps)

    def _report(self, replica: Replica, placed: Sequence[PlacedBatch], number: int) -> FetchReport:
        return FetchReport(replica.replica_id, len(placed), _checksum(placed))

    def _shards(self, replica: Replica, placed: Sequence[PlacedBatch], reports: FetchReports) -> list[Entries]:
        self._expect_same_in_replicas(placed, reports)
        reports.expect_as_many({report.replica: report.batches for report in reports.by_rank})
        return [batch.shard(replica.rank) for batch in placed]


class OwnBatches(Fetcher):
    """Each rank holds a batch of its own; all shards travel at once.

    Args:
        lengths: batches of an epoch on each rank of the replica; None where a loader does not know.
    """

    mode = OWN
    uses_in_turn = True

    def __init__(self, placer: Placer, lengths: Sequence[int | None]) -> None:
        super().__init__(placer)
        self._lengths = lengths

    def num_steps(self, batches: WholeBatches, num_skipped: int) -> int:
        """See `Fetcher`."""
        return sum(_known(self._lengths)) - num_skipped

    def progress_after(self, num_steps: int) -> Progress:
        """See `Fetcher`; a rank that has run out takes no part in a fetch."""
        fetches = 0
        while num_ranks := sum(length is None or length > fetches for length in self._lengths):
            if num_steps < num_ranks:
                return Progress(fetches, num_steps)
            num_steps, fetches = num_steps - num_ranks, fetches + 1
        return Progress(fetches)

    def compatibility(self, replica: Replica) -> Entries:
        """See `Fetcher`."""
        return {**super().compatibility(replica), "sp_size": replica.sp_size}

    def _report(self, replica: Replica, placed: Sequence[PlacedBatch], number: int) -> FetchReport:
        return FetchReport(replica.replica_id, len(placed))

    def _payload(self, placed: Sequence[PlacedBatch]) -> bytes:
        return b"".join(map(manifest, placed))

    def _shards(self, replica: Replica, placed: Sequence[PlacedBatch], reports: FetchReports) -> list[Entries]:
        ranks_by_replica = reports.ranks_by_replica()
        counts = {of: sum(reports.by_rank[rank].batches for rank in ranks) for of, ranks in ranks_by_replica.items()}
        reports.expect_as_many(counts)
        if not any(counts.values()):
            return []
        manifests = [reports.payloads[rank] for rank in replica.ranks]
        return exchange_shards(placed[0] if placed else None, manifests, replica, self._placer)


class DividedBatches(Fetcher):
    """Replicas take different batches; a fetch is an optimizer step of `BatchSplit.micro_steps` micro-batches.

    A replica that has fewer is given filler batches, in which no label counts, for the rest of the step.

    Args:
        reader: what chooses this replica's samples; None where the caller has chosen them.
        lengths: batches of an epoch on each replica; None where a loader does not know.
    """

    mode = DIVIDED
    resumes_loader = False

    def __init__(
        self,
        placer: Placer,
        replica_id: int,
        split: BatchSplit,
        reader: ReplicaSampler | ReplicaStream | None,
        lengths: Sequence[int | None],
    ) -> None:
        super().__init__(placer)
        self._split, self._reader, self._lengths = split, reader, lengths
        self.batches_per_fetch = split.micro_batches[replica_id]
        self._filler: WholeBatch | None = None
        self._short_step = ShortStep()

    def num_steps(self, batches: WholeBatches, num_skipped: int) -> int:
        """See `Fetcher`."""
        if self._reader is not None:
            optimizer_steps = steps_in_epoch(self._reader)
        else:
            counts = zip(_known(self._lengths), self._split.micro_batches, strict=True)
            optimizer_steps = max(-(-length // count) for length, count in counts)
        return optimizer_steps * self._split.micro_steps - num_skipped

    def progress_after(self, num_steps: int) -> Progress:
        """See `Fetcher`."""
        return Progress(*divmod(num_steps, self._split.micro_steps))

    def compatibility(self, replica: Replica) -> Entries:
        """See `Fetcher`."""
        return {**super().compatibility(replica), "global_batch": self._split.samples}

    def _report(self, replica: Replica, placed: Sequence[PlacedBatch], number: int) -> FetchReport:
        samples = self._reader.take_drawn(number).checksum if self._reader is not None else 0
        labels = [batch.num_labels() for batch, _ in placed]
        counted = _UNKNOWN if None in labels else sum(count or 0 for count in labels)
        return FetchReport(replica.replica_id, len(placed), _checksum(placed), samples, counted)

    def _shards(self, replica: Replica, placed: Sequence[PlacedBatch], reports: FetchReports) -> list[Entries]:
        reports.expect_same_samples()
        self._expect_same_in_replicas(placed, reports)
        by_replica = {report.replica: report for report in reports.by_rank}
        if not any(report.batches for report in by_replica.values()):
            self._short_step.end_epoch()
            return []
        self._short_step.expect_end_after(reports, self._split)
        labels = [report.labels for report in by_replica.values()]
        num_items = None if _UNKNOWN in labels else sum(labels)
        fillers = [self._place_filler(replica, placed)] * (self._split.micro_steps - len(placed))
        return [
            *(batch.shard(replica.rank, num_items=num_items) for batch in placed),
            *(batch.shard(replica.rank, num_items=num_items, is_filler=True) for batch in fillers),
        ]

    def _place_filler(self, replica: Replica, placed: Sequence[PlacedBatch]) -> PlacedBatch:
        """Return a filler with the entries of the last batch, as short as the schedule allows."""
        if placed:
            self._filler = filler_batch(placed[-1].batch, 1)
        fewest_tokens = sum(1 for group in replica.schedule.groups for weight in group.tokens if weight)
        return place(self._placer, replica.schedule, filler_batch(self._filler, fewest_tokens))


@waiting_for_peers("comparing the loaders of all ranks")
def make_fetcher(batches: WholeBatches, replica: Replica, placer: Placer, requested: str | None) -> Fetcher:
    """Agree with all ranks how their loaders hold batches. Raises `BatchError` on every rank: they differ.

    Args:
        batches: this rank's batches. Where the replicas take different ones, it is changed to read this replica's.
        requested: the mode that the user requested, if any.

    Caller: every rank of the world.
    Collectives: one `on_all_ranks` of a short description of the loader; another where first batches are compared.
    """
    report = describe_loader(batches.dataloader, batches.names, replica.replica_id, requested)
    reports = on_all_ranks(lambda: report)
    if replica.batch_split is not None:
        return _divide(batches, replica, placer, reports)
    mode, why = decide_batch_mode(reports)
    level = logging.INFO
    if mode is None:
        level = logging.WARNING
        reports = on_all_ranks(lambda: replace(report, first=_first_checksum(batches)))
        mode, why = decide_batch_mode(reports)
    assert mode is not None
    if replica.rank == 0:
        meaning = {SHARED: "all ranks of a replica are given the same batch", OWN: "each rank is given its own batch"}
        logger.log(level, 'batches="%s": %s; %s', mode, meaning[mode], why)
    if mode == SHARED:
        return SharedBatches(placer)
    return OwnBatches(placer, [r.length for r in reports if r.replica == replica.replica_id])


def _divide(batches: WholeBatches, replica: Replica, placer: Placer, reports: Sequence[LoaderReport]) -> DividedBatches:
    assert replica.batch_split is not None
    makes_batches = isinstance(batches.dataloader, DataLoader)
    expect_unsharded(reports, makes_batches)
    if batches.reader is None and makes_batches:
        batches.divide(replica.batch_split, replica.replica_id)
    lengths = {report.replica: report.length for report in reports}
    by_replica = [lengths[replica_id] for replica_id in sorted(lengths)]
    return DividedBatches(placer, replica.replica_id, replica.batch_split, batches.reader, by_replica)


def _first_checksum(batches: WholeBatches) -> str:
    try:
        first = batches.peek()
    except HeteroError:
        raise
    except Exception as error:
        raise PeerError(f"the first batch could not be read: {type(error).__name__}: {error}") from error
    return "" if first is None else f"{zlib.crc32(json.dumps(first.fingerprints()).encode()):08x}"


def _known(lengths: Sequence[int | None]) -> list[int]:
    if None in lengths:
        raise TypeError("the wrapped loader has no length")
    return [length or 0 for length in lengths]


def _checksum(placed: Sequence[PlacedBatch]) -> int:
    """Return a checksum of everything in the batches that two ranks can compare; 0 for none."""
    return zlib.crc32(json.dumps([batch.fingerprints() for batch in placed]).encode()) if placed else 0
