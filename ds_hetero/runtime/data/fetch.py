"""A fetch: all ranks get their next batches together. The three kinds of fetches are in `fetchers`.

Every batch is placed as it is read, and cut for that placement. Then each fetch makes one small all_gather over the
whole job, by which every rank learns whether another rank has failed, whether a replica's ranks disagree, and whether
one replica has run out of batches while another has not. In each of these cases every rank raises the same error, so
none is left waiting.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NoReturn

from ds_hetero.errors import SamplingError
from ds_hetero.runtime.collectives import all_gather_bytes, encode_failure, raise_failures
from ds_hetero.runtime.data.planning_ahead import PlanningAhead
from ds_hetero.runtime.data.shards import Entries, PlacedBatch
from ds_hetero.runtime.data.whole_batches import WholeBatches
from ds_hetero.runtime.peers.calls import Counts, expect_same_counts, own_calls
from ds_hetero.runtime.peers.watch import waiting_for_peers
from ds_hetero.runtime.replica import Replica
from ds_hetero.values.placement import Placer
from ds_hetero.values.plans import BatchSplit

_OK, _ERROR = range(2)


@dataclass(frozen=True)
class Progress:
    """Position in an epoch: number of fetches that were used completely, and steps used of the next fetch."""

    fetches: int = 0
    used: int = 0


@dataclass(frozen=True)
class FetchReport:
    """What one rank has read for a fetch; all ranks exchange these numbers."""

    replica: int
    batches: int  # number of batches that the rank has for the fetch
    checksum: int = 0  # of these batches, if all ranks of the replica must have the same; else 0
    samples: int = 0  # checksum of the samples that all replicas together take; 0 if unknown
    labels: int = 0  # number of labels that count in these batches; -1 for batches without labels


@dataclass(frozen=True)
class FetchReports:
    """The reports of all ranks on one fetch."""

    number: int  # of the fetch in the epoch
    by_rank: Sequence[FetchReport]
    payloads: Sequence[bytes]  # results of `Fetcher._payload`, by rank
    keeps_some: bool = False  # a rank keeps a full batch of the fetch, see `WholeBatches.take_kept_batches`

    def ranks_by_replica(self) -> dict[int, list[int]]:
        """Return the ranks of every replica, by the replica's id."""
        ranks: dict[int, list[int]] = {}
        for rank, report in enumerate(self.by_rank):
            ranks.setdefault(report.replica, []).append(rank)
        return ranks

    def expect_same_samples(self) -> None:
        """Raise `SamplingError` if ranks drew different samples for the step.

        Every replica takes its part of the samples of the whole job, so all ranks have to draw the same samples.
        """
        if len({report.samples for report in self.by_rank}) > 1:
            raise SamplingError(
                f"the ranks do not draw the same samples: checksums of step {self.number} by rank are "
                f"{[f'{report.samples:08x}' for report in self.by_rank]}. Seed shuffling alike on all ranks."
            )

    def expect_as_many(self, counts: dict[int, int]) -> None:
        """Refuse replicas with unequal ``counts`` of batches. Raises `SamplingError`."""
        if len(set(counts.values())) > 1:
            self.raise_uneven(counts)

    def raise_uneven(self, counts: dict[int, int]) -> NoReturn:
        """Raise a `SamplingError` that names the batches that each replica has left, ``counts`` by replica."""
        listed = ", ".join(f"replica {replica} has {count}" for replica, count in sorted(counts.items()))
        raise SamplingError(
            f"the replicas run out of batches at different steps: for fetch {self.number} of the epoch, {listed}. "
            "Give every replica equally many, as a sampler with drop_last or even batches does."
        )


class ShortStep:
    """Checks that only the last step of an epoch has fewer batches than the split demands.

    It is used if replicas take different batches; a step is then one fetch.
    """

    def __init__(self) -> None:
        self._number: int | None = None

    def expect_end_after(self, reports: FetchReports, split: BatchSplit) -> None:
        """Note whether a replica has fewer batches in this step than ``split`` gives it.

        Raises:
            SamplingError: that was so in the step before already, so that step was not the epoch's last one.
        """
        counts = {report.replica: report.batches for report in reports.by_rank}
        if self._number is not None and reports.number > self._number:
            reports.raise_uneven(counts)
        is_short = any(counts[replica] < count for replica, count in enumerate(split.micro_batches))
        self._number = reports.number if is_short else None

    def end_epoch(self) -> None:
        """Note that the epoch is over."""
        self._number = None


def exchange_reports(
    number: int, report: FetchReport, payload: bytes, error: Exception | None, keeps_some: bool = False
) -> FetchReports:
    """Exchange with all ranks the reports on a fetch, or the error with which reading has failed on a rank.

    Args:
        keeps_some: this rank has stored a whole batch, see `ds_hetero.runtime.data.whole_batches.BatchReading.keeps`.

    Caller: every rank of the world.
    Collectives: one `all_gather_bytes`.

    Raises:
        BatchError, StepError, PeerError: see `ds_hetero.runtime.data.loader.ShardedLoader`; on every rank.
    """
    status = _OK if error is None else _ERROR
    numbers = [status, int(keeps_some), *vars(report).values(), *own_calls.begin_fetch(number)]
    with waiting_for_peers("reading the next batch"):
        rows, payloads = all_gather_bytes(numbers, payload if error is None else encode_failure(error))
    failures = {rank: payloads[rank] for rank, row in enumerate(rows) if row[0] == _ERROR}
    raise_failures(failures, error, "the next batch could not be read")
    expect_same_counts([Counts(*row[-len(Counts._fields) :]) for row in rows])
    by_rank = [FetchReport(*row[2 : -len(Counts._fields)]) for row in rows]
    return FetchReports(number, by_rank, payloads, keeps_some=any(row[1] for row in rows))


