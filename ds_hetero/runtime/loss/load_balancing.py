"""The load-balancing loss of a mixture of experts, for sequences that are split over ranks.

    loss = E * sum over e of f_e * P_e

f_e is the share of tokens that are routed to expert e, times k, and P_e is the mean probability of expert e, both over
the tokens of all layers (Switch Transformer, arXiv:2101.03961, equations 4 to 6, summed over layers as in
transformers). The ranks' losses cannot be averaged, since the loss is a product of means: counts and probabilities are
summed over the replica first.

Dimension key: T tokens of the rank's part of the batch, E experts, k experts of one token.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ds_hetero.runtime.replica import Replica


def load_balancing_loss(gates: Sequence[Tensor], top_k: int, is_real: Tensor, replica: Replica) -> Tensor:
    """Return the loss of the whole batch, equal on all ranks of the replica.

    Args:
        gates: for each layer, the router's logits [T, E].
        top_k: experts to which a token is routed, k.
        is_real: [T], 1 for tokens that count, 0 for padding and placeholders.

    Caller: every rank of the replica, in the forward. If the ranks' losses add up to the loss of one process, their
    gradients of this loss add up to its gradient.
    Collectives: one all_reduce of 2 E + 1 numbers forward, one backward.
    """
    num_experts = gates[0].shape[-1]
    weights = is_real.to(torch.float32)
    counts = torch.zeros(num_experts, dtype=torch.float32, device=weights.device)
    probabilities = torch.zeros_like(counts)
    for logits_TE in gates:
        routed_TE = torch.softmax(logits_TE, dim=-1)
        chosen_Tk = torch.topk(routed_TE.detach(), top_k, dim=-1).indices
        counts = counts.scatter_add(0, chosen_Tk.reshape(-1), weights.repeat_interleave(top_k))
        probabilities = probabilities + (routed_TE.float() * weights[:, None]).sum(0)
    rows = weights.sum()[None] * len(gates)
    sums: Tensor = _SumOverReplica.apply(torch.cat([counts, probabilities, rows]), replica)  # type: ignore[no-untyped-call]
    counts, probabilities, rows = torch.split(sums, [num_experts, num_experts, 1])
    loss: Tensor = num_experts * (counts.detach() / rows.detach() * (probabilities / rows.detach())).sum()
    return loss


class _SumOverReplica(torch.autograd.Function):
    """Sums a tensor over the ranks of a replica, in the forward and, for its gradient, in the backward.

    Every rank computes its own loss from the sum, so the gradient of the tensor is that of all these losses.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, replica: Replica) -> Tensor:
        ctx.replica = replica
        total = x.clone()
        dist.all_reduce(total, group=replica.sp_group)
        return total

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        total = gradient.contiguous().clone()
        dist.all_reduce(total, group=ctx.replica.sp_group)
        return total, None
