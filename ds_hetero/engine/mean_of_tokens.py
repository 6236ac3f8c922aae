"""The mean over the tokens of a whole batch, of which every rank holds a part: what `Handle.mean` computes."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ds_hetero.engine.loader_by_mode import stands_for_none
from ds_hetero.errors import BatchError, ConfigError
from ds_hetero.runtime.data.shards import IGNORE_INDEX, Batch
from ds_hetero.runtime.loss import (
    expect_same_scalar,
    sequence_parallel_loss,
)
from ds_hetero.runtime.replica import Replica


def token_mean(
    values: Tensor, batch: Batch, where: Tensor | None, replica: Replica | None, num_items: Tensor | float | None
) -> Tensor:
    """The mean of ``values`` over the tokens of the whole batch, with a gradient of the scale that the engine averages.

    With ``num_items`` micro-batches add up: each is a sum over its tokens, divided by ``num_items``, times the ranks.

    Args:
        values: [B, s, ...] by token of the shard, or a scalar that all ranks have alike.
        where: [B, s], the tokens that count; None for those whose labels count.
        replica: this rank's; None where the batch is whole.
        num_items: tokens that count in the optimizer step over all ranks; None to weigh micro-batches alike.

    Caller: every rank of the replica.
    Collectives: one all_reduce of two numbers; for a scalar, two.

    Raises:
        BatchError: ``values`` is neither of the shard's tokens nor the same scalar on all ranks.
        ConfigError: the replicas take different batches, and ``num_items`` is None.
    """
    counted = _counted(values, batch, where)
    if replica is None and counted is None:
        return values
    if replica is None and counted is not None:
        if num_items is None:
            return _by_token(values)[counted].mean()
        return _by_token(values).masked_fill(~counted, 0.0).sum() / num_items * dist.get_world_size()
    assert replica is not None
    if counted is None:
        expect_same_scalar(values, replica)
        return sequence_parallel_loss(values, 1, replica)
    if replica.batch_split is not None and num_items is None:
        raise ConfigError(
            f"handle.mean needs num_items where replicas take different batches ({replica.batch_split}): "
            "handle.count_items(batches) in a loop, num_items_in_batch in a Trainer's compute_loss."
        )
    total = _by_token(values).masked_fill(~counted, 0.0).sum()
    return sequence_parallel_loss(total, counted.sum(), replica, num_items)


def _counted(values: Tensor, batch: Batch, where: Tensor | None) -> Tensor | None:
    """[B, s], the tokens to take the mean over; None for a scalar, which belongs to no token."""
    if not values.dim():
        return None
    counted = where
    if counted is None:
        labels = batch.get("shift_labels")
        if labels is None:  # a whole batch
            labels = nn.functional.pad(batch["labels"][:, 1:], (0, 1), value=IGNORE_INDEX)
        counted = labels.ne(IGNORE_INDEX)
    elif stands_for_none(dict(batch)):
        counted = torch.zeros_like(counted)
    if values.shape[:2] != counted.shape:
        raise BatchError(
            f"handle.mean takes one value per token of the shard, [B, s] = {list(counted.shape)}, or a scalar that is "
            f"the same on all ranks; got {list(values.shape)}."
        )
    return counted.to(torch.bool)


def _by_token(values: Tensor) -> Tensor:
    """[B, s, ...] -> [B, s], in at least single precision."""
    values = values.to(torch.promote_types(values.dtype, torch.float32))
    return values.reshape(*values.shape[:2], -1).mean(-1)
