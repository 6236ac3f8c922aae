"""What the ranks do together to get their next batches: one round, in one of three ways.

    Same    all ranks of a replica are given the same batch: one step
    Own     each rank is given a batch of its own: they are used in turn, one step each
    Dealt   replicas take different batches: all micro-batches of one optimizer step, as many on every rank

Each round begins with one small all_gather over the whole job, by which every rank learns whether another has failed,
whether a replica's ranks disagree, and whether one replica has run out of batches while another has not. In all of
these cases every rank raises the same error, and none is left waiting.
"""

from __future__ import annotations

import json
import zlib
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, NoReturn

import torch

from ds_hetero.errors import BatchError
from ds_hetero.plan import BatchSplit
from ds_hetero.runtime.collectives import all_gather_bytes, encode_failure, raise_failures
from ds_hetero.runtime.data.sampling import OwnSampler, OwnStream
from ds_hetero.runtime.data.shard_exchange import exchange_shards, manifest
from ds_hetero.runtime.data.shards import WholeBatch, mark_schedule, mark_step, without_weight
from ds_hetero.runtime.replica import Replica

__all__ = ["Dealt", "Own", "Round", "Same", "checksum"]

_OK, _ERROR = range(2)


@dataclass(frozen=True)
class _Said:
    """What one rank says at the beginning of a round.

    Args:
        replica: id of its replica.
        batches: how many batches it has for the round.
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
class _Heard:
    """What all ranks have said at the beginning of a round.

    Args:
        number: of the round in the epoch.
        said: by rank.
        payloads: what `Round._payload` gave, by rank.
    """

    number: int
    said: Sequence[_Said]
    payloads: Sequence[bytes]

    def by_replica(self) -> dict[int, list[int]]:
        """Ranks of every replica."""
        ranks: dict[int, list[int]] = {}
        for rank, said in enumerate(self.said):
            ranks.setdefault(said.replica, []).append(rank)
        return ranks

    def expect_as_many(self, counts: dict[int, int]) -> None:
        """All replicas have equally many batches, ``counts`` by replica.

        Raises:
            BatchError: they have not.
        """
        if len(set(counts.values())) > 1:
            self.raise_uneven(counts)

    def raise_uneven(self, counts: dict[int, int]) -> NoReturn:
        """Tell which replicas have run out of batches, ``counts`` by replica."""
        listed = ", ".join(f"replica {replica} has {count}" for replica, count in sorted(counts.items()))
        raise BatchError(
            f"the replicas run out of batches at different steps: for round {self.number} of the epoch, {listed}. "
            "Give every replica equally many, as a sampler with drop_last or even batches does."
        )


class Round(ABC):
    """One way to get batches; made once per loader.

    Args:
        device: where the process groups want their tensors.
    """

    batches_per_round = 1  # that this rank reads

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def fetch(self, replica: Replica, whole: Iterator[WholeBatch], number: int) -> list[dict[str, Any]]:
        """This rank's shards of the next round, one per step; none at the epoch's end.

        Args:
            replica: this rank's replica, with the schedule to cut for.
            whole: this rank's batches.
            number: of the round in the epoch.

        Caller: every rank of the world.

        Raises:
            BatchError, PeerError: see `ds_hetero.runtime.data.loader.ShardedLoader`; on every rank.
        """
        batches: list[WholeBatch] = []
        mine: Exception | None = None
        try:
            batches += islice(whole, self.batches_per_round)
        except Exception as error:
            mine = error
        said = _Said(replica.replica_id, 0) if mine else self._say(replica, batches, number)
        numbers = [_ERROR if mine else _OK, *vars(said).values()]
        payload = encode_failure(mine) if mine else self._payload(batches)
        rows, payloads = all_gather_bytes(numbers, payload)
        failures = {rank: payloads[rank] for rank, row in enumerate(rows) if row[0] == _ERROR}
        raise_failures(failures, mine, "the next batch could not be read")
        shards = self._shards(replica, batches, _Heard(number, [_Said(*row[1:]) for row in rows], payloads))
        for shard in shards:
            mark_schedule(shard["position_ids"], replica.schedule.fingerprint)
        return shards

    @abstractmethod
    def _say(self, replica: Replica, batches: Sequence[WholeBatch], number: int) -> _Said: ...

    def _payload(self, batches: Sequence[WholeBatch]) -> bytes:
        return b""

    @abstractmethod
    def _shards(self, replica: Replica, batches: Sequence[WholeBatch], heard: _Heard) -> list[dict[str, Any]]: ...

    def _expect_same_in_replicas(self, batches: Sequence[WholeBatch], heard: _Heard) -> None:
        for ranks in heard.by_replica().values():
            if len({heard.said[rank] for rank in ranks}) > 1:
                self._raise_difference(batches, ranks)

    def _raise_difference(self, batches: Sequence[WholeBatch], ranks: Sequence[int]) -> NoReturn:
        """Show what differs between ``ranks``, once a checksum has told all ranks that something does."""
        mine = {"batches": f"{len(batches)} of {self.batches_per_round}"}
        for i, batch in enumerate(batches):
            prefix = f"batch {i}: " if self.batches_per_round > 1 else ""
            mine |= {f"{prefix}{name}": text for name, text in batch.fingerprints().items()}
        if self.batches_per_round == 1:
            mine["epoch"] = "goes on" if mine.pop("batches").startswith("1") else "over"
        _, payloads = all_gather_bytes([], json.dumps(mine).encode())
        seen = [json.loads(payloads[rank]) for rank in ranks]
        names = sorted({name for entries in seen for name in entries})
        by_rank = {name: [entries.get(name, "absent") for entries in seen] for name in names}
        different = "; ".join(f"{name} is {values}" for name, values in by_rank.items() if len(set(values)) > 1)
        raise BatchError(
            f"ranks {tuple(ranks)} of a replica must be given the same batch, but by rank {different}. "
            'Seed shuffling and collators alike on all of them, or pass batches="own" if each is to have its own.'
        )


class Same(Round):
    """All ranks of a replica hold the same batch and each cuts its part out of it."""

    def _say(self, replica: Replica, batches: Sequence[WholeBatch], number: int) -> _Said:
        return _Said(replica.replica_id, len(batches), checksum(batches))

    def _shards(self, replica: Replica, batches: Sequence[WholeBatch], heard: _Heard) -> list[dict[str, Any]]:
        self._expect_same_in_replicas(batches, heard)
        heard.expect_as_many({said.replica: said.batches for said in heard.said})
        return [_shard(replica, batch) for batch in batches]


class Own(Round):
    """Each rank holds a batch of its own; all shards travel at once."""

    def _say(self, replica: Replica, batches: Sequence[WholeBatch], number: int) -> _Said:
        return _Said(replica.replica_id, len(batches))

    def _payload(self, batches: Sequence[WholeBatch]) -> bytes:
        return b"".join(map(manifest, batches))

    def _shards(self, replica: Replica, batches: Sequence[WholeBatch], heard: _Heard) -> list[dict[str, Any]]:
        counts = {of: sum(heard.said[rank].batches for rank in ranks) for of, ranks in heard.by_replica().items()}
        heard.expect_as_many(counts)
        if not any(counts.values()):
            return []
        manifests = [heard.payloads[rank] for rank in replica.ranks]
        return exchange_shards(batches[0] if batches else None, manifests, replica, self._device)


class Dealt(Round):
    """Replicas take different batches; a round is an optimizer step of `BatchSplit.micro_steps` micro-batches.

    A replica that has fewer is given batches without weight for the rest of the step.

    Args:
        device: where the process groups want their tensors.
        replica_id: of this rank's replica.
        split: the batches of all replicas.
        reader: what chooses this replica's samples; None where the caller has chosen them.
    """

    def __init__(
        self, device: torch.device, replica_id: int, split: BatchSplit, reader: OwnSampler | OwnStream | None
    ) -> None:
        super().__init__(device)
        self._split, self._reader = split, reader
        self.batches_per_round = split.micro_batches[replica_id]
        self._entries: WholeBatch | None = None  # of a batch without weight
        self._short_step: int | None = None

    def _say(self, replica: Replica, batches: Sequence[WholeBatch], number: int) -> _Said:
        samples = self._reader.checksum(number) if self._reader is not None else 0
        labels = [batch.num_labels() for batch in batches]
        counted = -1 if None in labels else sum(count or 0 for count in labels)
        return _Said(replica.replica_id, len(batches), checksum(batches), samples, counted)

    def _shards(self, replica: Replica, batches: Sequence[WholeBatch], heard: _Heard) -> list[dict[str, Any]]:
        if len({said.samples for said in heard.said}) > 1:
            raise BatchError(
                f"the ranks do not draw the same samples: checksums of step {heard.number} by rank are "
                f"{[f'{said.samples:08x}' for said in heard.said]}. Seed shuffling alike on all ranks."
            )
        self._expect_same_in_replicas(batches, heard)
        by_replica = {said.replica: said for said in heard.said}
        counts = {of: said.batches for of, said in by_replica.items()}
        if not any(counts.values()):
            self._short_step = None
            return []
        if self._short_step is not None and heard.number > self._short_step:
            heard.raise_uneven(counts)
        short = any(counts[of] < count for of, count in enumerate(self._split.micro_batches))
        self._short_step = heard.number if short else None
        if batches:
            self._entries = without_weight(batches[-1], 1)
        fillers = [without_weight(self._entries, _fewest_tokens(replica))] * (self._split.micro_steps - len(batches))
        shards = [_shard(replica, batch) for batch in [*batches, *fillers]]
        labels = [said.labels for said in by_replica.values()]
        num_items = None if -1 in labels else sum(labels)
        for i, shard in enumerate(shards):
            mark_step(shard["position_ids"], num_items, weightless=i >= len(batches))
        return shards


def checksum(batches: Sequence[WholeBatch]) -> int:
    """Of everything in the batches that two ranks can compare; 0 for none."""
    return zlib.crc32(json.dumps([batch.fingerprints() for batch in batches]).encode()) if batches else 0


def _shard(replica: Replica, batch: WholeBatch) -> dict[str, Any]:
    return batch.shard(replica.schedule.intervals(batch.length, replica.rank))


def _fewest_tokens(replica: Replica) -> int:
    return sum(1 for group in replica.schedule.groups for weight in group.tokens if weight)
