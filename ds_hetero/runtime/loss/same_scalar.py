"""Check that a scalar is the same on all ranks of a replica, as a penalty on parameters is."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from ds_hetero.errors import BatchError
from ds_hetero.runtime.replica import Replica


def expect_same_scalar(value: Tensor, replica: Replica) -> None:
    """Refuse a scalar that differs between the ranks of a replica, as a mean over a rank's own tokens does.

    Caller: every rank of the replica.
    Collectives: one all_reduce of two numbers.

    Raises:
        BatchError: it differs; on every rank.
    """
    scalar = value.detach().double()
    extremes = torch.stack([scalar, -scalar])
    dist.all_reduce(extremes, op=dist.ReduceOp.MAX, group=replica.sp_group)
    largest, smallest = float(extremes[0]), -float(extremes[1])
    if largest > smallest:
        raise BatchError(
            f"handle.mean takes a scalar that is the same on all ranks, such as a penalty on parameters; this one is "
            f"between {smallest:.6g} and {largest:.6g}. For a quantity of the tokens, give one value per token, [B, "
            "s]: with means over the ranks' own tokens, ranks with unequal shards would have equal weights."
        )
