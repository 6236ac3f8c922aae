"""Scale the losses that scripts give to backward, so that the engine's average of gradients is that of one process.

`Handle.loss` and the Trainer mark the losses that they have scaled already. Any other loss follows a convention
(`ds_hetero.runtime.loss.CONVENTIONS`): the one that ``"loss"`` in the "heterogeneity" section declares, or
``"replica_mean"``, the recipe that accelerate and transformers document. By this recipe all ranks of a replica have the
same value; by the other conventions their values differ. The checks of a step compare the values
(`ds_hetero.runtime.step_checks.token_weights`). If checks are off, the ranks do so at the engine's first backward.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from ds_hetero.engine.trained.model import TrainedModel
from ds_hetero.engine.trained.split_model import SplitModel
from ds_hetero.engine.trained.unlike_batches import UnlikeBatches
from ds_hetero.engine.trained.unlike_losses import UnlikeLosses, find_unweighed_term
from ds_hetero.errors import BatchError, ConfigError
from ds_hetero.runtime.backends import message_device
from ds_hetero.runtime.data.shard_info import shard_info
from ds_hetero.runtime.data.shards import IGNORE_INDEX
from ds_hetero.runtime.loss import has_unscaled_term, is_scaled, rescaled_loss
from ds_hetero.values.section import SECTION

_MIXED_PARTS = (
    "the loss given to backward adds a part from this engine (the model's own loss, handle.loss or handle.mean), which "
    "is weighed by tokens, to a part computed from this rank's shard, which is not: every rank would weigh the second "
    "part alike, though shards are unequal. Take the loss itself from handle.loss(outputs, batch), and make every term "
    "with handle.mean(per_token, batch), the mean over the tokens of the whole batch of values [B, s] (handle = "
    "ds_hetero.register()). It also takes a scalar that is the same on all ranks, such as a penalty on parameters."
)
_TERM_OF_SAMPLES = (
    "the loss given to backward is that of handle.loss, with num_items, plus a term ({}) of this rank's own samples, "
    "or one by an operation that is not known to be of parameters alone: its weight is not known. Make the term with "
    "handle.mean(per_token, batch, num_items=num_items); or leave num_items out of handle.loss: the divisor of every "
    "term is then read from the graph of the loss."
)
_UNSCALED = (
    "backward was called on the loss itself, so that the loss was not scaled for the engine's average of gradients. "
    "Call engine.backward(loss), or take the loss from handle.loss."
)
# Relative difference up to which losses of two ranks count as equal. Ranks that follow the recipe compute with the same
# numbers, but may add them up in another order, or fuse a multiplication and an addition.
_RTOL_SAME_LOSS, _RTOL_SAME_LOSS_HALF = 16 * torch.finfo(torch.float32).eps, 1e-3


class LossScaling(Protocol):
    """Scales the losses given to the backward of one engine."""

    def scale(self, loss: Tensor, divisor: int, steps_done: int) -> Tensor:
        """Return a loss with the value of ``loss`` and with scaled gradients.

        Args:
            loss: a scalar, computed from the batch that the model saw last.
            divisor: the number by which the engine's backward will divide.
            steps_done: optimizer steps that the engine has done.

        Caller: every rank of the world, once per micro-batch.

        Raises:
            ConfigError: on every rank: the loss follows another convention than declared, or is a scaled loss plus a
                term that is not scaled.
            BatchError: on every rank: the batch did not come from the loader, so that its labels or samples are not
                known.
        """

    def end_backward(self) -> None:
        """Clear the state of the latest loss, after its backward."""

    def expect_scaled(self) -> None:
        """Check before a step that its losses were scaled. Raises `ConfigError` on every rank: they were not."""


def scaling_of(trained: TrainedModel) -> LossScaling | None:
    """Return the scaling of a model's losses; None for whole models with equal batches, which need no scaling."""
    if trained.sequences is not None:
        return _ScalingByConvention(trained.sequences)
    if trained.batches is not None and trained.losses is not None:
        return _ScalingByWeight(trained.batches, trained.losses)
    return None


class _ScalingByWeight:
    """Weighs the losses of ranks that take different batches; see `ds_hetero.engine.trained.unlike_losses`."""

    def __init__(self, batches: UnlikeBatches, losses: UnlikeLosses) -> None:
        self._batches, self._losses = batches, losses

    def scale(self, loss: Tensor, divisor: int, steps_done: int) -> Tensor:
        """Weigh the terms of a loss so that all ranks' losses add up to the global batch's; see `LossScaling.scale`.

        Collectives: those of `UnlikeLosses.weigh`.
        """
        batch = self._batches.order.use(self._batches.order.micro_step(steps_done))
        if not is_scaled(loss):
            loss = self._losses.weigh(loss, batch, divisor)
        elif (term := find_unweighed_term(loss, self._batches.times_ranks)) is not None:
            raise ConfigError(_TERM_OF_SAMPLES.format(term))
        self._batches.note_scaled_loss()
        return loss

    def end_backward(self) -> None:
        """Remove the weights from the graph of the latest loss, and expect the next micro-batch."""
        self._losses.release()
        self._batches.end_backward()

    def expect_scaled(self) -> None:
        """See `LossScaling.expect_scaled`."""
        if self._batches.end_step():
            raise ConfigError(_UNSCALED)


