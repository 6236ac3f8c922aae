"""One fetch, by which the ranks get their next batches together; its three ways are in `fetchers`.

Every batch is placed as it is read, and cut for that placement. Then each fetch makes one small all_gather over the
whole job, by which every rank learns whether another has failed, whether a replica's ranks disagree, and whether one
replica has run out of batches while another has not. In all of these cases every rank raises the same error, and none
is left waiting.

Reads the batches of the next fetch before the present ones are trained on, and places them in a thread meanwhile.

Reading stays in the caller's thread: it is the user's code, and may draw random numbers. Placing is a pure function of
a batch. What goes wrong in either is raised when the batch is due, where all ranks learn of it together.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice
from typing import NoReturn

from torch.utils.data import DataLoader

from ds_hetero.errors import SamplingError
from ds_hetero.runtime.collectives import all_gather_bytes, encode_failure, raise_failures
from ds_hetero.runtime.data.shards import Entries, PlacedBatch, WholeBatch, place
from ds_hetero.runtime.data.whole_batches import WholeBatches
from ds_hetero.runtime.peers.calls import Counts, expect_same_counts, own_calls
from ds_hetero.runtime.peers.watch import waiting_for_peers
from ds_hetero.runtime.replica import Replica
from ds_hetero.values.placement import Placer
from ds_hetero.values.plans import BatchSplit
from ds_hetero.values.schedule import Schedule

_OK, _ERROR = range(2)


@dataclass(frozen=True)
class Progress:
    """Progress in an epoch: fetches done, and steps used of the next."""

    fetches: int = 0
    used: int = 0


@dataclass(frozen=True)
class FetchReport:
    """Report of one rank at the beginning of a fetch."""

    replica: int
    batches: int  # how many batches it has for the fetch
    checksum: int = 0  # of those batches, where all ranks of the replica must hold the same
    samples: int = 0  # checksum of the samples that all replicas together are to take; 0 if unknown
    labels: int = 0  # that count in its batches, or samples of a model that is not split; -1 without


@dataclass(frozen=True)
class FetchReports:
    """Reports of all ranks at the beginning of a fetch."""

    number: int  # of the fetch in the epoch
    by_rank: Sequence[FetchReport]
    payloads: Sequence[bytes]  # what `Fetcher._payload` gave, by rank
    keeps_some: bool = False  # a rank keeps a batch of the fetch whole, see `WholeBatches.take_kept`

    def ranks_by_replica(self) -> dict[int, list[int]]:
        """Return ranks of every replica."""
        ranks: dict[int, list[int]] = {}
        for rank, report in enumerate(self.by_rank):
            ranks.setdefault(report.replica, []).append(rank)
        return ranks

    def expect_same_samples(self) -> None:
        """Refuse ranks that drew other samples; every replica takes its own of the same. Raises `SamplingError`."""
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
        """Raise and name the replicas that have run out of batches, ``counts`` by replica."""
        listed = ", ".join(f"replica {replica} has {count}" for replica, count in sorted(counts.items()))
        raise SamplingError(
            f"the replicas run out of batches at different steps: for fetch {self.number} of the epoch, {listed}. "
            "Give every replica equally many, as a sampler with drop_last or even batches does."
        )


class ShortStep:
    """A step with fewer batches than the split says, where replicas take different ones: an epoch's last."""

    def __init__(self) -> None:
        self._number: int | None = None

    def expect_end_after(self, reports: FetchReports, split: BatchSplit) -> None:
        """Take the reports of a step with batches into account. Raises `BatchError`: a short step came before."""
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
    """Tell all ranks what this rank has read for a fetch, or that it could not.

    Args:
        keeps_some: this rank keeps a batch of the fetch whole.

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
    """One way to get batches; made once per loader. ``placer``: decides who holds which positions of a batch."""

    mode: str  # as users and saved states write it
    batches_per_fetch = 1  # that this rank reads
    resumes_loader = True  # by the wrapped loader's own state, if it has one
    uses_in_turn = False  # a fetch gives the batches of several ranks, so that an epoch may be left amid a fetch

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
        whole = batches.batches
        reports = exchange_reports(number, report, payload, error, whole.keeps_some)
        whole.keeps_on_a_rank = reports.keeps_some
        return self._shards(replica, placed, reports)

    @abstractmethod
    def num_steps(self, batches: WholeBatches, num_skipped: int) -> int:
        """Steps of an epoch of ``batches`` without the first ``num_skipped``. Raises ``TypeError``: no length."""

    @abstractmethod
    def progress_after(self, num_steps: int) -> Progress:
        """Return the progress in an epoch after ``num_steps`` steps."""

    def compatibility(self, replica: Replica) -> Entries:
        """Settings that must be the same for a saved state to be of use."""
        return {"batches": self.mode}

    @abstractmethod
    def _report(self, replica: Replica, placed: Sequence[PlacedBatch], number: int) -> FetchReport: ...

    def _payload(self, placed: Sequence[PlacedBatch]) -> bytes:
        return b""

    @abstractmethod
    def _shards(self, replica: Replica, placed: Sequence[PlacedBatch], reports: FetchReports) -> list[Entries]: ...

    def _expect_same_in_replicas(self, placed: Sequence[PlacedBatch], reports: FetchReports) -> None:
        for ranks in reports.ranks_by_replica().values():
            if len({reports.by_rank[rank] for rank in ranks}) > 1:
                self._raise_difference(placed, ranks)

    def _raise_difference(self, placed: Sequence[PlacedBatch], ranks: Sequence[int]) -> NoReturn:
        """Show what differs between ``ranks``, once a checksum has shown all ranks that something does."""
        entries = {"batches": f"{len(placed)} of {self.batches_per_fetch}"}
        for i, batch in enumerate(placed):
            prefix = f"batch {i}: " if self.batches_per_fetch > 1 else ""
            entries |= {f"{prefix}{name}": text for name, text in batch.fingerprints().items()}
        if self.batches_per_fetch == 1:
            entries["epoch"] = "goes on" if entries.pop("batches").startswith("1") else "over"
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


PlacerOfNow = Callable[[], Placer]


@dataclass(frozen=True)
class _Prepared:
    """The batches of one fetch, and who places them for which schedule; or why they could not be read."""

    batches: list[WholeBatch]
    placer: Placer
    schedule: Schedule
    placed: Future[list[PlacedBatch]] | None
    error: Exception | None = None


class PlanningAhead:
    """The placed batches of one epoch, those of at most one fetch ahead.

    Args:
        placer: gives what places a batch that is drawn now; every rank of a replica changes it between the same steps.
    """

    def __init__(self, batches: WholeBatches, epoch: Iterator[WholeBatch], placer: PlacerOfNow) -> None:
        self.batches, self._epoch, self._placer = batches, epoch, placer
        self._prepared: _Prepared | None = None

    def take(self, count: int, schedule: Schedule) -> list[PlacedBatch]:
        """Return the next ``count`` batches, fewer at the end; placed anew where the schedule changed."""
        placer, prepared = self._placer(), self._prepared
        self._prepared = None
        if prepared is None:
            return [place(placer, schedule, batch) for batch in islice(self._epoch, count)]
        self.batches.come_up()
        if prepared.error is not None:
            raise prepared.error
        if prepared.placed is not None and prepared.placer is placer and prepared.schedule == schedule:
            return prepared.placed.result()
        return [place(placer, schedule, batch) for batch in prepared.batches]

    def prepare(self, count: int, schedule: Schedule) -> None:
        """Read what the next `take` returns, and begin to place it; nothing for a loader that might not like it.

        A loader of torch reads ahead by itself where it has workers. Any other iterable may make its next batch of
        what the model has learned by then, so that it is not asked before its time.
        """
        if not isinstance(self.batches.dataloader, DataLoader) or self.batches.is_at_end:
            return
        placer = self._placer()
        with self.batches.running_ahead():
            try:
                taken = list(islice(self._epoch, count))
            except Exception as error:
                self._prepared = _Prepared([], placer, schedule, None, error)
                return
        placed = _thread.submit(lambda: [place(placer, schedule, batch) for batch in taken]) if taken else None
        self._prepared = _Prepared(taken, placer, schedule, placed)


_thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="ds_hetero.planning")
