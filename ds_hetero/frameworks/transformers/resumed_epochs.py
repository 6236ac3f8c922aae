"""The Trainer resumed amid an epoch: the epoch is drawn again in the order that it had, or refused.

The Trainer skips as many batches as were trained on, and draws the order of the epoch anew. That is the same order only
where the sampler is seeded by the number of the epoch, as accelerate's is in the place of torch's RandomSampler. All
others (``group_by_length``, weighted samplers, samplers and streams with generators of their own) draw from states that
the first job has moved on. So a checkpoint keeps the states with which its epoch began, which are put back before the
epoch is begun again, and a checksum of the order so far; see `ds_hetero.runtime.data.drawn_order`.
"""

from __future__ import annotations

import inspect
import logging
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import IterableDataset
from transformers import Trainer
from transformers.trainer_utils import has_length

from ds_hetero.engine.known_loaders import KNOWN_LOADERS
from ds_hetero.engine.patching import Function
from ds_hetero.engine.registry import Registry
from ds_hetero.errors import SamplingError
from ds_hetero.runtime.collectives import on_all_ranks
from ds_hetero.runtime.data.drawn_order import DrawnOrder, batches_drawn, note_order
from ds_hetero.runtime.data.epochs import Epochs
from ds_hetero.runtime.data.shards import Entries

logger = logging.getLogger(__name__)

_PART = "ds_hetero_epoch_{}.pt"  # of a rank, in the folder of a checkpoint
_SEEDED_BY_EPOCH = frozenset({"SeedableRandomSampler", "SequentialSampler", "DistributedSampler"})


