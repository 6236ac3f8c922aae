"""Scale the loss of a sequence that is split over ranks, so that DeepSpeed's average of gradients is its gradient.

DeepSpeed knows nothing of the sequence parallelism here and averages gradients over all W ranks. Attention carries
gradients between the ranks of a replica. So if every rank r of replica R begins its backward with the same factor c on
S_r, the sum of its token losses, the sum of the gradients over R's ranks is c times the gradient of S_R, the sum of S_r
over R. With n_R valid tokens in R, P replicas, and N valid tokens (``num_items``) in all micro-batches of all replicas
of one optimizer step:

    desired loss                                factor c on S_r        value returned, equal on all ranks of R
    mean over replicas of S_R / n_R             W / (P n_R)            S_R / n_R
    token mean: sum of all S_R / N              W / N                  W S_R / (|R| N)

The second is the loss of one process on the whole batch: its values, averaged over ranks and summed over the
micro-batches, are the loss of the whole batch. DeepSpeed's backward divides by the number of micro-batches (unless
``scale_wrt_gas=False``). That is right for the first loss; for the second the division has to be undone.

A loss that a training script computes itself is scaled to the same factor. With n_r valid tokens on rank r:

    convention        loss on rank r              its own factor on S_r
    replica_mean      S_R / n_R, by a differentiable all_gather, whose backward adds up over the |R| ranks   |R| / n_R
    local_mean        S_r / n_r                   1 / n_r
    local_sum         S_r                         1
    local_share       S_r / n_R                   1 / n_R

For a module that every rank runs whole, samples take the place of tokens: its ``"sample_mean"``, the mean over a rank's
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
    """Return the replica's loss, a scalar on which to call backward; see the first table of this module.

    Args:
        loss_sum: scalar, the sum of this rank's token losses, such as their mean times ``num_tokens``.
        num_tokens: number of this rank's valid tokens. If it is 0, ``loss_sum`` and its gradient count as 0, even if
            they are NaN.
        num_items: valid tokens of the optimizer step over all ranks, see `count_items`. None: each micro-batch of each
            replica has the same weight.
        divisor: with ``num_items``: the number by which the engine will divide, which is undone.
        num_labels: without ``num_items``: the number by which to divide in place of n_R.

    Returns:
        A scalar of ``loss_sum``'s dtype; 0 if no rank of the replica has a valid token.

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
    """Return the replica's mean S_R / n_R from the ranks' means S_r / n_r, by the convention ``"replica_mean"``.

    Args:
        mean: scalar, over this rank's tokens. If there are none, it counts as 0, even if it is NaN.
        num_tokens: number of this rank's tokens.
        num_items: the number by which to divide in place of n_R.

    Caller: every rank of the replica.
    Collectives: one all_reduce of two numbers forward, none backward.
    """
    num_tokens = torch.as_tensor(num_tokens, device=mean.device)
    mean = mean.masked_fill(num_tokens == 0, 0.0)
    total = torch.stack([mean.detach().double() * num_tokens, num_tokens.double()])
    dist.all_reduce(total, group=replica.sp_group)
    divisor = total[1].clamp(min=1) if num_items is None else torch.as_tensor(num_items, device=mean.device).double()
    value, factor = total[0] / divisor, replica.sp_size * num_tokens / divisor
    mean_of_replica: Tensor = _MeanOverReplica.apply(mean, value.to(mean.dtype), factor.to(mean.dtype))  # type: ignore[no-untyped-call]
    return mean_of_replica


