"""``outputs.loss`` of a forward on a shard.

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
from ds_hetero.errors import BatchError
from ds_hetero.runtime.data.shard_info import shard_info
from ds_hetero.runtime.data.shards import IGNORE_INDEX, Batch
from ds_hetero.runtime.loss import mark_loss_of_batch, sequence_parallel_loss
from ds_hetero.runtime.step_clock import IDLE
from ds_hetero.runtime.token_log_probs import cross_entropy_sum


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
        batch: the arguments of the model.
        forward: the forward that made them.
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
