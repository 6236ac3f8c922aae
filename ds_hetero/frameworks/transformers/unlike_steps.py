"""Optimizer steps of the Trainer if every rank takes a different batch: micro-batches, and the scale of their losses.

The Trainer itself takes such ranks for ordinary data parallelism; only the training loader differs. Two things are done
here:

    micro-batches    a rank that reads fewer than the others gets dummy batches, which count nothing (`DummyBatch`)
    losses           scaled inside ``Trainer.compute_loss``, so that the engine's average over ranks is the loss of the
                     global batch in one process

Example: with "batch": [6, 2] and micro-batches of 2 samples, rank 0 reads 3 micro-batches. Rank 1 reads one, and gets
2 dummy batches.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import Trainer

from ds_hetero.engine.registry import Registry
from ds_hetero.engine.trained.unlike_batches import UnlikeBatches
from ds_hetero.engine.trained.unlike_losses import UnlikeLosses
from ds_hetero.errors import BatchError
from ds_hetero.runtime.collectives import on_all_ranks
from ds_hetero.runtime.data.loss_units import Batch, UnitCounts, labels_of, num_rows
from ds_hetero.runtime.data.sample_loader import MicroBatchCounts
from ds_hetero.runtime.data.sampling import reader_inside
from ds_hetero.runtime.peers.watch import waiting_for_peers

# Trainers of TRL whose own ``compute_loss`` multiplies the loss by the number of ranks.
_MULTIPLY_BY_RANKS = frozenset({"SFTTrainer"})

ComputeLoss = Callable[[object, Batch, Tensor | None], tuple[Tensor, object]]
"""``Trainer.compute_loss`` as a function of model, batch and number of items; returns the loss and the outputs."""


class DummyBatch(dict[str, object]):
    """A copy of an earlier batch for a rank with fewer micro-batches in a step than others; it counts no samples."""


class _RankBatches(NamedTuple):
    """What a rank reports to the others about the micro-batches that it has read for a step."""

    counts: list[UnitCounts]  # samples and labels of each micro-batch
    order_checksum: int  # of the samples that the rank's reader drew for all ranks; 0 without such a reader


class UnlikeSteps:
    """The optimizer steps of one training.

    Attributes:
        is_scaling: True while a subclass's ``compute_loss`` runs inside `scaling_own_loss`; the loss that
            ``Trainer.compute_loss`` returns is then only a part of the loss that is scaled.
        has_own_compute_loss: True if the Trainer's class overrides ``compute_loss``.
    """

    def __init__(self, trainer: Trainer, batches: UnlikeBatches, losses: UnlikeLosses) -> None:
        self._trainer, self._batches, self._losses = trainer, batches, losses
        self._has_read = False  # any rank has read a batch
        self._latest: Batch | None = None  # this rank's latest batch, from which dummy batches are made
        self.is_scaling = False
        self.has_own_compute_loss = type(trainer).compute_loss is not Trainer.compute_loss

    @contextlib.contextmanager
    def scaling_own_loss(self) -> Iterator[None]:
        """Inside the context, scale the loss that the ``compute_loss`` of the Trainer's subclass returns.

        A subclass may add terms to the loss of ``super().compute_loss``, so its result is scaled, not that of the call
        inside.
        """
        trainer, own_compute_loss = self._trainer, self._trainer.compute_loss
        multiplies_by_ranks = any(kind.__name__ in _MULTIPLY_BY_RANKS for kind in type(trainer).__mro__)

        def compute_unscaled(model: object, batch: Batch, num_items: Tensor | None) -> tuple[Tensor, object]:
            loss = own_compute_loss(model, {**batch}, num_items_in_batch=num_items)
            if num_items is not None and multiplies_by_ranks:
                self.note_multiplied(loss)
            return loss, None

        def compute_scaled(model: object, inputs: Batch, num_items_in_batch: Tensor | None = None) -> Tensor:
            return self.scaled_loss(compute_unscaled, model, inputs, num_items_in_batch)[0]

        trainer.compute_loss, self.is_scaling = compute_scaled, True
        try:
            yield
        finally:
            del trainer.compute_loss
            self.is_scaling = False

    def read_step(
        self, batches: Iterator[Batch], num_batches: int, device: torch.device
    ) -> tuple[list[Batch], Tensor | None]:
        """Read this rank's micro-batches of an optimizer step; see ``Trainer.get_batch_samples``.

        Args:
            batches: of this rank, from the training loader.
            num_batches: micro-batches of the rank that has the most.

        Returns:
            ``num_batches`` micro-batches, filled up with dummy batches, or none at the end of the epoch; and
            ``num_items_in_batch`` of the step, see `_num_items`.

        Caller: every rank of the world.
        Collectives: one `on_all_ranks`.

        Raises:
            BatchError: on every rank; ranks draw different samples, or the first step is too short.
        """
        real_batches: list[Batch] = []

        def read_batches() -> _RankBatches:
            reader = reader_inside(self._trainer.callback_handler.train_dataloader)
            self._batches.note_reader(reader)
            real_batches.extend(islice(batches, num_batches))
            counts = [UnitCounts.of(batch, num_rows(batch)) for batch in real_batches]
            return _RankBatches(counts, 0 if reader is None else reader.oldest_checksum())

        with waiting_for_peers("reading the next batch"):
            by_rank = on_all_ranks(read_batches)
        if not any(rank_batches.counts for rank_batches in by_rank):
            return [], None
        step_counts = _sum_of_step(by_rank)
        self._expect_right_batches(by_rank, step_counts)
        self._has_read = True
        if real_batches:
            self._latest = real_batches[-1]
        assert self._latest is not None, "every rank has read a batch in the first step"
        dummies = [DummyBatch(self._latest) for _ in range(num_batches - len(real_batches))]
        counts = [*by_rank[dist.get_rank()].counts, *[UnitCounts(0)] * len(dummies)]
        num_real = max(len(rank_batches.counts) for rank_batches in by_rank)
        weights: list[MicroBatchCounts] = []
        for index, counts_of_batch in enumerate(counts):
            weights.append(
                MicroBatchCounts(
                    index=index, counts=counts_of_batch, counts_of_step=step_counts, micro_batches=num_real
                )
            )
        self._batches.order.give_step(weights)
        num_items = self._num_items(real_batches[0] if real_batches else self._latest, step_counts, device)
        return [*real_batches, *dummies], num_items

    def _expect_right_batches(self, by_rank: Sequence[_RankBatches], step_counts: UnitCounts) -> None:
        """Refuse ranks that draw different samples, and a first step in which a rank gets no samples.

        A rank without samples in the first step has no earlier batch to make a dummy batch from.

        Raises:
            BatchError: on every rank.
        """
        checksums = {rank_batches.order_checksum for rank_batches in by_rank if rank_batches.counts}
        if len(checksums) > 1:
            raise BatchError(
                "the ranks do not draw the same samples, so some would be trained twice and others never. Seed "
                "shuffling alike on all ranks."
            )
        idle_ranks = [rank for rank, rank_batches in enumerate(by_rank) if not rank_batches.counts]
        if idle_ranks and not self._has_read:
            raise BatchError(
                f"the first step has {step_counts.sample_mean} samples, too few for ranks {idle_ranks} to get one. "
                "Give the Trainer more samples, or smaller batches."
            )

    def _num_items(self, batch: Batch, step_counts: UnitCounts, device: torch.device) -> Tensor | None:
        """Return ``num_items_in_batch``: the labels of the step, by which the Trainer divides a sum of losses.

        None if, by its own rule, the Trainer takes the mean of each micro-batch instead: the batch has no labels, the
        model does not take the number, or the section declares what the loss is a mean over.

        Args:
            batch: any real batch of this rank, for the kind of its labels.
        """
        trainer = self._trainer
        labels, are_shifted = labels_of(batch)
        takes_items = trainer.model_accepts_loss_kwargs or trainer.compute_loss_func is not None
        is_declared = self._batches.unit.name in UnitCounts._fields
        if labels is None or not takes_items or is_declared:
            return None
        if labels.dim() == 1:  # one label per sample
            num_labels = step_counts.sample_mean
        elif are_shifted or getattr(trainer, "_loss_shifts_labels", True):
            num_labels = step_counts.token_mean
        else:
            num_labels = step_counts.label_mean
        return torch.tensor(num_labels, device=device)

    def scaled_loss(
        self,
        compute: ComputeLoss,
        engine: object,
        inputs: Batch,
        num_items: Tensor | None,
        *,
        multiplies_by_ranks: bool = False,
    ) -> tuple[Tensor, object]:
        """Return the scaled loss of a micro-batch, and the outputs.

        The loss is this rank's summand of the loss of the global batch, times the number of ranks; so the engine's
        average over the ranks gives the global loss.

        Args:
            multiplies_by_ranks: True for the Trainer's own ``compute_loss``, which multiplies a loss that was divided
                by ``num_items`` by the number of ranks.

        Caller: every rank of the world.
        """
        unlike = self._batches
        if unlike.needs_probe:
            with self._without_metrics():
                unlike.probes.expect_samples_apart(lambda batch: compute(unlike.model, batch, None)[0], inputs)
        unlike.times_ranks.clear()
        loss, outputs = compute(engine, inputs, num_items)
        if multiplies_by_ranks and num_items is not None:
            self.note_multiplied(loss)
        weights = unlike.order.latest
        loss = self._losses.weigh_for_trainer(loss, weights, None if num_items is None else float(num_items))
        if not self._adds_up_means(inputs):
            loss = loss / weights.micro_batches
        return loss, outputs

    def note_multiplied(self, loss: Tensor) -> None:
        """Tell the model the autograd node by which ``loss`` was multiplied by the number of ranks, if it was.

        One process does not multiply, so the node must not count as a part of the loss.
        """
        arguments = self._trainer.args
        takes_items = self._trainer.model_accepts_loss_kwargs or self._trainer.compute_loss_func
        node = loss.grad_fn
        if arguments.average_tokens_across_devices and takes_items and node is not None and "Mul" in node.name():
            self._batches.times_ranks.append(node)

    def _adds_up_means(self, inputs: Batch) -> bool:
        """Return True if the Trainer, in one process, adds up means of micro-batches without dividing by their number.

        The Trainer does so if it gives the model the number of labels in the step: it then expects the model to divide
        by that number. If the model returns the mean over its micro-batch nevertheless, nothing divides this mean.
        """
        is_scaled_by_model = getattr(type(self._trainer), "loss_is_scaled_for_ga", None)
        if is_scaled_by_model is not None:
            return bool(is_scaled_by_model)
        takes_items = "labels" in inputs and self._trainer.model_accepts_loss_kwargs
        return takes_items or self._trainer.compute_loss_func is not None

    @contextlib.contextmanager
    def _without_metrics(self) -> Iterator[None]:
        """Restore TRL's metrics at the end: TRL records every loss that it computes, also those of a probe inside."""
        metrics = copy.deepcopy(getattr(self._trainer, "_metrics", None))
        yield
        if metrics is not None:
            self._trainer._metrics = metrics


def unlike_steps(registry: Registry, trainer: Trainer) -> UnlikeSteps | None:
    """Return the `UnlikeSteps` of a Trainer, made at the first call; None if its ranks take equal batches."""
    trained = registry.find(trainer.model)
    if trained is None or trained.batches is None or trained.losses is None:
        return None
    if not isinstance(trained.trainer_steps, UnlikeSteps):
        trained.trainer_steps = UnlikeSteps(trainer, trained.batches, trained.losses)
    return trained.trainer_steps


def _sum_of_step(by_rank: Sequence[_RankBatches]) -> UnitCounts:
    """Return the samples and labels of all micro-batches of all ranks."""
    counts_of_all: list[UnitCounts] = []
    for rank_batches in by_rank:
        counts_of_all.extend(rank_batches.counts)
    return UnitCounts.total(counts_of_all)