def rescaled_loss(
    loss: Tensor,
    convention: str,
    num_tokens: Tensor | int | None,
    replica: Replica,
    num_items: Tensor | float | None = None,
    divisor: int = 1,
) -> Tensor:
    """Return a script's own loss with its value, and with the gradient that `sequence_parallel_loss` would have.

    Args:
        loss: scalar, by ``convention``. If no token counts, it counts as 0, even if it is NaN.
        convention: one of `CONVENTIONS`; see the second table of this module.
        num_tokens: this rank's valid tokens; not needed for ``"replica_mean"`` without ``num_items``.
        num_items: valid tokens of the optimizer step over all ranks. If left out, each micro-batch of each replica has
            the same weight.
        divisor: with ``num_items``: the number by which the engine will divide, which is undone.

    Caller: every rank of the replica, once per micro-batch.
    Collectives: one all_reduce of one integer, if ``num_tokens`` is needed.
    """
    world_size, device = dist.get_world_size(), loss.device
    if convention == "replica_mean" and num_items is None:
        ratio = world_size / (replica.num_replicas * replica.sp_size)
        return loss if ratio == 1 else _with_factor(loss, loss.detach(), loss.new_tensor(ratio))
    assert num_tokens is not None
    rank_tokens = torch.as_tensor(num_tokens, device=device).to(torch.int64)
    replica_tokens = rank_tokens.clone()
    dist.all_reduce(replica_tokens, group=replica.sp_group)
    counted_tokens = replica_tokens if convention == "replica_mean" else rank_tokens
    # One over the factor that the loss has on S_r: the last column of the second table.
    inverse_factor_by_convention = {
        "replica_mean": replica_tokens.double() / replica.sp_size,
        "local_mean": rank_tokens.double(),
        "local_sum": torch.ones_like(rank_tokens, dtype=torch.float64),
        "local_share": replica_tokens.double(),
    }
    if num_items is None:
        desired_factor = world_size / (replica.num_replicas * replica_tokens.double().clamp(min=1))
    else:
        desired_factor = world_size * divisor / torch.as_tensor(num_items, device=device).double().clamp(min=1)
    loss = loss.masked_fill(counted_tokens == 0, 0.0)
    factor = (desired_factor * inverse_factor_by_convention[convention]).to(loss.dtype)
    return _with_factor(loss, loss.detach(), factor)


def loss_of_replica(loss: Tensor, replica: Replica, *, adds_up: bool = False) -> Tensor:
    """Scale a loss by the convention ``"replica_mean"`` for the engine's average.

    Args:
        adds_up: the losses of replicas and micro-batches add up to that of the optimizer step, since each was divided
            by the number of all labels. Otherwise they are averaged over the replicas.
    """
    share = dist.get_world_size() / (replica.num_replicas * replica.sp_size)
    factor = share * (replica.num_replicas if adds_up else 1)
    value = loss.detach() * (dist.get_world_size() / replica.sp_size if adds_up else 1)
    return _with_factor(loss, value, loss.new_tensor(factor))


def scaled_loss(loss: Tensor, factor: Tensor | float) -> Tensor:
    """Multiply a loss by a factor, in value and gradient, and mark it as scaled; with factor 0 even NaN becomes 0."""
    factor = torch.as_tensor(factor, device=loss.device).to(loss.dtype)
    loss = loss.masked_fill(factor == 0, 0.0)
    return _with_factor(loss, loss.detach() * factor, factor)


def shown_loss(loss: Tensor, factor: float, value: Tensor | None = None) -> Tensor:
    """Multiply the gradient of a loss by a factor, and mark it as scaled; its value becomes ``value``, if given."""
    if factor == 0:
        loss = loss.masked_fill(torch.ones_like(loss, dtype=torch.bool), 0.0)
    return _with_factor(loss, loss.detach() if value is None else value, loss.new_tensor(factor))


def count_items(num_tokens: Tensor | int, device: torch.device) -> Tensor:
    """Return the number of valid tokens of one optimizer step, over all ranks.

    Args:
        num_tokens: valid tokens of this rank's shards of all its micro-batches.

    Caller: every rank of the world, once per optimizer step.
    Collectives: one all_reduce of one integer.
    """
    total = torch.as_tensor(num_tokens, device=device).to(torch.int64).clone()
    dist.all_reduce(total)
    return total


def _with_factor(x: Tensor, value: Tensor, factor: Tensor) -> Tensor:
    """Return ``value`` with the gradient of ``x`` times ``factor``, as a scaled loss."""
    loss: Tensor = _ValueWithFactor.apply(x, value, factor)  # type: ignore[no-untyped-call]
    return loss


class _ValueWithFactor(torch.autograd.Function):
    """Forward returns ``value``; backward multiplies by ``factor``. The class name marks scaled losses."""

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
    """A mean over a replica. It is a class of its own, since `makes_scaled` must not take it for a scaled loss."""


def makes_scaled(node: Node) -> bool:
    """Whether a node of a loss's graph scales the loss for the engine's average."""
    return node.name() == f"{_ValueWithFactor.__name__}Backward"
