"""Set ``outputs.loss`` of a forward on a shard to the loss of the whole batch.

The loader shifts the labels of the whole sequence and then shards them, so a shard has ``shift_labels`` but no
``labels``, and the model returns no loss. `add_loss` adds the loss that `Handle.loss` would compute: that of the whole
batch, equal on all ranks, with gradients of the scale that the engine's average expects.

Dimension key: B rows, s tokens of this rank, V vocabulary.
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
from ds_hetero.frameworks.transformers.model.sharded_call import SplitTransformer
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
    """Let a check of token weights read the gradient of the logits [B, s, V] of a forward on a shard.

    Without labels, or without such logits, nothing is checked.

    Args:
        outputs: of the model.
        batch: the arguments of the forward.
        own_loss: name of the model's custom loss function; empty if it has none.
    """
    info = shard_info(batch.get("position_ids"))
    labels = batch.get("shift_labels")
    if labels is None and info is not None:
        labels = info.labels
    logits = outputs.get("logits") if isinstance(outputs, ModelOutput) else None
    if not isinstance(labels, Tensor) or not isinstance(logits, Tensor) or logits.dim() != 3:
        return
    if logits.shape[:2] != labels.shape:
        return
    # With num_items_in_batch, the loss is divided by that number, so it is not the mean over the batch's labels.
    is_mean = batch.get("num_items_in_batch") is None
    is_cross_entropy = has_loss_of_batch(outputs) and not own_loss
    expected = outputs.get("loss") if is_cross_entropy and is_mean else None
    weights.note_forward(logits, labels, expected, None if info is None else info.num_items)


def add_own_loss(model: SplitTransformer, outputs: Any, batch: Batch, forward: ShardedForward) -> None:
    """Set ``outputs.loss`` as `add_loss` does, but by the custom ``loss_function`` of the model.

    Caller: every rank of the replica, once per forward on a shard.
    Collectives: those of `loss_by_own_function`; one all_reduce more if the model adds an auxiliary loss of routers.

    Raises:
        BatchError: replicas take different batches, so that their losses would have to be weighed by labels; or the
            batch has ``labels``.
        ModelError: see `loss_by_own_function`; or the outputs have no logits, because the loss is computed in tiles.
    """
    labels, replica = batch.get("shift_labels"), forward.replica
    if labels is None or not isinstance(outputs, ModelOutput):
        return
    name, function = type(model.pretrained).__name__, model.model_loss.custom_function
    if batch.get("labels") is not None or outputs.get("loss") is not None:
        raise BatchError(
            f"{name} was given labels and shift_labels, so it computes {function} of this rank's tokens alone, which "
            f"need not be a mean over tokens. Leave labels out: engine(**batch).loss is then {function} of the whole "
            "batch."
        )
    logits = outputs.get("logits")
    if not isinstance(logits, Tensor) or logits.shape[:2] != labels.shape:
        raise ModelError(
            f"{name} has a custom loss function, {function}, which takes the logits of all tokens, but the "
            'forward computed none. Leave "tile_tokens" out.'
        )
    if replica.batch_split is not None:
        raise BatchError(
            f"replicas take different batches ({replica.batch_split}), whose losses are weighed by their labels, but "
            f"{name} has a custom loss function, {function}, which may not be a mean over labels. Give all "
            "replicas the same micro_batch_size and micro_batches."
        )
    with forward.clock.phase(IDLE, "loss"):
        loss_of_batch = loss_by_own_function(
            model.pretrained,
            logits,
            labels,
            forward.batch.placement,
            replica,
            model.model_loss.moves_labels,
            batch.get("num_items_in_batch"),
        )
        loss = loss_of_replica(loss_of_batch, replica)
        term = model.model_loss.router_term(outputs)
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
    """Set ``outputs.loss`` to the cross entropy of the whole batch, if it has ``shift_labels`` and no ``labels``.

    No loss is set if replicas take different batches, and ``position_ids`` are not the loader's tensor: only that
    tensor has the number of labels in the step.

    Args:
        outputs: of the model, with ``logits`` [B, s, V] and without a loss; other outputs stay as they are.
        router_term: auxiliary loss of routers, which the model adds to the mean loss of its tokens.
        loss_sum: computes the sum of this rank's token losses if ``outputs`` have no logits.

    Caller: every rank of the replica, once per forward on a shard.
    Collectives: one all_reduce of two numbers.

    Raises:
        BatchError: the batch has ``num_items_in_batch``, and replicas take different batches.
    """
    labels = batch.get("shift_labels")
    if labels is None or batch.get("labels") is not None or not isinstance(outputs, ModelOutput):
        return
    logits = outputs.get("logits")
    if not isinstance(logits, Tensor) or outputs.get("loss") is not None:
        return
    if loss_sum is None and logits.shape[:2] != labels.shape:
        return
    replica = forward.replica
    num_items, divisor = None, 1  # labels and micro-batches of the step, if replicas take different batches
    num_labels = batch.get("num_items_in_batch")
    if replica.batch_split is not None:
        if num_labels is not None:
            raise BatchError(
                f"the batch has num_items_in_batch, but replicas take different batches ({replica.batch_split}), whose "
                "loss is already divided by the labels of the whole optimizer step. Leave num_items_in_batch out."
            )
        info = shard_info(batch.get("position_ids"))
        if info is None or info.num_items is None:
            return
        num_items, divisor = info.num_items, replica.batch_split.micro_steps
    with forward.clock.phase(IDLE, "loss"):
        num_tokens = labels.ne(IGNORE_INDEX).sum()
        token_sum = cross_entropy_sum(logits, labels) if loss_sum is None else loss_sum()
        router_sum = num_tokens * router_term
        if num_labels is None:
            loss = sequence_parallel_loss(token_sum + router_sum, num_tokens, replica, num_items, divisor)
        else:
            # The script's number divides the token losses only; the auxiliary loss is a mean over the batch's tokens.
            loss = sequence_parallel_loss(token_sum, num_tokens, replica, num_labels=num_labels)
            if isinstance(router_term, Tensor):
                loss = loss + sequence_parallel_loss(router_sum, num_tokens, replica)
    outputs["loss"] = loss
    OrderedDict.move_to_end(outputs, "loss", last=False)  # outputs[0], as in one process
    mark_loss_of_batch(outputs)
