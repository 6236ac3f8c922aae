"""The three kinds of fetches, and how the ranks agree on one.

class                 what each rank reads                        what one fetch is
SharedBatchFetcher    the same batch as the ranks of its replica  one step
OwnBatchFetcher       a batch of its own                          one step for the batch of each rank, in turn
DividedBatchFetcher   other batches than ranks of other replicas  all micro-batches of an optimizer step
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

_NO_LABELS = -1  # number of labels in a report on batches that have none


class SharedBatchFetcher(Fetcher):
    """Fetches one batch that all ranks of a replica read; each rank cuts its part out of it."""

    mode = SHARED

    def num_steps(self, batches: WholeBatches, num_skipped: int) -> int:
        """Return the steps of an epoch; the wrapped loader itself leaves out the skipped ones."""
        return len(batches.dataloader)

    def progress_after(self, num_steps: int) -> Progress:
        """Return the progress in an epoch after ``num_steps`` steps."""
        return Progress(num_steps)

    def _report(self, replica: Replica, placed: Sequence[PlacedBatch], number: int) -> FetchReport:
        return FetchReport(replica.replica_id, len(placed), _checksum(placed))

    def _shards(self, replica: Replica, placed: Sequence[PlacedBatch], reports: FetchReports) -> list[Entries]:
        self._expect_same_in_replicas(placed, reports)
        reports.expect_as_many({report.replica: report.batches for report in reports.by_rank})
        return [batch.shard(replica.rank) for batch in placed]


class OwnBatchFetcher(Fetcher):
    """Fetches one batch of each rank; the shards of all these batches are exchanged at once.

    Args:
        lengths: batches of an epoch on each rank of the replica; None for a loader without a length.
    """

    mode = OWN
    uses_in_turn = True

    def __init__(self, placer: Placer, lengths: Sequence[int | None]) -> None:
        super().__init__(placer)
        self._lengths = lengths

    def num_steps(self, batches: WholeBatches, num_skipped: int) -> int:
        """Return the steps of an epoch without the first ``num_skipped``. Raises ``TypeError``: no length is known."""
        return sum(_expect_lengths(self._lengths)) - num_skipped

    def progress_after(self, num_steps: int) -> Progress:
        """Return the progress after ``num_steps`` steps; a rank whose batches have ended adds no step to a fetch.

        Example: with 3 batches on one rank and 1 on the other, the first fetch is two steps, the others one step each.
        After 3 steps, 2 fetches are used.
        """
        fetches = 0
        while num_ranks := sum(length is None or length > fetches for length in self._lengths):
            if num_steps < num_ranks:
                return Progress(fetches, num_steps)
            num_steps, fetches = num_steps - num_ranks, fetches + 1
        return Progress(fetches)

    def compatibility(self, replica: Replica) -> Entries:
        """Return the settings that a saved state needs unchanged."""
        return {**super().compatibility(replica), "sp_size": replica.sp_size}

    def _report(self, replica: Replica, placed: Sequence[PlacedBatch], number: int) -> FetchReport:
        return FetchReport(replica.replica_id, len(placed))

    def _payload(self, placed: Sequence[PlacedBatch]) -> bytes:
        return b"".join(map(manifest, placed))

    def _shards(self, replica: Replica, placed: Sequence[PlacedBatch], reports: FetchReports) -> list[Entries]:
        counts: dict[int, int] = {}
        for replica_id, ranks in reports.ranks_by_replica().items():
            counts[replica_id] = sum(reports.by_rank[rank].batches for rank in ranks)
        reports.expect_as_many(counts)
        if not any(counts.values()):
            return []
        manifests = [reports.payloads[rank] for rank in replica.ranks]
        return exchange_shards(placed[0] if placed else None, manifests, replica, self._placer)


class DividedBatchFetcher(Fetcher):
    """Fetches the `BatchSplit.micro_steps` micro-batches of an optimizer step; replicas take different ones.

    A replica that has fewer micro-batches gets filler batches, in which no label counts, for the rest of the step.

    Args:
        reader: chooses this replica's samples; None if the user's loader yields this replica's micro-batches.
        lengths: batches of an epoch on each replica; None for a loader without a length.
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
        """Return the steps of an epoch without the first ``num_skipped``. Raises ``TypeError``: no length is known."""
        if self._reader is not None:
            optimizer_steps = steps_in_epoch(self._reader)
        else:
            counts = zip(_expect_lengths(self._lengths), self._split.micro_batches, strict=True)
            optimizer_steps = max(-(-length // count) for length, count in counts)
        return optimizer_steps * self._split.micro_steps - num_skipped

    def progress_after(self, num_steps: int) -> Progress:
        """Return the progress in an epoch after ``num_steps`` steps."""
        return Progress(*divmod(num_steps, self._split.micro_steps))

    def compatibility(self, replica: Replica) -> Entries:
        """Return the settings that a saved state needs unchanged."""
        return {**super().compatibility(replica), "global_batch": self._split.samples}

    def _report(self, replica: Replica, placed: Sequence[PlacedBatch], number: int) -> FetchReport:
        samples = self._reader.take_drawn(number).checksum if self._reader is not None else 0
        labels = [batch.num_labels() for batch, _ in placed]
        num_labels = _NO_LABELS if None in labels else sum(count or 0 for count in labels)
        return FetchReport(replica.replica_id, len(placed), _checksum(placed), samples, num_labels)

    def _shards(self, replica: Replica, placed: Sequence[PlacedBatch], reports: FetchReports) -> list[Entries]:
        reports.expect_same_samples()
        self._expect_same_in_replicas(placed, reports)
        by_replica = {report.replica: report for report in reports.by_rank}
        if not any(report.batches for report in by_replica.values()):
            self._short_step.end_epoch()
            return []
        self._short_step.expect_end_after(reports, self._split)
        labels = [report.labels for report in by_replica.values()]
        num_items = None if _NO_LABELS in labels else sum(labels)
        fillers = [self._place_filler(replica, placed)] * (self._split.micro_steps - len(placed))
        return [
            *(batch.shard(replica.rank, num_items=num_items) for batch in placed),
            *(batch.shard(replica.rank, num_items=num_items, is_filler=True) for batch in fillers),
        ]

    def _place_filler(self, replica: Replica, placed: Sequence[PlacedBatch]) -> PlacedBatch:
        """Return a filler batch, placed: the entries of the last batch, and as few tokens as the schedule allows."""
        if placed:
            self._filler = filler_batch(placed[-1].batch, 1)
        # One token for every rank that takes tokens, so that no shard is empty.
        fewest_tokens = sum(1 for group in replica.schedule.groups for weight in group.tokens if weight)
        return place(self._placer, replica.schedule, filler_batch(self._filler, fewest_tokens))


@waiting_for_peers("comparing the loaders of all ranks")
def make_fetcher(batches: WholeBatches, replica: Replica, placer: Placer, requested: str | None) -> Fetcher:
    """Agree with all ranks on the kind of fetch, and make it.

    Args:
        batches: this rank's batches. If the replicas take different ones, it is changed to read this replica's.
        requested: the mode that the user requested, if any.

    Caller: every rank of the world.
    Collectives: one `on_all_ranks` of a short description of the loader; another if first batches are compared.

    Raises:
        BatchError: the loaders of the ranks contradict each other; on every rank.
    """
    report = describe_loader(batches.dataloader, batches.names, replica.replica_id, requested)
    reports = on_all_ranks(lambda: report)
    if replica.batch_split is not None:
        return _make_divided_batch_fetcher(batches, replica, placer, reports)
    mode, why = decide_batch_mode(reports)
    level = logging.INFO
    if mode is None:
        level = logging.WARNING  # the decision rests on two batches, which may be equal by chance
        reports = on_all_ranks(lambda: replace(report, first=_first_checksum(batches)))
        mode, why = decide_batch_mode(reports)
    assert mode is not None
    if replica.rank == 0:
        meaning = {SHARED: "all ranks of a replica are given the same batch", OWN: "each rank is given its own batch"}
        logger.log(level, 'batches="%s": %s; %s', mode, meaning[mode], why)
    if mode == SHARED:
        return SharedBatchFetcher(placer)
    return OwnBatchFetcher(placer, [r.length for r in reports if r.replica == replica.replica_id])


def _make_divided_batch_fetcher(
    batches: WholeBatches, replica: Replica, placer: Placer, reports: Sequence[LoaderReport]
) -> DividedBatchFetcher:
    """Make the fetcher for replicas that take different batches. Raises `BatchError`: the loaders are sharded."""
    assert replica.batch_split is not None
    makes_batches = isinstance(batches.dataloader, DataLoader)
    expect_unsharded(reports, makes_batches)
    # Any other iterable is expected to yield this replica's micro-batches already.
    if batches.reader is None and makes_batches:
        batches.divide(replica.batch_split, replica.replica_id)
    lengths = {report.replica: report.length for report in reports}
    by_replica = [lengths[replica_id] for replica_id in sorted(lengths)]
    return DividedBatchFetcher(placer, replica.replica_id, replica.batch_split, batches.reader, by_replica)


def _first_checksum(batches: WholeBatches) -> str:
    """Return a checksum of the loader's first batch; "" if there is none. Raises `PeerError`: reading it failed."""
    try:
        first = batches.peek()
    except HeteroError:
        raise
    except Exception as error:
        raise PeerError(f"the first batch could not be read: {type(error).__name__}: {error}") from error
    return "" if first is None else f"{zlib.crc32(json.dumps(first.fingerprints()).encode()):08x}"


def _expect_lengths(lengths: Sequence[int | None]) -> list[int]:
    """Return the lengths. Raises ``TypeError``, as ``len(loader)`` does: one of them is not known."""
    if None in lengths:
        raise TypeError("the wrapped loader has no length")
    return [length or 0 for length in lengths]


def _checksum(placed: Sequence[PlacedBatch]) -> int:
    """Return a checksum of the tensors and placements of batches; 0 without batches."""
    return zlib.crc32(json.dumps([batch.fingerprints() for batch in placed]).encode()) if placed else 0
