"""Compute `Handle.mean`: the mean over the tokens of a whole batch, of which every rank holds a part."""

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

_OF_ONE_RANK = "ds_hetero_of_one_rank"


def note_items_of_rank(num_items: object) -> None:
    """Note that a Trainer has counted ``num_items`` on this rank alone: ``average_tokens_across_devices=False``."""
    if isinstance(num_items, Tensor):
        setattr(num_items, _OF_ONE_RANK, True)


def ranks_counted(num_items: Tensor | float) -> int:
    """Return the number of ranks whose tokens ``num_items`` counts: all, or 1 after `note_items_of_rank`.

    `token_mean` divides a rank's sum over its tokens by ``num_items``, and multiplies it by this number. Example: 2
    ranks with 3 and 5 tokens, so that ``num_items`` is 8. The factor is 2, because the engine averages over 2 ranks.
    """
    return 1 if getattr(num_items, _OF_ONE_RANK, False) else dist.get_world_size()


def token_mean(
    values: Tensor, batch: Batch, where: Tensor | None, replica: Replica | None, num_items: Tensor | float | None
) -> Tensor:
    """Return the mean of ``values`` over the tokens of the whole batch, scaled for the engine's average of gradients.

    With ``num_items`` the results of a step's micro-batches add up to the mean over the step: each is the sum over its
    tokens divided by ``num_items``, times the number of ranks whose tokens ``num_items`` counts.

    Args:
        values: [B, s, ...], a value for each token of the shard; or a scalar that is the same on all ranks.
        batch: the shard.
        where: [B, s], true for tokens that count; None for tokens whose labels count.
        replica: this rank's replica; None if the batch is whole.
        num_items: tokens that count in the optimizer step over all ranks, or on this one, see `ranks_counted`; None if
            micro-batches have equal weights.

    Caller: every rank of the replica.
    Collectives: one all_reduce of two numbers; for a scalar, two.

    Raises:
        BatchError: ``values`` has neither a value for each token of the shard, nor is it the same scalar on all ranks.
        ConfigError: the replicas take different batches, and ``num_items`` is None.
    """
    counted = _counted(values, batch, where)
    if replica is None and counted is None:
        return values
    if replica is None and counted is not None:
        if num_items is None:
            return _by_token(values)[counted].mean()
        return _by_token(values).masked_fill(~counted, 0.0).sum() / num_items * ranks_counted(num_items)
    assert replica is not None
    if counted is None:
        expect_same_scalar(values, replica)
        return sequence_parallel_loss(values, 1, replica)
    if replica.batch_split is not None and num_items is None:
        raise ConfigError(
            f"handle.mean needs num_items if replicas take different batches ({replica.batch_split}). Give it "
            "handle.count_items(batches) in a loop, num_items_in_batch in a Trainer's compute_loss."
        )
    total = _by_token(values).masked_fill(~counted, 0.0).sum()
    return sequence_parallel_loss(total, counted.sum(), replica, num_items)


def _counted(values: Tensor, batch: Batch, where: Tensor | None) -> Tensor | None:
    """Return True for tokens in the mean, [B, s]; None if ``values`` is a scalar. Raises `BatchError`: wrong shape."""
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
    """Average the values of each token, in at least single precision: [B, s, ...] -> [B, s]."""
    values = values.to(torch.promote_types(values.dtype, torch.float32))
    return values.reshape(*values.shape[:2], -1).mean(-1)
