"""Losses of forwards on a shard, ``outputs.loss``.

A loader moves the labels of the whole sequence and cuts them, so that a batch has ``shift_labels`` and no ``labels``,
and the model alone returns no loss. `add_loss` gives its outputs the one that `Handle.loss` would make of them: that
of the whole batch, equal on all ranks, with a gradient of the scale that the engine averages.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any

from torch import Tensor
from transformers.utils import ModelOutput

from ds_hetero.engine.forward_mode import ShardedForward
from ds_hetero.errors import BatchError, ModelError
from ds_hetero.frameworks.transformers.model.own_loss import loss_by_own_function
from ds_hetero.frameworks.transformers.model.sharded_call import Called
from ds_hetero.runtime.data.shard_info import shard_info
from ds_hetero.runtime.data.shards import IGNORE_INDEX, Batch
from ds_hetero.runtime.loss import (
    cross_entropy_sum,
    has_loss_of_batch,
    loss_of_replica,
    mark_loss_of_batch,
    sequence_parallel_loss,
)
from ds_hetero.runtime.step_checks import TokenWeights
from ds_hetero.runtime.step_clock import IDLE


def note_logits(weights: TokenWeights, outputs: Any, batch: Batch, own_loss: str) -> None:
    """Let a check see the gradient of the logits that a forward on a shard has made, if it has made some."""
    info = shard_info(batch.get("position_ids"))
    labels = batch.get("shift_labels")
    if labels is None and info is not None:
        labels = info.labels
    logits = outputs.get("logits") if isinstance(outputs, ModelOutput) else None
    if not isinstance(labels, Tensor) or not isinstance(logits, Tensor) or logits.dim() != 3:
        return
    if logits.shape[:2] == labels.shape:
        # A number of items that the script gives divides the loss; it is then no mean over the batch's labels.
        is_mean = batch.get("num_items_in_batch") is None
        is_plain = has_loss_of_batch(outputs) and not own_loss and is_mean
        expected = outputs.get("loss") if is_plain else None
        weights.note_forward(logits, labels, expected, None if info is None else info.num_items)


def add_own_loss(model: Called, outputs: Any, batch: Batch, forward: ShardedForward) -> None:
    """Set ``outputs.loss`` as `add_loss` does, by the model's own ``loss_function``.

    Caller: every rank of the replica, once per forward on a shard.
    Collectives: those of `loss_by_own_function`; where the model adds a loss of its routers, one all_reduce.

    Raises:
        BatchError: replicas take different batches, whose losses are weighed by labels.
        ModelError: see `loss_by_own_function`; or logits are computed tile by tile.
    """
    labels, replica = batch.get("shift_labels"), forward.replica
    if labels is None or not isinstance(outputs, ModelOutput):
        return
    name = type(model.pretrained).__name__
    if batch.get("labels") is not None or outputs.get("loss") is not None:
        raise BatchError(
            f"{name} was given labels and shift_labels, and computes {model.own_loss} of this rank's tokens alone, "
            "which need not be a mean over tokens. Leave labels out: engine(**batch).loss is "
            f"{model.own_loss} of the whole batch."
        )
    logits = outputs.get("logits")
    if not isinstance(logits, Tensor) or logits.shape[:2] != labels.shape:
        raise ModelError(
            f"{name} has a loss function of its own, {model.own_loss}, which takes the logits of all tokens, and none "
            'were made. Leave "tile_tokens" out.'
        )
    if replica.batch_split is not None:
        raise BatchError(
            f"replicas take different batches ({replica.batch_split}), whose losses are weighed by their labels, and "
            f"{name} has a loss function of its own, {model.own_loss}, that need not be a mean over "
            "labels. Give all replicas the same micro_batch_size and micro_batches."
        )
    with forward.clock.phase(IDLE, "loss"):
        placement, num_items = forward.batch.placement, batch.get("num_items_in_batch")
        moves = model.moves_labels
        own = loss_by_own_function(model.pretrained, logits, labels, placement, replica, moves, num_items)
        loss = loss_of_replica(own, replica)
        term = model.router_term(outputs)
        if isinstance(term, Tensor):
            num_tokens = labels.ne(IGNORE_INDEX).sum()
            loss = loss + sequence_parallel_loss(num_tokens * term, num_tokens, replica)
    outputs["loss"] = loss
    OrderedDict.move_to_end(outputs, "loss", last=False)  # outputs[0], as in one process
    mark_loss_of_batch(outputs)


def add_loss(
    outputs: Any,
    batch: Batch,
    forward: ShardedForward,
    router_term: Tensor | float = 0.0,
    loss_sum: Callable[[], Tensor] | None = None,
) -> None:
    """Set ``outputs.loss`` where the model was given ``shift_labels`` and no ``labels``.

    Args:
        outputs: of the model, with ``logits`` [B, s, V] and without a loss; others are left as they are.
        router_term: what the model adds to the mean loss of its tokens for its routers.
        loss_sum: makes this rank's token losses added up, where ``outputs`` have no logits.

    Caller: every rank of the replica, once per forward on a shard.
    Collectives: one all_reduce of two numbers.

    Where replicas take different batches, and ``position_ids`` are not those that the loader made, there is none.

    Raises:
        BatchError: the batch says what to divide by, and replicas take different ones.
    """
    labels = batch.get("shift_labels")
    if labels is None or batch.get("labels") is not None or not isinstance(outputs, ModelOutput):
        return
    logits = outputs.get("logits")
    if not isinstance(logits, Tensor) or outputs.get("loss") is not None:
        return
    if loss_sum is None and logits.shape[:2] != labels.shape:
        return
    replica, num_items, divisor = forward.replica, None, 1
    num_labels = batch.get("num_items_in_batch")
    if replica.batch_split is not None:
        if num_labels is not None:
            raise BatchError(
                f"num_items_in_batch: replicas take different batches ({replica.batch_split}), whose loss is divided "
                "by the labels of the whole optimizer step already; leave it out."
            )
        info = shard_info(batch.get("position_ids"))
        if info is None or info.num_items is None:
            return
        num_items, divisor = info.num_items, replica.batch_split.micro_steps
    with forward.clock.phase(IDLE, "loss"):
        num_tokens = labels.ne(IGNORE_INDEX).sum()
        of_tokens = cross_entropy_sum(logits, labels) if loss_sum is None else loss_sum()
        of_routers = num_tokens * router_term
        if num_labels is None:
            loss = sequence_parallel_loss(of_tokens + of_routers, num_tokens, replica, num_items, divisor)
        else:
            loss = sequence_parallel_loss(of_tokens, num_tokens, replica, num_labels=num_labels)
            if isinstance(router_term, Tensor):
                loss = loss + sequence_parallel_loss(of_routers, num_tokens, replica)
    outputs["loss"] = loss
    OrderedDict.move_to_end(outputs, "loss", last=False)  # outputs[0], as in one process
    mark_loss_of_batch(outputs)
