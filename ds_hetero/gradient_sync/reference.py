"""The sums of the asymmetric gradient synchronization in one process: a plain twin for readers and tests."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from ds_hetero.sharding.gradient_chunks import Cut, ParameterLayout


def summed_gradient(layout: ParameterLayout, gradients: Mapping[int, Tensor], weights: Sequence[float]) -> Tensor:
    """Sum the gradients of one parameter over its replicas.

    Args:
        layout: which rank holds what of the parameter.
        gradients: of its shard, by every rank that holds one.
        weights: one per replica.

    Returns:
        ``[*layout.shape]``, in float64.
    """
    replicas = [_assemble(layout.shape, cut, gradients) for cut in layout.cuts]
    return torch.stack([weight * whole for weight, whole in zip(weights, replicas, strict=True)]).sum(dim=0)


def _assemble(shape: tuple[int, ...], cut: Cut, gradients: Mapping[int, Tensor]) -> Tensor:
    """Put the gradient of one replica together: copies of a part are equal, or partial sums that add up."""
    parts = []
    for holders in cut.holders:
        copies = torch.stack([gradients[rank].double() for rank in holders])
        parts.append(copies.sum(dim=0) if cut.partial else copies[0])
    if cut.dim is None:
        return torch.cat([part.reshape(-1) for part in parts]).view(shape)
    return torch.cat(parts, dim=cut.dim)
