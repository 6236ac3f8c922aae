"""A loader whose batches are this rank's shards: the drop-in for DeepSpeed's UlyssesSPDataLoaderAdapter.

    for batch in ShardedLoader(dataloader, replica, device):       # input_ids [B, s], position_ids, shift_labels, ...

Where all ranks of the replica are given the same batch, each cuts its own part out of it and only a checksum travels,
by which every rank learns whether they still agree. Where each is given a batch of its own, the batches are used in
turn and their parts travel in one uneven all-to-all of bytes. Which of the two it is: see `sources`. What becomes of
each entry of a batch: see `shards`.
"""

from __future__ import annotations

import copy
import json
import logging
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import chain, islice
from typing import Any, Literal, NoReturn

import torch
import torch.distributed as dist

from ds_hetero.errors import BatchError, ScheduleError
from ds_hetero.runtime.batch import control_device
from ds_hetero.runtime.exchange import all_gather_bytes, exchange_shards, failure, manifest, raise_failures
from ds_hetero.runtime.replica import Replica
from ds_hetero.runtime.shards import WholeBatch, mark_schedule, read_batch
from ds_hetero.runtime.sources import OWN, SAME, Source, decide, describe

__all__ = ["ShardedLoader"]

logger = logging.getLogger(__name__)

_BATCH, _END, _ERROR = range(3)
_STATE_VERSION = 1


@dataclass(frozen=True)
class _Position:
    """Where in an epoch: rounds done, and batches used of the next; a round takes at most one batch from each rank."""

    rounds: int = 0
    used: int = 0