class _ScalingByConvention:
    """Scales the losses of a model that is split over the sequence, by the convention that the section declares."""

    def __init__(self, model: SplitModel) -> None:
        self._model = model
        self._checked_conventions: set[str] = set()  # for which `_check_convention` has compared losses

    def scale(self, loss: Tensor, divisor: int, steps_done: int) -> Tensor:
        """See `LossScaling.scale`.

        Collectives: those of `rescaled_loss`; if checks of a step are off, in the first call also one all_gather of two
            numbers over the world.
        """
        weights = self._model.losses.token_weights
        if weights is not None:
            weights.note_backward(loss, divisor, is_scaled=is_scaled(loss))
        factors = self._model.losses.token_factors
        if factors is not None and not is_scaled(loss):
            factors.note_backward(loss, divisor)
        local_weights = self._model.losses.local_weights
        if local_weights is not None and not is_scaled(loss):
            local_weights.note_values(loss)
        if not is_scaled(loss):
            loss = self._scale_by_convention(loss, divisor)
        elif has_unscaled_term(loss):
            raise ConfigError(_MIXED_PARTS)
        self._model.losses.note_scaled()
        return loss

    def _scale_by_convention(self, loss: Tensor, divisor: int) -> Tensor:
        """Scale a loss by the declared convention. Raises `BatchError`: the labels that this needs are unknown."""
        replica = self._model.replica
        convention = self._model.losses.convention or "replica_mean"
        is_checked = self._model.losses.token_weights is not None or convention in self._checked_conventions
        if not is_checked and self._check_convention(convention, loss):
            self._checked_conventions.add(convention)
        info = shard_info(self._model.losses.latest_positions)
        labels = None if info is None else info.labels
        num_items = None if info is None else info.num_items
        needs_items = replica.batch_split is not None
        if (needs_items and num_items is None) or (labels is None and (needs_items or convention != "replica_mean")):
            raise BatchError(
                f'a loss by the convention "{convention}" needs the labels of its batch, which are not known here. '
                "Give the model the position_ids of a batch from ds_hetero's loader as they are, not a copy; or use "
                "handle.loss."
            )
        num_tokens = None if labels is None else labels.ne(IGNORE_INDEX).sum()
        return rescaled_loss(loss, convention, num_tokens, replica, num_items if needs_items else None, divisor)

    def end_backward(self) -> None:
        """Do nothing: no state of a loss outlives its scaling."""

    def expect_scaled(self) -> None:
        """See `LossScaling.expect_scaled`."""
        model = self._model
        if model.losses.end_step() and (model.losses.convention is not None or model.replica.batch_split is not None):
            raise ConfigError(_UNSCALED)

    def _check_convention(self, convention: str, loss: Tensor) -> bool:
        """Check that the ranks' losses are equal within a replica, or differ, as the convention says.

        Returns:
            True if the losses were compared; False if all are 0 or NaN, since no rank has a label.

        Raises:
            ConfigError: on every rank: losses of a replica differ under ``"replica_mean"``, or are equal under another
                convention.
        """
        replica = self._model.replica
        device = message_device()
        local_numbers = torch.tensor([replica.replica_id, float(loss.detach())], dtype=torch.float64, device=device)
        gathered = [torch.empty_like(local_numbers) for _ in range(dist.get_world_size())]
        dist.all_gather(gathered, local_numbers)
        values = [float(row[1]) for row in gathered]
        if not any(value and not math.isnan(value) for value in values):
            return False
        values_by_replica: dict[int, list[float]] = {}
        for row, value in zip(gathered, values, strict=True):
            values_by_replica.setdefault(int(row[0]), []).append(value)
        texts = [f"{value:.6g}" for value in values]
        rtol = _RTOL_SAME_LOSS if loss.element_size() >= 4 else _RTOL_SAME_LOSS_HALF
        are_equal = []  # for each replica of several ranks, whether they have the same loss
        for replica_id in sorted(values_by_replica):
            if len(values_by_replica[replica_id]) > 1:
                are_equal.append(_are_equal(values_by_replica[replica_id], rtol))
        if convention == "replica_mean" and not all(are_equal):
            raise ConfigError(
                f"the loss given to backward differs between the ranks of a replica (by rank {texts}), so it is not "
                "the mean over the replica's tokens. Use handle.loss, or say what it is: "
                f'"{SECTION}": {{"loss": "local_mean"}}, a mean over the rank\'s own labels; "local_sum", their sum; '
                '"local_share", their sum over the number of labels in the replica.'
            )
        if convention != "replica_mean" and are_equal and all(are_equal):
            raise ConfigError(
                f'"{SECTION}.loss" is "{convention}", but the loss given to backward is the same on all ranks of each '
                f"replica (by rank {texts}), as it is by handle.loss and by the recipe. Leave the key out."
            )
        return True


def _are_equal(values: Sequence[float], rtol: float) -> bool:
    """Return whether losses are equal up to ``rtol``, or all NaN, as on ranks without labels."""
    numbers = [value for value in values if not math.isnan(value)]
    if len(numbers) != len(values):
        return not numbers
    return max(numbers) - min(numbers) <= rtol * max(abs(value) for value in numbers)
