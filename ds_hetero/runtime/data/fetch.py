"""What the ranks do together to get their next batches: one fetch, in one of three ways.

    SharedBatches    all ranks of a replica are given the same batch: one step
    OwnBatches       each rank is given a batch of its own: they are used in turn, one step each
    DividedBatches   replicas take different batches: all micro-batches of one optimizer step, as many on every rank

Every batch is placed as it is read, and cut for that placement. Then each fetch makes one small all_gather over the
whole job, by which every rank learns whether another has failed, whether a replica's ranks disagree, and whether one
replica has run out of batches while another has not. In all of these cases every rank raises the same error, and none
is left waiting.
"""

from __future__ import annotations

import json
import zlib
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, NoReturn

from ds_hetero.errors import BatchError
from ds_hetero.placement import Placer
from ds_hetero.plan import BatchSplit
from ds_hetero.runtime.collectives import all_gather_bytes, encode_failure, raise_failures
from ds_hetero.runtime.data.sampling import OwnSampler, OwnStream
from ds_hetero.runtime.data.shard_exchange import exchange_shards, manifest
from ds_hetero.runtime.data.shards import PlacedBatch, WholeBatch, filler_batch, place
from ds_hetero.runtime.replica import Replica

__all__ = ["DividedBatches", "Fetcher", "OwnBatches", "SharedBatches", "checksum"]

_OK, _ERROR = range(2)
_UNKNOWN = -1


@dataclass(frozen=True)
class _Report:
    """What one rank reports at the beginning of a fetch.

    Args:
        replica: id of its replica.
        batches: how many batches it has for the fetch.
        checksum: of those batches, where all ranks of the replica must hold the same.
        samples: checksum of the samples that all replicas together are to take; 0 if unknown.
        labels: labels that count in those batches; -1 if they have none.
    """

    replica: int
    batches: int
    checksum: int = 0
    samples: int = 0
    labels: int = 0


@dataclass(frozen=True)
class _Reports:
    """What all ranks have reported at the beginning of a fetch.

    Args:
        number: of the fetch in the epoch.
        by_rank: the reports.
        payloads: what `Fetcher._payload` gave, by rank.
    """

    number: int
    by_rank: Sequence[_Report]
    payloads: Sequence[bytes]

    def ranks_by_replica(self) -> dict[int, list[int]]:
        """Ranks of every replica."""
        ranks: dict[int, list[int]] = {}
        for rank, report in enumerate(self.by_rank):
            ranks.setdefault(report.replica, []).append(rank)
        return ranks

    def expect_as_many(self, counts: dict[int, int]) -> None:
        """Check that all replicas have equally many batches, ``counts`` by replica.

        Raises:
            BatchError: they have not.
        """
        if len(set(counts.values())) > 1:
            self.raise_uneven(counts)

    def raise_uneven(self, counts: dict[int, int]) -> NoReturn:
        """Raise and name the replicas that have run out of batches, ``counts`` by replica."""
        listed = ", ".join(f"replica {replica} has {count}" for replica, count in sorted(counts.items()))
        raise BatchError(
            f"the replicas run out of batches at different steps: for fetch {self.number} of the epoch, {listed}. "
            "Give every replica equally many, as a sampler with drop_last or even batches does."
        )


class Fetcher(ABC):
    """One way to get batches; made once per loader.

    Args:
        placer: decides who holds which positions of a batch.
    """

    batches_per_fetch = 1  # that this rank reads

    def __init__(self, placer: Placer) -> None:
        self._placer = placer

    def fetch(self, replica: Replica, batches: Iterator[WholeBatch], number: int) -> list[dict[str, Any]]:
        """This rank's shards of the next batches, one per step; none at the epoch's end.

        Args:
            replica: this rank's replica, with the schedule to cut for.
            batches: this rank's batches.
            number: of the fetch in the epoch.

        Caller: every rank of the world.

        Raises:
            BatchError, PeerError: see `ds_hetero.runtime.data.loader.ShardedLoader`; on every rank.
        """
        placed: list[PlacedBatch] = []
        error: Exception | None = None
        try:
            taken = islice(batches, self.batches_per_fetch)
            placed.extend(place(self._placer, replica.schedule, batch) for batch in taken)
        except Exception as raised:
            error = raised
        report = self._report(replica, placed, number) if error is None else _Report(replica.replica_id, 0)
        numbers = [_OK if error is None else _ERROR, *vars(report).values()]
        rows, payloads = all_gather_bytes(numbers, self._payload(placed) if error is None else encode_failure(error))
        failures = {rank: payloads[rank] for rank, row in enumerate(rows) if row[0] == _ERROR}
        raise_failures(failures, error, "the next batch could not be read")
        return self._shards(replica, placed, _Reports(number, [_Report(*row[1:]) for row in rows], payloads))

    @abstractmethod
    def _report(self, replica: Replica, placed: Sequence[PlacedBatch], number: int) -> _Report: ...

    def _payload(self, placed: Sequence[PlacedBatch]) -> bytes:
        return b""

    @abstractmethod
    def _shards(self, replica: Replica, placed: Sequence[PlacedBatch], reports: _Reports) -> list[dict[str, Any]]: ...

    def _expect_same_in_replicas(self, placed: Sequence[PlacedBatch], reports: _Reports) -> None:
        for ranks in reports.ranks_by_replica().values():
            if len({reports.by_rank[rank] for rank in ranks}) > 1:
                self._raise_difference(placed, ranks)

    def _raise_difference(self, placed: Sequence[PlacedBatch], ranks: Sequence[int]) -> NoReturn:
        """Show what differs between ``ranks``, once a checksum has shown all ranks that something does."""
        entries = {"batches": f"{len(placed)} of {self.batches_per_fetch}"}
        for i, (batch, _) in enumerate(placed):
            prefix = f"batch {i}: " if self.batches_per_fetch > 1 else ""
            entries |= {f"{prefix}{name}": text for name, text in batch.fingerprints().items()}
        if self.batches_per_fetch == 1:
            entries["epoch"] = "goes on" if entries.pop("batches").startswith("1") else "over"
        _, payloads = all_gather_bytes([], json.dumps(entries).encode())
        by_rank = [json.loads(payloads[rank]) for rank in ranks]
        names = sorted({name for entries in by_rank for name in entries})
        values = {name: [entries.get(name, "absent") for entries in by_rank] for name in names}
        different = "; ".join(f"{name} is {texts}" for name, texts in values.items() if len(set(texts)) > 1)
        raise BatchError(
            f"ranks {tuple(ranks)} of a replica must be given the same batch, but by rank {different}. "
            'Seed shuffling and collators alike on all of them, or pass batches="own" if each is to have its own.'
        )