class TrainedEpochs:
    """The epochs of one training: how the present one began, and how much of it was used."""

    def __init__(self) -> None:
        self._loader: Any = None
        self._epochs: Epochs | None = None
        self._order = DrawnOrder()
        self._start: Entries | None = None
        self._used = 0  # of this rank's batches, in this epoch
        self._number = 0  # of the epoch
        self.offset = 0  # of the numbers of epochs to those that the Trainer counts
        self._ranks_per_batch = 1

    def watch(self, loader: Any, *, in_turn_of: int = 1) -> None:
        """Follow the epochs of this loader.

        Args:
            in_turn_of: ranks whose batches are used one after the other, where each has its own.
        """
        self._loader, self._order = loader, note_order(loader)
        self._epochs = Epochs(loader, KNOWN_LOADERS)
        self._ranks_per_batch = in_turn_of

    def begin(self, number: int, resumed: Entries | None, used: int) -> None:
        """Epoch ``number`` begins, after ``used`` batches; with ``resumed``, from `state`, as that one did.

        Raises:
            SamplingError: each rank reads a part of the samples, and there were other ranks.
        """
        if self._epochs is None:
            return
        self._order.begin(type(getattr(self._loader, "dataset", None)).__name__)
        if resumed is not None:
            self._expect_same_ranks(resumed)
            self._epochs.put_back(resumed["start"])
            # Of a stream each replica notes its own part, which is another one where there are other ranks.
            is_of_all = resumed["world_size"] == dist.get_world_size() or not self._is_stream
            self._order.expect(resumed["after"] if is_of_all else None)
        self._start, self._used, self._number = self._epochs.states_now(), used, number

    @property
    def has_length(self) -> bool:
        """Whether the Trainer can count the batches of an epoch."""
        return bool(has_length(self._loader))

    @property
    def _is_stream(self) -> bool:
        return isinstance(getattr(self._loader, "dataset", None), IterableDataset)

    def _expect_same_ranks(self, resumed: Entries) -> None:
        now = {"in_turn_of": self._ranks_per_batch, "world_size": dist.get_world_size()}
        before = {name: resumed[name] for name in now}
        if before != now and max(before["in_turn_of"], self._ranks_per_batch) > 1:
            raise SamplingError(
                "the sampler shares samples out by rank (as a DistributedSampler over all ranks does), and the "
                f"checkpoint is of {before['world_size']} ranks, this job of {now['world_size']}: which samples are "
                "left of the epoch cannot be said. Go on with as many ranks, or set ignore_data_skip=True, which "
                "begins the epoch anew."
            )

    def use(self, num_batches: int) -> None:
        """So many batches are used."""
        self._used += num_batches

    def state(self) -> Entries | None:
        """What `begin` needs to go on; None before the first epoch."""
        if self._start is None:
            return None
        drawn = batches_drawn(self._loader, self._used // self._ranks_per_batch)
        return {
            "epoch": self._number,
            "used": self._used,
            "start": self._start,
            "after": self._order.after(drawn),
            "in_turn_of": self._ranks_per_batch,
            "world_size": dist.get_world_size(),
        }

    def expect_seeded(self) -> None:
        """Say that the order of an epoch may be another one, where a checkpoint does not tell how it began."""
        kinds = [type(part).__name__ for part in KNOWN_LOADERS.parts(self._loader)]
        if not _SEEDED_BY_EPOCH & set(kinds) and dist.get_rank() == 0:
            logger.warning(
                "the checkpoint does not tell how its epoch began, since it was saved by an older ds_hetero or without "
                "it: whether the rest of the epoch is the rest of its order is not known (%s). To be sure, set "
                "ignore_data_skip=True, which begins the epoch anew.",
                ", ".join(kind for kind in kinds if kind.endswith(("Sampler", "Dataset"))) or "no sampler",
            )


_EPOCHS = "_ds_hetero_epochs"  # on the Trainer itself: those of TRL that are dataclasses cannot be keys


def epochs_of(trainer: Trainer) -> TrainedEpochs:
    """The epochs of a Trainer's training."""
    epochs: TrainedEpochs = vars(trainer).setdefault(_EPOCHS, TrainedEpochs())
    return epochs


def forget_epochs(trainer: Trainer) -> None:
    """A new training begins."""
    vars(trainer).pop(_EPOCHS, None)


def run_epoch(registry: Registry, stock: Function, trainer: Trainer, *args: object, **kwargs: object) -> object:
    """Around ``Trainer._run_epoch``, which begins the epoch and skips what was trained on."""
    if not registry.adapters.processes.asks_for_engine(trainer.accelerator):
        return stock(trainer, *args, **kwargs)
    given = inspect.signature(stock).bind(trainer, *args, **kwargs).arguments
    checkpoint, used = given["resume_from_checkpoint"], given["steps_trained_in_current_epoch"]
    goes_on = checkpoint is not None and given["epoch"] == given["epochs_trained"] and used > 0
    epochs = epochs_of(trainer)
    resumed = _read(Path(checkpoint)) if goes_on else None
    if goes_on and resumed is None:
        epochs.expect_seeded()
    if resumed is not None and not epochs.has_length:
        # The Trainer takes all steps of a stream for one epoch, and would leave out those of its earlier epochs too.
        epochs.offset = resumed["epoch"] - given["epoch"]
        given["steps_trained_in_current_epoch"] = used = resumed["used"]
    given["epoch"] += epochs.offset
    if goes_on:
        given["epochs_trained"] = given["epoch"]
    epochs.begin(given["epoch"], resumed, used if goes_on else 0)
    return stock(**given)


def save_epoch(trainer: Trainer, folder: Path) -> None:
    """Write this rank's part of how the present epoch began and how far it is."""
    state = epochs_of(trainer).state()
    if state is not None:
        write_epoch(state, folder)


def write_epoch(state: Entries, folder: Path) -> None:
    """Write what `TrainedEpochs.state` returned where `run_epoch` looks for it."""
    torch.save(state, folder / _PART.format(dist.get_rank()))


def _read(folder: Path) -> Entries | None:
    """The part of this rank; that of rank 0 where other ranks have saved, since all draw alike."""

    def read() -> Entries | None:
        for rank in (dist.get_rank(), 0):
            if (path := folder / _PART.format(rank)).is_file():
                state: Entries = torch.load(path, map_location="cpu", weights_only=True)
                if rank == 0 or state["world_size"] == dist.get_world_size():
                    return state
        return None

    parts: list[Entries | None] = []
    on_all_ranks(lambda: parts.append(read()))
    return parts[0]
