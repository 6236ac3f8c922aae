"""A loader that yields this rank's shards of batches: the drop-in for DeepSpeed's UlyssesSPDataLoaderAdapter.

    for batch in ShardedLoader(dataloader, replica):       # input_ids [B, s], position_ids, shift_labels, ...

There are three modes. If all ranks of the replica read the same batch, each cuts its own part out of it, and only a
checksum is exchanged, which shows whether the batches are still the same. If each rank reads a batch of its own, the
batches are used in turn, and their parts are exchanged in one uneven all-to-all of bytes. If the replicas take
different batches, each reads its own samples out of those of the whole job.

    batch_mode      decides which of the three modes it is
    whole_batches   the batches of the wrapped loader, and the position at which it is resumed
    sampling        reads one replica's samples out of those of the whole job
    planning_ahead  reads and places the next batches while the step computes
    fetch           exchanges what the ranks have read for the next steps; fetchers has the three modes
    shards          cuts the entries of a batch
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any, Literal

from ds_hetero.runtime.data.epochs import STATE_VERSION, expect_compatible
from ds_hetero.runtime.data.fetch import Progress
from ds_hetero.runtime.data.fetchers import make_fetcher
from ds_hetero.runtime.data.loader_names import TORCH_LOADERS, LoaderNames
from ds_hetero.runtime.data.planning_ahead import CurrentPlacer, PlanningAhead
from ds_hetero.runtime.data.shards import Batch, Entries
from ds_hetero.runtime.data.whole_batches import BatchReading, WholeBatches
from ds_hetero.runtime.peers.calls import own_calls
from ds_hetero.runtime.replica import Replica
from ds_hetero.values.placement import Placer, stream_placement


class ShardedLoader:
    """Wraps a loader of whole batches; yields dicts of this rank's shards, on the CPU.

    Lengths may differ from batch to batch and need not be divisible by anything. An epoch ends on all ranks in the same
    step, and every batch is used, even if ranks of a replica read unequal numbers of batches of their own.
    ``iter(loader)`` begins an epoch, as with a DataLoader. ``next(loader)`` keeps an epoch of its own and, after
    StopIteration, begins another. ``len(loader)`` counts the steps of an epoch: the batches of the wrapped loader, or,
    if each rank has its own, those of all ranks together. Other attributes (``dataset``, ...) are the wrapped loader's.

    If the replicas take different batches (`Replica.batch_split`), ``dataloader`` must be a ``DataLoader`` of all
    samples, equal on all ranks; its batch size does not matter. Any other iterable must yield this replica's
    micro-batches. Each optimizer step has the same number of batches on every rank: a replica with fewer micro-batches
    gets filler batches, short rows in which no label counts. A shuffled loader has to be seeded alike on all ranks.

    Args:
        dataloader: yields mappings; map-style or iterable, or any iterable of batches.
        batches: ``"same"`` if all ranks of a replica read the same batch, ``"own"`` if each reads its own. Left out,
            the mode is detected, and logged by rank 0.
        plan_ahead: returns the present placer. With it, a ``DataLoader`` is read one fetch ahead, and its batches are
            placed in a thread while the step computes. Left out, batches are read and placed when due.

    Caller: every rank of the world.
    Collectives: once, a short description of every rank's loader over the world, and again if first batches have to be
        compared. With "same", per step, and where replicas differ, per optimizer step: one all_gather of 128 integers
        over the world. With "own", per sp_size steps: one such all_gather, a second one of the longest description
        where one does not fit into it (entries that are not tensors are pickled into them), and one all_to_all_single
        of the bytes of all shards.

    Raises:
        BatchError: on every rank. When made: the loaders of the ranks contradict each other. In iteration: a batch
            cannot be cut, the ranks do not hold the same one, or the replicas run out at different steps.
        StepError: in iteration, on every rank: a rank has left out a forward, backward or step of the batch before, or
            is at another point of the loop, as after a ``break`` on that rank alone.
        PeerError: another rank could not read its batch; that rank raises what happened to it.
    """

    def __init__(
        self,
        dataloader: Iterable[Any],
        replica: Replica,
        *,
        batches: Literal["same", "own"] | None = None,
        reading: BatchReading = BatchReading(),  # noqa: B008  (frozen)
        placer: Placer = stream_placement,
        plan_ahead: CurrentPlacer | None = None,
        names: LoaderNames = TORCH_LOADERS,
    ) -> None:
        self._replica = replica
        self._batches = WholeBatches(dataloader, names, reading)
        self._current_placer, self._plans_ahead = plan_ahead or (lambda: placer), plan_ahead is not None
        self._fetcher = make_fetcher(self._batches, replica, placer, batches)
        self._start = self._progress = Progress()
        self._num_skipped = 0
        self._state_before_fetch: Any = None  # of the wrapped loader
        self._checksum_before_fetch: int | None = 0
        self._running: Iterator[Entries] | None = None  # the epoch of next(loader)

    @property
    def dataloader(self) -> Any:
        """The wrapped loader; if the replicas take different batches, a loader of this replica's samples."""
        return self._batches.dataloader

    @property
    def whole(self) -> Any:
        """The wrapped loader of all samples, even if the replicas take different batches."""
        return self._batches.all_samples

    @property
    def replica(self) -> Replica:
        """This rank's replica; a batch is cut for the replica's schedule at the time when it is drawn."""
        return self._replica

    @property
    def batches(self) -> str:
        """Mode: ``"same"`` (shared by a replica), ``"own"`` (by rank) or ``"dealt"`` (divided), see `batch_mode`."""
        return self._fetcher.mode

    def __len__(self) -> int:
        return self._fetcher.num_steps(self._batches, self._num_skipped)

    def __getattr__(self, name: str) -> Any:
        if name == "_batches":  # looked up by copy before there is any attribute
            raise AttributeError(name)
        return getattr(self._batches.dataloader, name)

    def __iter__(self) -> Iterator[Entries]:
        progress, self._start = self._start, Progress()
        self._progress = progress
        epoch = PlanningAhead(self._batches, self._batches.read_epoch(progress.fetches), self._current_placer)
        while True:
            if self._fetcher.uses_in_turn:
                self._state_before_fetch = self._batches.state()
            self._checksum_before_fetch = self._batches.checksum
            shards = self._fetcher.fetch(self.replica, epoch, progress.fetches)
            if not shards:
                break
            if self._plans_ahead:
                epoch.prepare(self._fetcher.batches_per_fetch, self.replica.schedule)
            for number, shard in enumerate(shards[progress.used :], progress.used + 1):
                is_last = number == len(shards)
                self._progress = Progress(progress.fetches + 1) if is_last else replace(progress, used=number)
                yield from own_calls.yield_batch(shard)
            progress = Progress(progress.fetches + 1)
        self._progress = Progress()

    def __next__(self) -> Entries:
        if self._running is None:
            self._running = iter(self)
        try:
            return next(self._running)
        except Exception:
            self._running = None
            raise

    def set_epoch(self, epoch: int) -> None:
        """Tell the wrapped loader, or else its sampler and dataset, which epoch comes next."""
        self._batches.set_epoch(epoch)

    def state_dict(self) -> Entries:
        """Return this rank's position in the epoch, for `load_state_dict` on the same rank.

        Contains the wrapped loader's state if it has one (torchdata's StatefulDataLoader, alone or in accelerate's).
        Any other loader is read from the beginning of the epoch on resuming, from the random states with which the
        epoch began, and the batches that were used are dropped. It must then give the same batches in the same order,
        or resuming is refused. If replicas take different batches, the resumed job may have other replicas, as long as
        the global batch is the same.
        """
        is_amid_fetch = self._progress.used > 0
        checksum = self._checksum_before_fetch if is_amid_fetch else self._batches.checksum
        loader_state = None
        if self._fetcher.resumes_loader:
            loader_state = self._state_before_fetch if is_amid_fetch else self._batches.state()
        return {
            **self._compatibility(),
            "epoch": self._batches.epoch,
            "rounds": self._progress.fetches,
            "used": self._progress.used,
            "loader": loader_state,
            "start": self._batches.start_of_epoch(is_begun=self._progress != Progress(), checksum=checksum),
        }

    def load_state_dict(self, state: Batch) -> None:
        """Begin the next epoch where ``state`` was taken; the epochs after that are whole.

        Raises:
            BatchError: the state has another version, or was taken in another mode. The next epoch raises it on every
                rank if the loader gives other batches than before.
        """
        expect_compatible(state, self._compatibility())
        if state["epoch"] is not None:
            self.set_epoch(state["epoch"])
        self._running = None
        self._start = self._progress = Progress(state["rounds"], state["used"])
        per_fetch = self._fetcher.batches_per_fetch
        num_again = per_fetch if state["used"] else 0
        self._batches.resume(state["rounds"] * per_fetch, num_again, state["loader"], state["start"])
        self._state_before_fetch, self._checksum_before_fetch = self._batches.state(), state["start"]["checksum"]

    def skipping(self, num_batches: int, skip: Callable[[Any, int], Any]) -> ShardedLoader:
        """Return a loader whose next epoch begins after ``num_batches`` steps, without reading the steps before.

        Args:
            skip: ``skip(dataloader, n)`` returns the wrapped loader without its first n batches, as
                ``accelerate.skip_first_batches`` does.
        """
        loader = copy.copy(self)
        loader._start = loader._progress = self._fetcher.progress_after(num_batches)
        loader._batches = self._batches.skipping(loader._start.fetches * self._fetcher.batches_per_fetch, skip)
        loader._num_skipped = num_batches
        loader._running = None
        return loader

    def _compatibility(self) -> Entries:
        """Return the settings that must be the same when a state is loaded as when it was saved."""
        return {"version": STATE_VERSION, **self._fetcher.compatibility(self.replica)}