class Fetcher(ABC):
    """One kind of fetch; made once per loader.

    Args:
        placer: decides which rank holds which positions of a batch.
    """

    mode: str  # one of `ds_hetero.runtime.data.batch_mode`, as users and saved states write it
    batches_per_fetch = 1  # number of batches that this rank reads for a fetch
    resumes_loader = True  # whether a resumed epoch uses the wrapped loader's own state, if it has one
    uses_in_turn = False  # whether a fetch has the batches of several ranks, so that a checkpoint may fall amid it

    def __init__(self, placer: Placer) -> None:
        self._placer = placer

    def fetch(self, replica: Replica, batches: PlanningAhead, number: int) -> list[Entries]:
        """Return this rank's shards of the next batches, one per step; none at the epoch's end.

        Caller: every rank of the world.

        Raises:
            BatchError, StepError, PeerError: see `ds_hetero.runtime.data.loader.ShardedLoader`; on every rank.
        """
        placed: list[PlacedBatch] = []
        error: Exception | None = None
        try:
            placed = batches.take(self.batches_per_fetch, replica.schedule)
        except Exception as raised:
            error = raised
        report = self._report(replica, placed, number) if error is None else FetchReport(replica.replica_id, 0)
        payload = self._payload(placed) if error is None else b""
        full_batches = batches.batches
        reports = exchange_reports(number, report, payload, error, full_batches.keeps_some)
        full_batches.keeps_on_a_rank = reports.keeps_some
        return self._shards(replica, placed, reports)

    @abstractmethod
    def num_steps(self, batches: WholeBatches, num_skipped: int) -> int:
        """Return the steps of an epoch of ``batches`` without the first ``num_skipped``.

        Raises:
            TypeError: the wrapped loader has no length.
        """

    @abstractmethod
    def progress_after(self, num_steps: int) -> Progress:
        """Return the progress in an epoch after ``num_steps`` steps."""

    def compatibility(self, replica: Replica) -> Entries:
        """Return settings that are saved with a loader's state; to load the state, they must still be the same."""
        return {"batches": self.mode}

    @abstractmethod
    def _report(self, replica: Replica, placed: Sequence[PlacedBatch], number: int) -> FetchReport:
        """Return this rank's report on the batches that it has read for fetch ``number``."""

    def _payload(self, placed: Sequence[PlacedBatch]) -> bytes:
        """Return bytes that all ranks get with the report: manifests of batches of this rank alone; else b""."""
        return b""

    @abstractmethod
    def _shards(self, replica: Replica, placed: Sequence[PlacedBatch], reports: FetchReports) -> list[Entries]:
        """Return this rank's shard for every step of the fetch. Raises on every rank if ``reports`` do not agree."""

    def _expect_same_in_replicas(self, placed: Sequence[PlacedBatch], reports: FetchReports) -> None:
        """Refuse ranks of one replica that hold different batches. Raises `SamplingError` on every rank."""
        for ranks in reports.ranks_by_replica().values():
            if len({reports.by_rank[rank] for rank in ranks}) > 1:
                self._raise_difference(placed, ranks)

    def _raise_difference(self, placed: Sequence[PlacedBatch], ranks: Sequence[int]) -> NoReturn:
        """Raise a `SamplingError` that names the entries in which the batches of ``ranks`` differ.

        Called on every rank of the world, once checksums have shown that something differs.
        """
        if self.batches_per_fetch == 1:
            entries = {"epoch": "goes on" if placed else "over"}
        else:
            entries = {"batches": f"{len(placed)} of {self.batches_per_fetch}"}
        for i, batch in enumerate(placed):
            prefix = f"batch {i}: " if self.batches_per_fetch > 1 else ""
            entries |= {f"{prefix}{name}": text for name, text in batch.fingerprints().items()}
        _, payloads = all_gather_bytes([], json.dumps(entries).encode())
        by_rank = [json.loads(payloads[rank]) for rank in ranks]
        names = sorted({name for entries in by_rank for name in entries})
        values = {name: [entries.get(name, "absent") for entries in by_rank] for name in names}
        different = "; ".join(f"{name} is {texts}" for name, texts in values.items() if len(set(texts)) > 1)
        raise SamplingError(
            f"ranks {tuple(ranks)} of a replica must be given the same batch, but by rank {different}. "
            "Seed shuffling and collators alike on all of them; under the HF Trainer and accelerate leave that to the "
            "loader of super().get_train_dataloader() or accelerator.prepare(loader). In a loop of your own where each "
            'rank is to have its own batch: handle.dataloader(loader, batches="own").'
        )