class SharedBatches(Fetcher):
    """All ranks of a replica hold the same batch and each cuts its part out of it."""

    def _report(self, replica: Replica, placed: Sequence[PlacedBatch], number: int) -> _Report:
        return _Report(replica.replica_id, len(placed), checksum([batch for batch, _ in placed]))

    def _shards(self, replica: Replica, placed: Sequence[PlacedBatch], reports: _Reports) -> list[dict[str, Any]]:
        self._expect_same_in_replicas(placed, reports)
        reports.expect_as_many({report.replica: report.batches for report in reports.by_rank})
        return [batch.shard(replica.rank) for batch in placed]


class OwnBatches(Fetcher):
    """Each rank holds a batch of its own; all shards travel at once."""

    def _report(self, replica: Replica, placed: Sequence[PlacedBatch], number: int) -> _Report:
        return _Report(replica.replica_id, len(placed))

    def _payload(self, placed: Sequence[PlacedBatch]) -> bytes:
        return b"".join(manifest(batch) for batch, _ in placed)

    def _shards(self, replica: Replica, placed: Sequence[PlacedBatch], reports: _Reports) -> list[dict[str, Any]]:
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
        placer: decides who holds which positions of a batch.
        replica_id: of this rank's replica.
        split: the batches of all replicas.
        reader: what chooses this replica's samples; None where the caller has chosen them.
    """

    def __init__(
        self, placer: Placer, replica_id: int, split: BatchSplit, reader: OwnSampler | OwnStream | None
    ) -> None:
        super().__init__(placer)
        self._split, self._reader = split, reader
        self.batches_per_fetch = split.micro_batches[replica_id]
        self._filler: WholeBatch | None = None
        self._short_step: int | None = None

    def _report(self, replica: Replica, placed: Sequence[PlacedBatch], number: int) -> _Report:
        samples = self._reader.checksum(number) if self._reader is not None else 0
        labels = [batch.num_labels() for batch, _ in placed]
        counted = _UNKNOWN if None in labels else sum(count or 0 for count in labels)
        return _Report(replica.replica_id, len(placed), checksum([batch for batch, _ in placed]), samples, counted)

    def _shards(self, replica: Replica, placed: Sequence[PlacedBatch], reports: _Reports) -> list[dict[str, Any]]:
        if len({report.samples for report in reports.by_rank}) > 1:
            raise BatchError(
                f"the ranks do not draw the same samples: checksums of step {reports.number} by rank are "
                f"{[f'{report.samples:08x}' for report in reports.by_rank]}. Seed shuffling alike on all ranks."
            )
        self._expect_same_in_replicas(placed, reports)
        by_replica = {report.replica: report for report in reports.by_rank}
        if not any(report.batches for report in by_replica.values()):
            self._short_step = None
            return []
        self._expect_end_of_epoch_after_a_short_step(by_replica, reports)
        labels = [report.labels for report in by_replica.values()]
        num_items = None if _UNKNOWN in labels else sum(labels)
        fillers = [self._place_filler(replica, placed)] * (self._split.micro_steps - len(placed))
        return [
            *(batch.shard(replica.rank, num_items=num_items) for batch in placed),
            *(batch.shard(replica.rank, num_items=num_items, is_filler=True) for batch in fillers),
        ]

    def _expect_end_of_epoch_after_a_short_step(self, by_replica: dict[int, _Report], reports: _Reports) -> None:
        counts = {replica: report.batches for replica, report in by_replica.items()}
        if self._short_step is not None and reports.number > self._short_step:
            reports.raise_uneven(counts)
        is_short = any(counts[replica] < count for replica, count in enumerate(self._split.micro_batches))
        self._short_step = reports.number if is_short else None

    def _place_filler(self, replica: Replica, placed: Sequence[PlacedBatch]) -> PlacedBatch:
        """A filler with the entries of the last batch, as short as the schedule allows."""
        if placed:
            self._filler = filler_batch(placed[-1].batch, 1)
        fewest_tokens = sum(1 for group in replica.schedule.groups for weight in group.tokens if weight)
        return place(self._placer, replica.schedule, filler_batch(self._filler, fewest_tokens))


def checksum(batches: Sequence[WholeBatch]) -> int:
    """Of everything in the batches that two ranks can compare; 0 for none."""
    return zlib.crc32(json.dumps([batch.fingerprints() for batch in batches]).encode()) if batches else 0
