"""Loader for accelerate if ranks train on batches of different sizes: in evaluation, all batches have one size."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from ds_hetero.engine.known_loaders import KNOWN_LOADERS
from ds_hetero.engine.trained.unlike_batches import UnlikeBatches
from ds_hetero.runtime.data.fetch import Progress
from ds_hetero.runtime.data.loader_around import LoaderAround
from ds_hetero.runtime.data.loss_units import Batch
from ds_hetero.runtime.data.sample_loader import SampleLoader
from ds_hetero.runtime.data.shard_info import is_placeholder, shard_info

if TYPE_CHECKING:
    from ds_hetero.engine.registry import Registry


def stands_for_none(batch: Any) -> bool:
    """Return whether a batch counts no token: its rank has none of its tokens, or it only fills up a step."""
    positions = batch.get("position_ids") if isinstance(batch, Mapping) else None
    if not isinstance(positions, Tensor):
        return False
    info = shard_info(positions)
    return (info is not None and info.is_filler) or is_placeholder(positions)


class LoaderByMode(LoaderAround):
    """Yields batches of this rank's size while the model is in ``train()``, accelerate's equal ones in ``eval()``.

    Args:
        equal: the loader that accelerate has prepared.
        dataloader: the loader of all samples that was given to accelerate, with the batch size of a rank.
    """

    def __init__(self, equal: Batch, dataloader: DataLoader[Batch]) -> None:
        self.dataloader = equal
        self._all_samples = dataloader
        self._skipped = 0  # micro-batches that the next epoch of training leaves out
        self._batches: UnlikeBatches | None = None
        self._samples: SampleLoader | None = None

    def bind(self, registry: Registry, model: nn.Module, device: torch.device) -> None:
        """Let ``model``, which was prepared together with this loader, decide from now on which batches are yielded."""
        trained = registry.find(model)
        if trained is None or trained.batches is None:
            return
        self._batches = trained.batches
        self._samples = SampleLoader(self._all_samples, self._batches, device, None, KNOWN_LOADERS, is_of_rank=True)

    @property
    def _training_loader(self) -> SampleLoader | None:
        """The loader of this rank's batches, if the model is in training."""
        return self._samples if self._batches is not None and self._batches.training else None

    def __iter__(self) -> Iterator[Batch]:
        samples, skipped = self._training_loader, self._skipped
        self._skipped = 0
        if samples is None:
            yield from self.dataloader
            return
        if skipped:
            assert self._batches is not None
            samples.begin_at(Progress(*divmod(skipped, self._batches.split.micro_steps)))
        yield from samples

    def __len__(self) -> int:
        training_loader = self._training_loader
        return len(self.dataloader if training_loader is None else training_loader)

    def set_epoch(self, epoch: int) -> None:
        """Set the number of the next epoch, by which samples are shuffled."""
        if hasattr(self.dataloader, "set_epoch"):
            self.dataloader.set_epoch(epoch)
        if self._samples is not None:
            self._samples.set_epoch(epoch)

    def skipping(self, num_batches: int, skip: Callable[[Batch, int], Batch]) -> LoaderByMode:
        """Return a loader whose next epoch of training begins after ``num_batches`` micro-batches.

        Args:
            skip: accelerate's function that does so for its own loaders.
        """
        later = LoaderByMode(skip(self.dataloader, num_batches), self._all_samples)
        later._batches, later._samples, later._skipped = self._batches, self._samples, num_batches
        return later
