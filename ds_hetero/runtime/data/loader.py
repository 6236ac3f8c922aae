"""A loader whose batches are this rank's shards: the drop-in for DeepSpeed's UlyssesSPDataLoaderAdapter.

    for batch in ShardedLoader(dataloader, replica):       # input_ids [B, s], position_ids, shift_labels, ...

Where all ranks of the replica are given the same batch, each cuts its own part out of it and only a checksum travels,
by which every rank learns whether they still agree. Where each is given a batch of its own, the batches are used in
turn and their parts travel in one uneven all-to-all of bytes. Which of the two it is: see `sources`. Where the replicas
take different batches, each reads its own samples out of those of the whole job, see `samples`. What the ranks do
together for their next batches: see `rounds`. What becomes of each entry of a batch: see `shards`.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import chain, islice
from typing import Any, Literal

from torch.utils.data import DataLoader

from ds_hetero.errors import BatchError
from ds_hetero.placement import Placer, stream_placement
from ds_hetero.plan import BatchSplit
from ds_hetero.runtime.collectives import all_gather_bytes, encode_failure, raise_failures
from ds_hetero.runtime.data.batch_mode import DEALT, OWN, SAME, Source, decide, describe, expect_unsharded
from ds_hetero.runtime.data.fetch import DividedBatches, Fetcher, OwnBatches, SharedBatches, checksum
from ds_hetero.runtime.data.sampling import all_samples, own_samples, reader_of, steps_in_epoch
from ds_hetero.runtime.data.shards import WholeBatch, read_batch
from ds_hetero.runtime.replica import Replica

__all__ = ["ShardedLoader"]

logger = logging.getLogger(__name__)

_OK, _ERROR = range(2)
_STATE_VERSION = 1


@dataclass(frozen=True)
class _Position:
    """Where in an epoch: rounds done, and steps used of the next."""

    rounds: int = 0
    used: int = 0


class ShardedLoader:
    """Wraps a loader of whole batches; yields dicts of this rank's shards, on the CPU.

    Lengths may differ from batch to batch and need not divide by anything. An epoch ends on all ranks in the same
    step, also where ranks of a replica with batches of their own have unequally many: every batch is used.
    ``iter(loader)`` begins an epoch, as with a DataLoader; ``next(loader)`` goes on with an epoch of its own and, after
    StopIteration, begins another. ``len(loader)`` counts the steps of an epoch: the batches of the wrapped loader, or,
    where each rank has its own, of all ranks together. Other attributes (``dataset``, ...) are the wrapped loader's.

    Where the replicas take different batches (`Replica.batch_split`), ``dataloader`` is to be a `DataLoader` of all
    samples, equal on all ranks; its batch size does not matter. Any other iterable is taken to hold this replica's
    micro-batches. Each optimizer step is as many batches on every rank; replicas with fewer are given some without
    weight, a short row in which no label counts. A shuffled loader has to be seeded alike on all ranks.

    Args:
        dataloader: yields mappings; map-style or iterable, or any iterable of batches.
        replica: this rank's replica.
        batches: ``"same"`` if all ranks of a replica are given the same batch, ``"own"`` if each has its own; left
            out, it is found out, and logged by rank 0.
        keep_labels: keep ``labels`` beside ``shift_labels``, see `shards.read_batch`.
        placer: decides who holds which positions of a batch.

    Caller: every rank of the world.
    Collectives: once, a short description of every rank's loader over the world, and again if first batches have to be
        compared. With "same", per step, and where replicas differ, per optimizer step: one all_gather of seven integers
        over the world. With "own", per sp_size steps: two small all_gathers over the world and one all_to_all_single of
        the bytes of all shards; entries that are not tensors are pickled into the second all_gather, if there are any.

    Raises:
        BatchError: on every rank. When made: the loaders of the ranks contradict each other. In iteration: a batch
            cannot be cut, the ranks do not hold the same one, or the replicas run out at different steps.
        PeerError: another rank could not read its batch; that rank raises what happened to it.
    """

    def __init__(
        self,
        dataloader: Iterable[Any],
        replica: Replica,
        *,
        batches: Literal["same", "own"] | None = None,
        keep_labels: bool = False,
        placer: Placer = stream_placement,
    ) -> None:
        self.dataloader: Any = dataloader
        self._replica = replica
        self._keep_labels = keep_labels
        self._reader = reader_of(dataloader)
        self._placer = placer
        self._opened: Iterator[WholeBatch] | None = None  # an epoch begun to look at its first batch
        self._running: Iterator[dict[str, Any]] | None = None  # the epoch of next(loader)
        self._epoch: int | None = None
        self._start, self._read_and_drop = _Position(), 0
        self._position = _Position()
        self._loaded: Any = None  # the wrapped loader's state until it has given a batch
        self._state_before_round: Any = None
        self._skipped = 0
        self.batches, self._lengths = self._establish(batches)
        self._fetcher = self._make_fetcher()

    @property
    def whole(self) -> Any:
        """The wrapped loader; where the replicas take different batches, with the samples of all of them."""
        return self.dataloader if self._reader is None else all_samples(self.dataloader)

    @property
    def replica(self) -> Replica:
        """This rank's replica; batches are cut for the schedule that it has when they are drawn."""
        return self._replica

    def __len__(self) -> int:
        if self.batches == SAME:
            return len(self.dataloader)
        if self.batches == DEALT:
            return self._steps_in_epoch() * self._split.micro_steps - self._skipped
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
        whole = self._whole_batches(position.rounds)
        while True:
            if self.batches == OWN:
                self._state_before_round = self._inner_state()
            shards = self._fetcher.fetch(self.replica, whole, position.rounds)
            self._loaded = None
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
        batches in the same order, so seed its shuffling. Where replicas take different batches, other replicas may go
        on, as long as the global batch is the same.
        """
        in_round = self._position.used > 0
        inner = None if self.batches == DEALT else self._state_before_round if in_round else self._inner_state()
        return {
            "version": _STATE_VERSION,
            **self._kind(),
            "epoch": self._epoch,
            "rounds": self._position.rounds,
            "used": self._position.used,
            "loader": inner,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Begin the next epoch where ``state`` was taken; the one after that is whole.

        Raises:
            BatchError: the state is of another version, or was taken when batches went to the ranks in another way.
        """
        mine = {"version": _STATE_VERSION, **self._kind()}
        theirs = {name: state.get(name) for name in mine}
        if theirs != mine:
            raise BatchError(
                f"a loader saved with {theirs} cannot resume with {mine} in the middle of an epoch. "
                "Resume with as many ranks per replica, or the same global batch, and the same loader; or begin the "
                "epoch anew."
            )
        if state["epoch"] is not None:
            self.set_epoch(state["epoch"])
        self._opened = self._running = self._loaded = None
        self._start = self._position = _Position(state["rounds"], state["used"])
        self._read_and_drop = state["rounds"] * self._fetcher.batches_per_fetch if self._reader is None else 0
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
        rounds, used = self._rounds_of(num_batches)
        loader = copy.copy(self)
        if self._reader is None:
            loader.dataloader = skip(self.dataloader, rounds * self._fetcher.batches_per_fetch)
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
        if self.batches == SAME:
            return num_batches, 0
        if self.batches == DEALT:
            return divmod(num_batches, self._split.micro_steps)
        rounds = 0
        while taking := sum(length is None or length > rounds for length in self._lengths):
            if num_batches < taking:
                return rounds, num_batches
            num_batches, rounds = num_batches - taking, rounds + 1
        return rounds, 0

    def _kind(self) -> dict[str, Any]:
        """What must be the same for a state to be of use."""
        kind: dict[str, Any] = {"batches": self.batches}
        if self.batches == OWN:
            kind["sp_size"] = self.replica.sp_size
        if self.batches == DEALT:
            kind["global_batch"] = self._split.samples
        return kind

    # --- batches -----------------------------------------------------------------------------------

    def _whole_batches(self, first_round: int = 0) -> Iterator[WholeBatch]:
        """The wrapped loader's batches; opened when the first is asked for, where a round looks after failures."""
        opened, self._opened = self._opened, None
        drop, self._read_and_drop = self._read_and_drop, 0
        if opened is not None:
            yield from opened
            return
        if self._reader is not None:
            self._reader.first_step = first_round
        for batch in islice(self.dataloader, drop, None):
            if self._reader is not None:
                self._reader.first_step = 0
            yield self._read(batch)

    def _read(self, batch: Any) -> WholeBatch:
        return read_batch(batch, self._keep_labels)

    # --- which batches the ranks hold --------------------------------------------------------------

    @property
    def _split(self) -> BatchSplit:
        assert self.replica.batch_split is not None
        return self.replica.batch_split

    def _make_fetcher(self) -> Fetcher:
        if self.batches == DEALT:
            return DividedBatches(self._placer, self.replica.replica_id, self._split, self._reader)
        return (SharedBatches if self.batches == SAME else OwnBatches)(self._placer)

    def _steps_in_epoch(self) -> int:
        if self._reader is not None:
            return steps_in_epoch(self._reader)
        if None in self._lengths:
            raise TypeError("the wrapped loader has no length")
        counts = self._split.micro_batches
        return max(-(-(length or 0) // count) for length, count in zip(self._lengths, counts, strict=True))

    def _establish(self, asked: str | None) -> tuple[str, tuple[int | None, ...]]:
        """``batches`` for the whole job, and the number of batches on each rank of this replica.

        Where the replicas take different batches: of each replica.
        """
        source = describe(self.dataloader, self.replica.replica_id, asked)
        sources = self._gather(source)
        if self.replica.batch_split is not None:
            expect_unsharded(sources, isinstance(self.dataloader, DataLoader))
            if self._reader is None and isinstance(self.dataloader, DataLoader):
                self.dataloader = own_samples(self.dataloader, self._split, self.replica.replica_id)
                self._reader = reader_of(self.dataloader)
            lengths = {s.replica: s.length for s in sources}
            return DEALT, tuple(lengths[replica] for replica in sorted(lengths))
        mode, why = decide(sources)
        level = logging.INFO
        if mode is None:
            level = logging.WARNING
            whole = self._whole_batches()
            batch: WholeBatch | None = None
            error: Exception | None = None
            try:
                batch = next(whole, None)
            except Exception as raised:
                error = raised
            first = "" if batch is None else f"{checksum([batch]):08x}"
            sources = self._gather(replace(source, first=first), error)
            mode, why = decide(sources)
            self._opened = whole if batch is None else chain([batch], whole)
        assert mode is not None
        if self.replica.rank == 0:
            meaning = {SAME: "all ranks of a replica are given the same batch", OWN: "each rank is given its own batch"}
            logger.log(level, 'batches="%s": %s; %s', mode, meaning[mode], why)
        return mode, tuple(s.length for s in sources if s.replica == self.replica.replica_id)

    def _gather(self, source: Source, error: Exception | None = None) -> list[Source]:
        """What all ranks say; or, on every rank, what went wrong on one."""
        status, payload = (_OK, source.to_json()) if error is None else (_ERROR, encode_failure(error))
        rows, payloads = all_gather_bytes([status], payload)
        failures = {rank: payloads[rank] for rank, row in enumerate(rows) if row == [_ERROR]}
        raise_failures(failures, error, "the first batch could not be read")
        return [Source.from_json(payload) for payload in payloads]


# --- the wrapped loader's own state -----------------------------------------------------------------


def _has_state(dataloader: Any) -> bool:
    holder = getattr(dataloader, "base_dataloader", dataloader)  # accelerate's always have the methods, if not a state
    return hasattr(holder, "state_dict") and hasattr(holder, "load_state_dict")