class ShardedLoader:
    """Wraps a loader of whole batches; yields dicts of this rank's shards, on the CPU.

    Lengths may differ from batch to batch and need not divide by anything. An epoch ends on all ranks of the replica
    in the same step, also where ranks with batches of their own have unequally many: every batch is used.
    ``iter(loader)`` begins an epoch, as with a DataLoader; ``next(loader)`` goes on with an epoch of its own and, after
    StopIteration, begins another. ``len(loader)`` counts the steps of an epoch: the batches of the wrapped loader, or,
    where each rank has its own, of all ranks together. Other attributes (``dataset``, ...) are the wrapped loader's.

    Args:
        dataloader: yields mappings; map-style or iterable, or any iterable of batches.
        replica: this rank's replica.
        device: where tensors must be for the replica's process group, unless that is gloo.
        batches: ``"same"`` if all ranks of a replica are given the same batch, ``"own"`` if each has its own; left
            out, it is found out, and logged by rank 0.
        keep_labels: keep ``labels`` beside ``shift_labels``, see `shards.read_batch`.

    Caller: every rank of the world.
    Collectives: once, a short description of every rank's loader over the world, and again if first batches have to be
        compared. With "same", per step: one all_gather of three integers. With "own", per sp_size steps: two small
        all_gathers and one all_to_all_single of the bytes of all shards; entries that are not tensors are pickled
        into the second all_gather, if there are any.

    Raises:
        BatchError: on every rank. When made: the loaders of the ranks contradict each other. In iteration: a batch
            cannot be cut, or the ranks do not hold the same one.
        PeerError: another rank could not read its batch; that rank raises what happened to it.
    """

    def __init__(
        self,
        dataloader: Iterable[Any],
        replica: Replica,
        device: torch.device,
        *,
        batches: Literal["same", "own"] | None = None,
        keep_labels: bool = False,
    ) -> None:
        self.dataloader: Any = dataloader
        self._replica = replica
        self._keep_labels = keep_labels
        self._device = control_device(replica, device)
        self._opened: Iterator[WholeBatch] | None = None  # an epoch begun to look at its first batch
        self._running: Iterator[dict[str, Any]] | None = None  # the epoch of next(loader)
        self._epoch: int | None = None
        self._start, self._read_and_drop = _Position(), 0
        self._position = _Position()
        self._loaded: Any = None  # the wrapped loader's state until it has given a batch
        self._state_before_round: Any = None
        self._skipped = 0
        self.batches, self._lengths = self._establish(batches)

    @property
    def replica(self) -> Replica:
        """This rank's replica; batches are cut for the schedule that it has when they are drawn."""
        return self._replica

    def __len__(self) -> int:
        if self.batches == SAME:
            return len(self.dataloader)
        if None in self._lengths:
            raise TypeError("the wrapped loader has no length")
        return sum(length or 0 for length in self._lengths) - self._skipped

    def __getattr__(self, name: str) -> Any:
        if name == "dataloader":  # looked up by copy before there is any attribute
            raise AttributeError(name)
        return getattr(self.dataloader, name)

    # --- epochs ------------------------------------------------------------------------------------

    def __iter__(self) -> Iterator[dict[str, Any]]:
        position, self._start = self._start, _Position()
        self._position = position
        whole = self._whole_batches()
        while True:
            if self.batches == OWN:
                self._state_before_round = self._inner_state()
            shards = self._round(whole)
            if not shards:
                break
            for number, shard in enumerate(shards[position.used :], position.used + 1):
                last = number == len(shards)
                self._position = _Position(position.rounds + 1) if last else replace(position, used=number)
                yield shard
            position = _Position(position.rounds + 1)
        self._position = _Position()

    def __next__(self) -> dict[str, Any]:
        if self._running is None:
            self._running = iter(self)
        try:
            return next(self._running)
        except Exception:
            self._running = None
            raise

    def set_epoch(self, epoch: int) -> None:
        """Tell the wrapped loader, or else its sampler and dataset, which epoch comes next."""
        self._epoch, self._opened = epoch, None
        parts = [self.dataloader]
        if not hasattr(self.dataloader, "set_epoch"):
            names = ("batch_sampler", "sampler", "data_sampler", "dataset")
            parts = [getattr(self.dataloader, name, None) for name in names]
        for part in parts:
            if hasattr(part, "set_epoch"):
                part.set_epoch(epoch)

    # --- resuming ----------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Where this rank is in the epoch, for `load_state_dict` on the same rank.

        Contains the wrapped loader's state if it has one (torchdata's StatefulDataLoader, alone or in accelerate's).
        Any other is read from its beginning on resuming, and what was used is dropped; it must then give the same
        batches in the same order, so seed its shuffling.
        """
        in_round = self._position.used > 0
        return {
            "version": _STATE_VERSION,
            "batches": self.batches,
            "sp_size": self.replica.sp_size,
            "epoch": self._epoch,
            "rounds": self._position.rounds,
            "used": self._position.used,
            "loader": self._state_before_round if in_round else self._inner_state(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Begin the next epoch where ``state`` was taken; the one after that is whole.

        Raises:
            BatchError: the state is of another version, or was taken when batches went to the ranks in another way.
        """
        mine = {"version": _STATE_VERSION, "batches": self.batches}
        if self.batches == OWN:
            mine["sp_size"] = self.replica.sp_size
        theirs = {name: state.get(name) for name in mine}
        if theirs != mine:
            raise BatchError(
                f"a loader saved with {theirs} cannot resume with {mine} in the middle of an epoch. "
                "Resume with as many ranks per replica and the same loader, or begin the epoch anew."
            )
        if state["epoch"] is not None:
            self.set_epoch(state["epoch"])
        self._opened = self._running = self._loaded = None
        self._start = self._position = _Position(state["rounds"], state["used"])
        self._read_and_drop = state["rounds"]
        if state["loader"] is not None and _has_state(self.dataloader):
            self.dataloader.load_state_dict(state["loader"])
            self._loaded = self._state_before_round = state["loader"]
            self._read_and_drop = 0

    def skipping(self, num_batches: int, skip: Callable[[Any, int], Any]) -> ShardedLoader:
        """A loader whose next epoch begins after ``num_batches`` steps, without reading what it leaves out.

        Args:
            num_batches: steps to leave out.
            skip: how the wrapped loader does it: ``skip(dataloader, n)`` returns one without its first n batches, as
                ``accelerate.skip_first_batches``.
        """
        rounds, used = (num_batches, 0) if self.batches == SAME else self._rounds_of(num_batches)
        loader = copy.copy(self)
        loader.dataloader = skip(self.dataloader, rounds)
        loader._opened = loader._running = loader._loaded = None
        loader._start = loader._position = _Position(rounds, used)
        loader._skipped = num_batches
        return loader

    def _inner_state(self) -> Any:
        # accelerate's loaders do not know what was loaded into them before they have given a batch.
        if self._loaded is not None or not _has_state(self.dataloader):
            return self._loaded
        return self.dataloader.state_dict()

    def _rounds_of(self, num_batches: int) -> tuple[int, int]:
        """Rounds that ``num_batches`` steps fill, and the rest; a rank that has run out takes no part in a round."""
        rounds = 0
        while taking := sum(length is None or length > rounds for length in self._lengths):
            if num_batches < taking:
                return rounds, num_batches
            num_batches, rounds = num_batches - taking, rounds + 1
        return rounds, 0

    # --- one round ---------------------------------------------------------------------------------

    def _whole_batches(self) -> Iterator[WholeBatch]:
        """The wrapped loader's batches; opened when the first is asked for, where `_fetch` looks after failures."""
        opened, self._opened = self._opened, None
        drop, self._read_and_drop = self._read_and_drop, 0
        if opened is not None:
            yield from opened
        else:
            for batch in islice(self.dataloader, drop, None):
                yield self._read(batch)

    def _read(self, batch: Any) -> WholeBatch:
        whole = read_batch(batch, self._keep_labels)
        try:
            self.replica.schedule.tokens(whole.length)
        except ScheduleError as error:
            raise BatchError(str(error)) from None
        return whole

    def _round(self, whole: Iterator[WholeBatch]) -> list[dict[str, Any]]:
        """This rank's shards: of the batch that all ranks hold, or of each rank's batch; none at the epoch's end."""
        status, batch, error = _fetch(whole)
        self._loaded = None
        checksum, payload = 0, b""
        if error is not None:
            payload = failure(error)
        elif batch is not None and self.batches == SAME:
            checksum = _checksum(batch)
        elif batch is not None:
            payload = manifest(batch)
        rows, payloads = all_gather_bytes([status, checksum], payload, self.replica.sp_group, self._device)
        said = zip(self.replica.ranks, rows, payloads, strict=True)
        raise_failures({rank: payload for rank, (status, _), payload in said if status == _ERROR}, error)
        if all(status == _END for status, _ in rows):
            return []
        schedule = self.replica.schedule
        if self.batches == OWN:
            shards = exchange_shards(batch, payloads, self.replica, self._device)
        elif batch is None or any(row != rows[0] for row in rows):
            self._raise_difference(batch)
        else:
            shards = [batch.shard(schedule.intervals(batch.length, self.replica.rank))]
        for shard in shards:
            mark_schedule(shard["position_ids"], schedule.fingerprint)
        return shards

    def _establish(self, asked: str | None) -> tuple[str, tuple[int | None, ...]]:
        """``batches`` for the whole job, and the number of batches on each rank of this replica."""
        source = describe(self.dataloader, self.replica.replica_id, asked)
        _, payloads = all_gather_bytes([], source.to_json(), dist.group.WORLD, self._device)
        mode, why = decide([Source.from_json(payload) for payload in payloads])
        level = logging.INFO
        if mode is None:
            level = logging.WARNING
            whole = self._whole_batches()
            status, batch, error = _fetch(whole)
            first = "" if batch is None else f"{_checksum(batch):08x}"
            payload = failure(error) if error is not None else replace(source, first=first).to_json()
            rows, payloads = all_gather_bytes([status], payload, dist.group.WORLD, self._device)
            raise_failures({rank: payloads[rank] for rank, row in enumerate(rows) if row == [_ERROR]}, error)
            mode, why = decide([Source.from_json(payload) for payload in payloads])
            self._opened = whole if batch is None else chain([batch], whole)
        assert mode is not None
        if self.replica.rank == 0:
            meaning = {SAME: "all ranks of a replica are given the same batch", OWN: "each rank is given its own batch"}
            logger.log(level, 'batches="%s": %s; %s', mode, meaning[mode], why)
        sources = [Source.from_json(payload) for payload in payloads]
        return mode, tuple(s.length for s in sources if s.replica == self.replica.replica_id)

    def _raise_difference(self, batch: WholeBatch | None) -> NoReturn:
        """Show what differs, once a checksum has told all ranks that something does."""
        mine = {"epoch": "over"} if batch is None else {"epoch": "goes on", **batch.fingerprints()}
        _, payloads = all_gather_bytes([], json.dumps(mine).encode(), self.replica.sp_group, self._device)
        seen = [json.loads(payload) for payload in payloads]
        names = sorted({name for entries in seen for name in entries})
        by_rank = {name: [entries.get(name, "absent") for entries in seen] for name in names}
        different = "; ".join(f"{name} is {values}" for name, values in by_rank.items() if len(set(values)) > 1)
        raise BatchError(
            f"ranks {self.replica.ranks} of a replica must be given the same batch, but by rank {different}. "
            'Seed shuffling and collators alike on all of them, or pass batches="own" if each is to have its own.'
        )


# --- one batch of this rank -------------------------------------------------------------------------


def _fetch(whole: Iterator[WholeBatch]) -> tuple[int, WholeBatch | None, Exception | None]:
    """The next batch, the end or a failure; whichever it is, the other ranks must hear of it before this one acts."""
    try:
        return _BATCH, next(whole), None
    except StopIteration:
        return _END, None, None
    except Exception as error:
        return _ERROR, None, error


def _checksum(batch: WholeBatch) -> int:
    return zlib.crc32(json.dumps(batch.fingerprints()).encode())


# --- the wrapped loader's own state -----------------------------------------------------------------


def _has_state(dataloader: Any) -> bool:
    holder = getattr(dataloader, "base_dataloader", dataloader)  # accelerate's always have the methods, if not a state
    return hasattr(holder, "state_dict") and hasattr(holder, "load_state_dict")
