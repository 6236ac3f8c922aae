"""Resume the Trainer in the middle of an epoch: draw the epoch in its former order, or refuse.

The Trainer draws the order of the epoch again, and skips the batches that were trained. The order is the same if the
sampler is seeded by the number of the epoch, as accelerate's replacement of torch's RandomSampler is. All other
samplers (``group_by_length``, weighted samplers, samplers and streams with their own generators) draw from random
states that have changed since. So a checkpoint contains the random states with which its epoch began. They are restored
before the epoch is drawn again, and a checksum shows whether the order is the same; see
`ds_hetero.runtime.data.drawn_order`.
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
from ds_hetero.runtime.data.drawn_order import DrawnOrder, num_batches_drawn, record_order
from ds_hetero.runtime.data.epochs import Epochs
from ds_hetero.runtime.data.shards import Entries

logger = logging.getLogger(__name__)

_FILE_OF_RANK = "ds_hetero_epoch_{}.pt"  # in the folder of a checkpoint
# Samplers whose order depends on nothing but the number of the epoch.
_SEEDED_BY_EPOCH = frozenset({"SeedableRandomSampler", "SequentialSampler", "DistributedSampler"})


class TrainedEpochs:
    """Follows the epochs of one training: random states at the start of the present epoch, and its trained batches."""

    def __init__(self) -> None:
        self._loader: Any = None
        self._epochs: Epochs | None = None
        self._order = DrawnOrder()
        self._start_states: Entries | None = None  # random states with which the present epoch began
        self._num_trained = 0  # batches of this rank that were trained in the present epoch
        self._number = 0  # of the present epoch
        self._ranks_per_batch = 1  # see ``ranks_in_turn`` of `watch`
        self.offset = 0  # number of an epoch minus the number that the Trainer gives it

    def watch(self, loader: Any, *, ranks_in_turn: int = 1) -> None:
        """Follow the epochs of this loader.

        Args:
            ranks_in_turn: number of ranks whose batches are trained one after the other, if the ranks of a replica read
                different batches; 1 if they read the same.
        """
        self._loader, self._order = loader, record_order(loader)
        self._epochs = Epochs(loader, KNOWN_LOADERS)
        self._ranks_per_batch = ranks_in_turn

    def begin(self, number: int, resumed: Entries | None, num_trained: int) -> None:
        """Start an epoch.

        Args:
            number: of the epoch.
            resumed: `state` of the epoch that is resumed; None for a new epoch.
            num_trained: batches of the epoch that were trained before.

        Raises:
            SamplingError: each rank reads a part of the samples, and another number of ranks wrote the checkpoint.
        """
        if self._epochs is None:
            return
        self._order.begin(type(getattr(self._loader, "dataset", None)).__name__)
        if resumed is not None:
            self._expect_same_ranks(resumed)
            self._epochs.put_back(resumed["start"])
            # A stream has the checksum of only this replica's samples, which depend on the number of ranks.
            is_comparable = resumed["world_size"] == dist.get_world_size() or not self._is_stream
            self._order.expect(resumed["after"] if is_comparable else None)
        self._start_states = self._epochs.states_now()
        self._num_trained = num_trained
        self._number = number

    @property
    def has_length(self) -> bool:
        """True if the Trainer can count the batches of an epoch."""
        return bool(has_length(self._loader))

    @property
    def _is_stream(self) -> bool:
        return isinstance(getattr(self._loader, "dataset", None), IterableDataset)

    def _expect_same_ranks(self, resumed: Entries) -> None:
        """Refuse another number of ranks if each rank reads a part of the samples. Raises `SamplingError`."""
        present = {"in_turn_of": self._ranks_per_batch, "world_size": dist.get_world_size()}
        saved = {name: resumed[name] for name in present}
        if saved != present and max(saved["in_turn_of"], self._ranks_per_batch) > 1:
            raise SamplingError(
                "the sampler divides samples among ranks (as a DistributedSampler over all ranks does), but the "
                f"checkpoint was written by {saved['world_size']} ranks, and this job has {present['world_size']}. So "
                "the samples that remain of the epoch cannot be determined. Resume with as many ranks, or set "
                "ignore_data_skip=True, which begins the epoch anew."
            )

    def count_trained(self, num_batches: int) -> None:
        """Count batches of this rank that are trained in the present epoch."""
        self._num_trained += num_batches

    def state(self) -> Entries | None:
        """Return the state that `begin` needs to resume the present epoch; None before the first epoch."""
        if self._start_states is None:
            return None
        num_drawn = num_batches_drawn(self._loader, self._num_trained // self._ranks_per_batch)
        return {
            "epoch": self._number,
            "used": self._num_trained,
            "start": self._start_states,
            "after": self._order.after(num_drawn),
            "in_turn_of": self._ranks_per_batch,
            "world_size": dist.get_world_size(),
        }

    def warn_unless_seeded(self) -> None:
        """Warn, for a checkpoint without the random states of its epoch, that the rest of the epoch may differ.

        The rest is the same, and nothing is logged, if the sampler is seeded by the epoch's number.
        """
        class_names = [type(part).__name__ for part in KNOWN_LOADERS.parts(self._loader)]
        if not _SEEDED_BY_EPOCH & set(class_names) and dist.get_rank() == 0:
            logger.warning(
                "the checkpoint lacks the random states with which its epoch began, since it was saved by an older "
                "ds_hetero or without it. The rest of the epoch may have samples that were trained already (%s). To be "
                "sure, set ignore_data_skip=True, which begins the epoch anew.",
                ", ".join(name for name in class_names if name.endswith(("Sampler", "Dataset"))) or "no sampler",
            )


# Attribute of a Trainer. Some of TRL's trainers cannot be hashed, so a dictionary by trainer would not do.
_EPOCHS = "_ds_hetero_epochs"


def epochs_of(trainer: Trainer) -> TrainedEpochs:
    """Return the epochs of a Trainer's present training."""
    epochs: TrainedEpochs = vars(trainer).setdefault(_EPOCHS, TrainedEpochs())
    return epochs


