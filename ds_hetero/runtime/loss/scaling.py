"""The loss of a sequence spread over ranks, scaled so that DeepSpeed's plain average of gradients is its gradient.

DeepSpeed, shown no sequence parallelism, averages over all W ranks: it applies 1/W times the sum over ranks of what
each rank's backward produced. Attention carries gradients between the ranks of a replica, so if every rank r of
replica R starts its backward with the same factor c on S_r, the sum of its token losses, then the sum over R's ranks
is c times the gradient of S_R, the sum of S_r over R. With n_R valid tokens in R, P replicas, and N valid tokens
(``num_items``) in all micro-batches of all replicas of one optimizer step:

    wanted                                      factor c on S_r        value returned, equal on all ranks of R
    mean over replicas of S_R / n_R             W / (P n_R)            S_R / n_R
    token mean: sum of all S_R / N              W / N                  W S_R / (|R| N)

The second is what one process computes on the whole batch; its values, averaged over ranks and added up over the
micro-batches, are the loss of the whole batch. An engine that divides by the number of micro-batches, as DeepSpeed's
backward does without ``scale_wrt_gas=False``, is right for the first; for the second it has to be undone.

A loss that a training script computes itself is brought to the same factor. With n_r valid tokens on rank r:

    convention        loss on rank r              its own factor on S_r
    replica_mean      S_R / n_R, by a differentiable all_gather, whose backward adds up over the |R| ranks   |R| / n_R
    local_mean        S_r / n_r                   1 / n_r
    local_sum         S_r                         1
    local_share       S_r / n_R                   1 / n_R

A module that every rank runs whole has samples where these have tokens: its ``"sample_mean"``, the mean over a rank's
samples, is a ``"local_mean"``.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.autograd.graph import Node

from ds_hetero.runtime.replica import Replica

CONVENTIONS = ("replica_mean", "local_mean", "local_sum", "local_share")


def sequence_parallel_loss(
    loss_sum: Tensor,
    num_tokens: Tensor | int,
    replica: Replica,
    num_items: Tensor | float | None = None,
    divisor: int = 1,
    num_labels: Tensor | float | None = None,
) -> Tensor:
    """Return the replica's loss as a scalar to call backward on; table above.

    Args:
        loss_sum: scalar, this rank's token losses added up. A mean times ``num_tokens`` will do.
        num_tokens: how many there are. Where it is 0, ``loss_sum`` counts as 0, even if it is NaN, and so does its
            gradient.
        num_items: valid tokens of the optimizer step over all ranks, see `count_items`; left out, each micro-batch of
            each replica weighs the same.
        divisor: with ``num_items``: what the engine will divide by, to be undone.
        num_labels: without ``num_items``: what to divide by in place of n_R.

    Returns:
        A scalar of ``loss_sum``'s dtype; 0 where no rank of the replica has a valid token.

    Caller: every rank of the replica, once per micro-batch.
    Collectives: one all_reduce of two numbers forward, none backward.
    """
    world_size, device = dist.get_world_size(), loss_sum.device
    num_tokens = torch.as_tensor(num_tokens, device=device)
    loss_sum = loss_sum.masked_fill(num_tokens == 0, 0.0)
    replica_total = torch.stack([loss_sum.detach().double(), num_tokens.double()])
    dist.all_reduce(replica_total, group=replica.sp_group)
    replica_sum, replica_tokens = replica_total.unbind()
    if num_items is None:
        count = replica_tokens if num_labels is None else torch.as_tensor(num_labels, device=device).double()
        value = replica_sum / count.clamp(min=1)
        factor = world_size / (replica.num_replicas * count.clamp(min=1))
    else:
        factor = world_size * divisor / torch.as_tensor(num_items, device=device).double().clamp(min=1)
        value = replica_sum * factor / replica.sp_size
    dtype = loss_sum.dtype
    return _with_factor(loss_sum, value.to(dtype), factor.to(dtype))


def mean_over_replica(
    mean: Tensor, num_tokens: Tensor | int, replica: Replica, num_items: Tensor | float | None = None
) -> Tensor:
    """S_R / n_R of the ranks' means S_r / n_r, by the convention ``"replica_mean"``.

    Args:
        mean: scalar, over this rank's tokens. Where there are none, it counts as 0, even if it is NaN.
        num_items: what to divide by in place of n_R.

    Caller: every rank of the replica.
    Collectives: one all_reduce of two numbers forward, none backward.
    """
    num_tokens = torch.as_tensor(num_tokens, device=mean.device)
    mean = mean.masked_fill(num_tokens == 0, 0.0)
    total = torch.stack([mean.detach().double() * num_tokens, num_tokens.double()])
    dist.all_reduce(total, group=replica.sp_group)
    divisor = total[1].clamp(min=1) if num_items is None else torch.as_tensor(num_items, device=mean.device).double()
    value, factor = total[0] / divisor, replica.sp_size * num_tokens / divisor
    whole: Tensor = _MeanOverReplica.apply(mean, value.to(mean.dtype), factor.to(mean.dtype))  # type: ignore[no-untyped-call]
    return whole


def rescaled_loss(
    loss: Tensor,
    convention: str,
    num_tokens: Tensor | int | None,
    replica: Replica,
    num_items: Tensor | float | None = None,
    divisor: int = 1,
) -> Tensor:
    """Return the same value, with a gradient as that of `sequence_parallel_loss`.

    Args:
        loss: scalar, by ``convention``. Where no token counts, it counts as 0, even if it is NaN.
        convention: one of `CONVENTIONS`; table at the top.
        num_tokens: this rank's valid tokens; not needed for ``"replica_mean"`` without ``num_items``.
        num_items: valid tokens of the optimizer step over all ranks; left out, each micro-batch of each replica weighs
            the same.
        divisor: with ``num_items``: what the engine will divide by, to be undone.

    Caller: every rank of the replica, once per micro-batch.
    Collectives: one all_reduce of one integer, where ``num_tokens`` is needed.
    """
    world_size, device = dist.get_world_size(), loss.device
    if convention == "replica_mean" and num_items is None:
        ratio = world_size / (replica.num_replicas * replica.sp_size)
        return loss if ratio == 1 else _with_factor(loss, loss.detach(), loss.new_tensor(ratio))
    assert num_tokens is not None
    own_tokens = torch.as_tensor(num_tokens, device=device).to(torch.int64)
    replica_tokens = own_tokens.clone()
    dist.all_reduce(replica_tokens, group=replica.sp_group)
    counted = replica_tokens if convention == "replica_mean" else own_tokens
    inverse_of_own_factor = {
        "replica_mean": replica_tokens.double() / replica.sp_size,
        "local_mean": own_tokens.double(),
        "local_sum": torch.ones_like(own_tokens, dtype=torch.float64),
        "local_share": replica_tokens.double(),
    }
    if num_items is None:
        wanted = world_size / (replica.num_replicas * replica_tokens.double().clamp(min=1))
    else:
        wanted = world_size * divisor / torch.as_tensor(num_items, device=device).double().clamp(min=1)
    loss = loss.masked_fill(counted == 0, 0.0)
    return _with_factor(loss, loss.detach(), (wanted * inverse_of_own_factor[convention]).to(loss.dtype))


def loss_of_replica(loss: Tensor, replica: Replica, *, adds_up: bool = False) -> Tensor:
    """Return a loss by the convention ``"replica_mean"`` in the scale that the engine averages.

    Args:
        adds_up: losses of replicas and micro-batches add up to that of the optimizer step, since each was divided by
            the labels of all; else they are averaged over replicas.
    """
    share = dist.get_world_size() / (replica.num_replicas * replica.sp_size)
    factor = share * (replica.num_replicas if adds_up else 1)
    value = loss.detach() * (dist.get_world_size() / replica.sp_size if adds_up else 1)
    return _with_factor(loss, value, loss.new_tensor(factor))


def scaled_loss(loss: Tensor, factor: Tensor | float) -> Tensor:
    """Return ``loss`` times the factor by which the engine's average is right; with factor 0 a NaN becomes 0, too."""
    factor = torch.as_tensor(factor, device=loss.device).to(loss.dtype)
    loss = loss.masked_fill(factor == 0, 0.0)
    return _with_factor(loss, loss.detach() * factor, factor)


