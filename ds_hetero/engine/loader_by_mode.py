"""A loader of accelerate where ranks take different batches: those while the model trains, equal ones otherwise."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from ds_hetero.engine.known_loaders import KNOWN_LOADERS
from ds_hetero.engine.whole_model import WholeModel
from ds_hetero.runtime.data.batch_mode import LoaderAround
from ds_hetero.runtime.data.fetch import Progress
from ds_hetero.runtime.data.loss_units import Batch
from ds_hetero.runtime.data.sample_loader import SampleLoader
from ds_hetero.runtime.data.shard_info import is_placeholder, shard_info

if TYPE_CHECKING:
    from ds_hetero.engine.registry import Registry


def stands_for_none(batch: Any) -> bool:
    """Whether the batch stands for none: on a rank without tokens, or to fill up an optimizer step."""
    positions = batch.get("position_ids") if isinstance(batch, Mapping) else None
    if not isinstance(positions, Tensor):
        return False
    info = shard_info(positions)
    return (info is not None and info.is_filler) or is_placeholder(positions)


class LoaderByMode(LoaderAround):
    """Yields this rank's unlike micro-batches while the model is in ``train()``, accelerate's equal ones in ``eval()``.

    Args:
        dataloader: of all samples, as it was given to accelerate, with the batch size of a rank.
    """

    def __init__(self, equal: Batch, dataloader: DataLoader[Batch]) -> None:
        self.dataloader = equal
        self._given, self._skipped = dataloader, 0
        self._model: WholeModel | None = None
        self._samples: SampleLoader | None = None

    def bind(self, registry: Registry, model: nn.Module, device: torch.device) -> None:
        """Yield for this model from now on, which was prepared together with the loader."""
        prepared = registry.find(model)
        if prepared is None or not isinstance(prepared.model, WholeModel):
            return
        self._model = prepared.model
        self._samples = SampleLoader(self._given, self._model, device, None, KNOWN_LOADERS, is_of_rank=True)

    @property
    def _trains(self) -> SampleLoader | None:
        return self._samples if self._model is not None and self._model.training else None

    def __iter__(self) -> Iterator[Batch]:
        samples, skipped = self._trains, self._skipped
        self._skipped = 0
        if samples is None:
            yield from self.dataloader
            return
        if skipped:
            assert self._model is not None and self._model.replica.batch_split is not None
            samples.begin_at(Progress(*divmod(skipped, self._model.replica.batch_split.micro_steps)))
        yield from samples

    def __len__(self) -> int:
        return len(self.dataloader if self._trains is None else self._trains)

    def set_epoch(self, epoch: int) -> None:
        """Tell the loaders which epoch comes next."""
        if hasattr(self.dataloader, "set_epoch"):
            self.dataloader.set_epoch(epoch)
        if self._samples is not None:
            self._samples.set_epoch(epoch)

    def skipping(self, num_batches: int, skip: Callable[[Batch, int], Batch]) -> LoaderByMode:
        """Return a loader whose next epoch of training begins after ``num_batches`` micro-batches."""
        later = LoaderByMode(skip(self.dataloader, num_batches), self._given)
        later._model, later._samples, later._skipped = self._model, self._samples, num_batches
        return later
