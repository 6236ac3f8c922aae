"""Loaders for a model that is split over the sequence: shards while it trains, whole batches in evaluation."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, Literal

import torch

from ds_hetero.engine.evaluation import check_evaluated
from ds_hetero.engine.known_loaders import KNOWN_LOADERS
from ds_hetero.engine.read_marks import note_reading
from ds_hetero.engine.trained.split_model import SplitModel
from ds_hetero.errors import ConfigError
from ds_hetero.runtime.data.loader import ShardedLoader
from ds_hetero.runtime.data.loader_around import LoaderAround
from ds_hetero.runtime.data.recent_shards import remember_shard
from ds_hetero.runtime.data.sample_loader import on_device
from ds_hetero.runtime.data.shard_info import attach, shard_info
from ds_hetero.runtime.data.shards import model_inputs
from ds_hetero.runtime.data.whole_batches import BatchReading
from ds_hetero.runtime.replica import Replica


class ModelLoader(ShardedLoader):
    """A `ShardedLoader` for one model, which yields batches on ``device``.

    If the model is in evaluation when an epoch's first batch is requested, the epoch yields the wrapped loader's whole
    batches. A rank that has no token of a batch gets one column of placeholders, which count in no attention or loss.
    """

    def __init__(
        self,
        dataloader: Iterable[Any],
        model: SplitModel,
        device: torch.device,
        batches: Literal["same", "own"] | None = None,
    ) -> None:
        self._model, self._target = model, device
        super().__init__(
            dataloader,
            model.replica,
            batches=batches,
            reading=BatchReading(
                keep_labels=not model.model_loss.moves_labels,
                keep_inputs=model.cuts_inputs,
                by_documents=model.placement.by_documents,
                joins_rows=model.placement.asked_for_documents,
                complete=model.complete,
                keeps=model.checks.is_due,
            ),
            placer=model.placement.place,
            plan_ahead=(lambda: model.placement.placer) if model.placement.asked_for_documents else None,
            names=KNOWN_LOADERS,
        )

    @property
    def replica(self) -> Replica:
        """The model's replica, whose schedule may change while it trains."""
        return self._model.replica

    def __iter__(self) -> Iterator[Any]:
        self._expect_split_model()
        note_reading(self.whole, shards=self._model.takes_shards and not self._model.evaluation.takes_forwards)
        if self._model.evaluation.takes_forwards:
            for batch in self.whole:
                check_evaluated(self._model, batch)
                yield on_device(batch, self._target)
            return
        if not self._model.takes_shards:
            yield from WholeLoader(self.whole, self._target)
            return
        self._model.expect_tokenwise()
        for shard in super().__iter__():
            self._verify()
            inputs = model_inputs(shard, self._target)
            info = shard_info(inputs["position_ids"])
            assert info is not None
            if self._model.placement.as_loaded is not None:
                info = self._model.placement.as_loaded.with_number(info)
                attach(inputs["position_ids"], info)
            self._model.placement.note_shard(info)
            remember_shard(shard)
            yield inputs
            self._expect_split_model()

    def _expect_split_model(self) -> None:
        """Check that the model is still split. Raises `ConfigError`: by now it takes whole sequences."""
        if self._model.is_restored:
            raise ConfigError(
                "this loader cuts batches for a model that is not split any more: its handle was undone, or the model "
                "was prepared again under another configuration. Wrap the loader again, with handle.dataloader of the "
                "handle that trains the model now."
            )

    def _verify(self) -> None:
        """Run the self-check on those batches of this fetch that have features which no checked batch had."""
        if self._batches.keeps_on_a_rank:
            self._model.checks.check_batches_of_ranks(self._batches.take_kept_batches())


class WholeLoader(LoaderAround):
    """Yields the wrapped loader's batches on ``device``, for models that take whole batches, as in sharded calls.

    Args:
        dataloader: yields mappings, lists of prompts, or whatever a module that is not split takes.
        model: a model that is trained by sharded calls, which is compared with one process on the batches; None if
            there is none.
    """

    def __init__(self, dataloader: Iterable[Any], device: torch.device, model: SplitModel | None = None) -> None:
        self.dataloader = dataloader
        self._target, self._model = device, model

    def __iter__(self) -> Iterator[Any]:
        note_reading(self.dataloader, shards=False)
        for batch in self.dataloader:
            if self._model is not None:
                self._verify(self._model, batch)
            yield on_device(batch, self._target)

    def skipping(self, num_batches: int, skip: Callable[[Any, int], Any]) -> WholeLoader:
        """Return a loader without the first ``num_batches``; see `ShardedLoader.skipping`."""
        return WholeLoader(skip(self.dataloader, num_batches), self._target, self._model)

    def _verify(self, model: SplitModel, batch: Any) -> None:
        """Compare the model with one process on the tokens of a batch, each the label of the one before it."""
        if not model.pools and "input_ids" in batch:
            piece = {name: batch[name] for name in ("input_ids", "attention_mask") if name in batch}
            model.checks.check_same_batch({**piece, "labels": batch["input_ids"]})
