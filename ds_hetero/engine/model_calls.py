"""Implement the calls of a `Handle` for each kind of model: split over the sequence, whole, or cut into stages."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal

import torch
from torch import Tensor, nn

from ds_hetero.engine.known_loaders import KNOWN_LOADERS
from ds_hetero.engine.loader import ModelLoader, WholeLoader
from ds_hetero.engine.mean_of_tokens import ranks_counted, token_mean
from ds_hetero.engine.registry import Registry
from ds_hetero.engine.trained.split_model import SplitModel
from ds_hetero.engine.trained.unlike_batches import UnlikeBatches
from ds_hetero.errors import BatchError, ConfigError
from ds_hetero.runtime.data.sample_loader import SampleLoader
from ds_hetero.runtime.data.shard_info import shard_info
from ds_hetero.runtime.data.shards import IGNORE_INDEX, Batch
from ds_hetero.runtime.devices import default_device
from ds_hetero.runtime.loss import (
    cross_entropy_sum,
    has_loss_of_batch,
    scaled_loss,
    sequence_parallel_loss,
)
from ds_hetero.runtime.pipeline.batches import SameBatches
from ds_hetero.runtime.step_clock import IDLE

BatchesOfRanks = Literal["same", "own"] | None
NumItems = Tensor | float | None


class ModelCalls:
    """Calls of a `Handle` for a model that runs whole on every rank; methods have the arguments of the handle's.

    Args:
        unlike: the batches of the ranks, if these have different sizes; None if all are equal.
    """

    def __init__(self, model: nn.Module, unlike: UnlikeBatches | None = None) -> None:
        parameter = next(model.parameters(), None)
        self.device = default_device() if parameter is None else parameter.device
        self._unlike = unlike

    def dataloader(self, dataloader: Iterable[Any], device: torch.device, batches: BatchesOfRanks) -> Iterable[Any]:
        """Wrap a loader of whole batches, see `Handle.dataloader`."""
        if self._unlike is None:
            return WholeLoader(dataloader, device)
        return SampleLoader(dataloader, self._unlike, device, batches, KNOWN_LOADERS)

    def loss(self, outputs: Any, batch: Batch, num_items: NumItems) -> Tensor:
        """Return the loss of the whole batch, see `Handle.loss`."""
        loss: Tensor = outputs.loss
        if num_items is None:
            return loss
        factor = self.count_labels(batch) * ranks_counted(num_items) / num_items
        return loss * factor if self._unlike is None else scaled_loss(loss, factor)

    def count_labels(self, batch: Batch) -> Tensor:
        """Return the number of labels of a batch that count, []; 0 for a copy that only fills up an optimizer step."""
        counted = labels_that_count(batch).ne(IGNORE_INDEX).sum()
        return counted * 0 if self._unlike is not None and self._unlike.only_fills_up else counted

    def mean(self, values: Tensor, batch: Batch, where: Tensor | None, num_items: NumItems) -> Tensor:
        """Return the mean over the whole batch, see `Handle.mean`."""
        unlike = self._unlike
        if num_items is None or not values.dim():
            return token_mean(values, batch, where, None, None)
        if unlike is None:
            return token_mean(values, batch, where, None, num_items)
        if not unlike.training:
            return token_mean(values, batch, where, None, None)  # in evaluation over this batch, as the model's loss is
        if unlike.only_fills_up:
            where = torch.zeros(values.shape[:2], dtype=torch.bool, device=values.device)
        term = token_mean(values, batch, where, None, num_items)
        if term.grad_fn is not None:
            unlike.times_ranks.append(term.grad_fn)
        return term


class _SplitCalls(ModelCalls):
    """Calls for a model that is split over the sequence."""

    def __init__(self, model: SplitModel) -> None:
        super().__init__(model.model)
        self._model = model

    def dataloader(self, dataloader: Iterable[Any], device: torch.device, batches: BatchesOfRanks) -> Iterable[Any]:
        return ModelLoader(dataloader, self._model, device, batches)

    def loss(self, outputs: Any, batch: Batch, num_items: NumItems) -> Tensor:
        model, replica, divisor = self._model, self._model.replica, 1
        if has_loss_of_batch(outputs) and num_items is None:
            return super().loss(outputs, batch, None)
        if model.model_loss.custom_function:
            raise ConfigError(
                f"handle.loss weighs the cross entropy of tokens, but {type(model.model).__name__} has another loss "
                f"function, {model.model_loss.custom_function}, whose value on the whole batch is engine(**batch).loss."
                " Take that, or call handle.loss(outputs, batch) without num_items."
            )
        labels = labels_that_count(batch)
        num_tokens = labels.ne(IGNORE_INDEX).sum()
        mean = None if has_loss_of_batch(outputs) else getattr(outputs, "loss", None)
        if mean is None:
            loss_sum = cross_entropy_sum(outputs.logits, labels) + num_tokens * model.model_loss.router_term(outputs)
        else:
            loss_sum = mean * num_tokens
        if torch.is_grad_enabled():  # without gradients it may be an evaluation in the middle of an accumulation
            model.losses.note_scaled()
        if num_items is None and replica.batch_split is not None:
            num_items, divisor = _items_of_step(batch), replica.batch_split.micro_steps
        with model.clock.phase(IDLE, "loss"):
            return sequence_parallel_loss(loss_sum, num_tokens, replica, num_items, divisor)

    def mean(self, values: Tensor, batch: Batch, where: Tensor | None, num_items: NumItems) -> Tensor:
        local_weights = self._model.losses.local_weights
        if local_weights is not None and torch.is_grad_enabled():
            local_weights.note_values(values)
        return token_mean(values, batch, where, self._model.replica, num_items)


class _StageCalls(ModelCalls):
    """Calls for a model that is cut into stages of pipelines, which compute the loss of the global batch."""

    def dataloader(self, dataloader: Iterable[Any], device: torch.device, batches: BatchesOfRanks) -> Iterable[Any]:
        return SameBatches(dataloader, device, KNOWN_LOADERS)

    def loss(self, outputs: Any, batch: Batch, num_items: NumItems) -> Tensor:
        return super().loss(outputs, batch, None)

    def mean(self, values: Tensor, batch: Batch, where: Tensor | None, num_items: NumItems) -> Tensor:
        raise ConfigError(
            "handle.mean does not work with pipelines, whose last stages compute the loss. Leave the term out, or "
            "train without pipelines."
        )


def calls_of(registry: Registry, model: nn.Module) -> ModelCalls:
    """Return the calls for a model that `deepspeed.initialize` was given."""
    trained = registry.find(model)
    if trained is None:
        return ModelCalls(model)
    if trained.stage is not None:
        return _StageCalls(model)
    if trained.sequences is not None:
        return _SplitCalls(trained.sequences)
    return ModelCalls(model, trained.batches)


def labels_that_count(batch: Batch) -> Tensor:
    """Return the labels that the loss is computed from, at the tokens that predict them or one token later.

    A loader has moved ``shift_labels`` to the tokens that predict them. The model will move ``labels``, so that the
    first of them does not count.
    """
    labels: Tensor = batch["shift_labels"] if "shift_labels" in batch else batch["labels"][:, 1:]
    return labels


def _items_of_step(batch: Batch) -> int:
    """Return the number of labels of the optimizer step that a batch belongs to. Raises `BatchError`: unknown."""
    info = shard_info(batch["position_ids"])
    if info is None or info.num_items is None:
        raise BatchError(
            "replicas that take different batches are weighed by their tokens, but for this batch it is not known how "
            "many tokens the optimizer step has. Give handle.loss the batch from handle.dataloader as it is, not a "
            "copy, or give it num_items from handle.count_items."
        )
    return info.num_items