def shown_loss(loss: Tensor, factor: float, value: Tensor | None = None) -> Tensor:
    """Return ``loss``, or another value, whose gradient is multiplied by ``factor``; known to be scaled."""
    if factor == 0:
        loss = loss.masked_fill(torch.ones_like(loss, dtype=torch.bool), 0.0)
    return _with_factor(loss, loss.detach() if value is None else value, loss.new_tensor(factor))


def count_items(num_tokens: Tensor | int, device: torch.device) -> Tensor:
    """Valid tokens of one optimizer step, over all ranks.

    Args:
        num_tokens: valid tokens of this rank's shards of all its micro-batches.

    Caller: every rank of the world, once per optimizer step.
    Collectives: one all_reduce of one integer.
    """
    total = torch.as_tensor(num_tokens, device=device).to(torch.int64).clone()
    dist.all_reduce(total)
    return total


def _with_factor(x: Tensor, value: Tensor, factor: Tensor) -> Tensor:
    loss: Tensor = _ValueWithFactor.apply(x, value, factor)  # type: ignore[no-untyped-call]
    return loss


class _ValueWithFactor(torch.autograd.Function):
    """Forward returns ``value``, backward multiplies by ``factor``: the loss shown and the loss differentiated."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, value: Tensor, factor: Tensor) -> Tensor:
        ctx.save_for_backward(factor)
        return value

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (factor,) = ctx.saved_tensors
        return grad * factor, None, None


class _MeanOverReplica(_ValueWithFactor):
    """A mean over a replica. Its own class, since it has not the engine's scale: `makes_scaled` goes by names."""


def makes_scaled(node: Node) -> bool:
    """Whether a node of a loss's graph gives it the scale of the engine's average."""
    return node.name() == f"{_ValueWithFactor.__name__}Backward"