def forget_epochs(trainer: Trainer) -> None:
    """Discard the epochs of a Trainer's earlier training."""
    vars(trainer).pop(_EPOCHS, None)


def run_epoch(registry: Registry, stock: Function, trainer: Trainer, *args: object, **kwargs: object) -> object:
    """Replace ``Trainer._run_epoch``: restore the random states of a resumed epoch before stock draws its order."""
    if not registry.adapters.processes.asks_for_engine(trainer.accelerator):
        return stock(trainer, *args, **kwargs)
    arguments = inspect.signature(stock).bind(trainer, *args, **kwargs).arguments
    checkpoint = arguments["resume_from_checkpoint"]
    num_trained = arguments["steps_trained_in_current_epoch"]
    is_first_epoch = arguments["epoch"] == arguments["epochs_trained"]
    is_resumed_epoch = checkpoint is not None and is_first_epoch and num_trained > 0
    epochs = epochs_of(trainer)
    resumed = _read_state(Path(checkpoint)) if is_resumed_epoch else None
    if is_resumed_epoch and resumed is None:
        epochs.warn_unless_seeded()
    if resumed is not None and not epochs.has_length:
        # The Trainer takes all steps of a stream for one epoch, so it would also skip the batches of earlier epochs.
        epochs.offset = resumed["epoch"] - arguments["epoch"]
        num_trained = resumed["used"]
        arguments["steps_trained_in_current_epoch"] = num_trained
    arguments["epoch"] += epochs.offset
    if is_resumed_epoch:
        arguments["epochs_trained"] = arguments["epoch"]
    epochs.begin(arguments["epoch"], resumed, num_trained if is_resumed_epoch else 0)
    return stock(**arguments)


def save_epoch(trainer: Trainer, folder: Path) -> None:
    """Write the state of the present epoch to this rank's file."""
    state = epochs_of(trainer).state()
    if state is not None:
        write_epoch(state, folder)


def write_epoch(state: Entries, folder: Path) -> None:
    """Write a `TrainedEpochs.state` to the file that `run_epoch` reads."""
    torch.save(state, folder / _FILE_OF_RANK.format(dist.get_rank()))


def _read_state(folder: Path) -> Entries | None:
    """Return the state that this rank saved; None if the checkpoint has none.

    If another number of ranks wrote the checkpoint, the state of rank 0 is returned, because all ranks draw the same
    order.

    Collectives: one `on_all_ranks`.
    """

    def read() -> Entries | None:
        for rank in (dist.get_rank(), 0):
            path = folder / _FILE_OF_RANK.format(rank)
            if path.is_file():
                state: Entries = torch.load(path, map_location="cpu", weights_only=True)
                if rank == 0 or state["world_size"] == dist.get_world_size():
                    return state
        return None

    states: list[Entries | None] = []
    on_all_ranks(lambda: states.append(read()))  # so that an error of one rank is raised on all
    return states[0]
