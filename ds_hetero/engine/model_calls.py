"""Loader, loss and mean of a `Handle`, for each kind of model: split over the sequence, whole, or cut into stages."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ds_hetero.engine.adapters import SplitModel
from ds_hetero.engine.known_loaders import KNOWN_LOADERS
from ds_hetero.engine.loader import ModelLoader, WholeLoader
from ds_hetero.engine.mean_of_tokens import token_mean
from ds_hetero.engine.registry import Registry
from ds_hetero.engine.whole_model import WholeModel
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
    """Calls of a `Handle` about a model that runs whole on every rank; the arguments are those of its methods.

    Args:
        samples: the model, where its replicas take different batches.
    """

    def __init__(self, model: nn.Module, samples: WholeModel | None = None) -> None:
        parameter = next(model.parameters(), None)
        self.device = default_device() if parameter is None else parameter.device
        self._samples = samples

    def dataloader(self, dataloader: Iterable[Any], device: torch.device, batches: BatchesOfRanks) -> Iterable[Any]:
        """Wrap a loader of whole batches."""
        if self._samples is None:
            return WholeLoader(dataloader, device)
        return SampleLoader(dataloader, self._samples, device, batches, KNOWN_LOADERS)

    def loss(self, outputs: Any, batch: Batch, num_items: NumItems) -> Tensor:
        """Return the loss of the whole batch."""
        loss: Tensor = outputs.loss
        if num_items is None:
            return loss
        factor = self.count_labels(batch) * dist.get_world_size() / num_items
        return loss * factor if self._samples is None else scaled_loss(loss, factor)

    def count_labels(self, batch: Batch) -> Tensor:
        """[] labels of the batch that count: none of a copy that only fills an optimizer step up."""
        counted = labels_that_count(batch).ne(IGNORE_INDEX).sum()
        return counted * 0 if self._samples is not None and self._samples.only_fills_up else counted

    def mean(self, values: Tensor, batch: Batch, where: Tensor | None, num_items: NumItems) -> Tensor:
        """The mean over the whole batch."""
        samples = self._samples
        if num_items is None or not values.dim():
            return token_mean(values, batch, where, None, None)
        if samples is None:
            return token_mean(values, batch, where, None, num_items)
        if not samples.training:
            return token_mean(values, batch, where, None, None)  # the batch's own, as the loss beside it
        if samples.only_fills_up:
            where = torch.zeros(values.shape[:2], dtype=torch.bool, device=values.device)
        term = token_mean(values, batch, where, None, num_items)
        if term.grad_fn is not None:
            samples.times_ranks.append(term.grad_fn)
        return term


class _SplitCalls(ModelCalls):
    """Calls about a model that is split over the sequence."""

    def __init__(self, model: SplitModel) -> None:
        super().__init__(model.model)
        self._model = model

    def dataloader(self, dataloader: Iterable[Any], device: torch.device, batches: BatchesOfRanks) -> Iterable[Any]:
        return ModelLoader(dataloader, self._model, device, batches)

    def loss(self, outputs: Any, batch: Batch, num_items: NumItems) -> Tensor:
        model, replica, divisor = self._model, self._model.replica, 1
        if has_loss_of_batch(outputs) and num_items is None:
            return super().loss(outputs, batch, None)
        if model.own_loss:
            raise ConfigError(
                f"handle.loss weighs the cross entropy of tokens, and {type(model.model).__name__} has a loss function "
                f"of its own, {model.own_loss}, whose value on the whole batch is engine(**batch).loss. Give "
                "handle.loss these outputs without num_items, or take their loss."
            )
        labels = labels_that_count(batch)
        num_tokens = labels.ne(IGNORE_INDEX).sum()
        mean = None if has_loss_of_batch(outputs) else getattr(outputs, "loss", None)
        if mean is None:
            loss_sum = cross_entropy_sum(outputs.logits, labels) + num_tokens * model.router_term(outputs)
        else:
            loss_sum = mean * num_tokens
        if torch.is_grad_enabled():  # else it is of an evaluation, maybe amid an accumulation
            model.note_scaled_loss()
        if num_items is None and replica.batch_split is not None:
            num_items, divisor = _items_of_step(batch), replica.batch_split.micro_steps
        with model.clock.phase(IDLE, "loss"):
            return sequence_parallel_loss(loss_sum, num_tokens, replica, num_items, divisor)

    def mean(self, values: Tensor, batch: Batch, where: Tensor | None, num_items: NumItems) -> Tensor:
        local_weights = self._model.local_weights
        if local_weights is not None and torch.is_grad_enabled():
            local_weights.note_values(values)
        return token_mean(values, batch, where, self._model.replica, num_items)


class _StageCalls(ModelCalls):
    """Calls about a model that is cut into stages of pipelines, which compute the loss of the global batch."""

    def dataloader(self, dataloader: Iterable[Any], device: torch.device, batches: BatchesOfRanks) -> Iterable[Any]:
        return SameBatches(dataloader, device, KNOWN_LOADERS)

    def loss(self, outputs: Any, batch: Batch, num_items: NumItems) -> Tensor:
        return super().loss(outputs, batch, None)

    def mean(self, values: Tensor, batch: Batch, where: Tensor | None, num_items: NumItems) -> Tensor:
        raise ConfigError("handle.mean has no tokens to take a mean over: pipelines compute their loss themselves.")


def calls_of(registry: Registry, model: nn.Module) -> ModelCalls:
    """The calls about a model that `deepspeed.initialize` was given."""
    if registry.is_pipelined(model):
        return _StageCalls(model)
    prepared = registry.find(model)
    if prepared is None:
        return ModelCalls(model)
    if not isinstance(prepared.model, WholeModel):
        return _SplitCalls(prepared.model)
    return ModelCalls(model, prepared.model if prepared.model.takes_unlike_batches else None)


def labels_that_count(batch: Batch) -> Tensor:
    """Labels of the loss: those that a loader moved to their predecessors, or that the model will move."""
    labels: Tensor = batch["shift_labels"] if "shift_labels" in batch else batch["labels"][:, 1:]
    return labels


def _items_of_step(batch: Batch) -> int:
    info = shard_info(batch["position_ids"])
    if info is None or info.num_items is None:
        raise BatchError(
            "replicas that take different batches are weighed by their tokens, but how many the optimizer step has is "
            "not known of this batch. Give handle.loss the batch from handle.dataloader as it is, not a copy, or "
            "num_items from handle.count_items."
        )
    return info.num_items
