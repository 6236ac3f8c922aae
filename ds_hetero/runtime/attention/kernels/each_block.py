"""Many blocks in packed tensors: one after the other for kernels that know no better, and lengths for those that do."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

import torch
from torch import Tensor

from ds_hetero.batch.tiles import Band
from ds_hetero.runtime.attention.kernels.interface import PackedBlocks, SavedForward, Scores
from ds_hetero.runtime.devices import copied_to


def forward_each(
    forward: Callable[[Tensor, Tensor, Tensor, Scores, Band], tuple[Tensor, Tensor]],
    qkv: tuple[Tensor, Tensor, Tensor],
    scores: Scores,
    blocks: PackedBlocks,
) -> tuple[Tensor, Tensor]:
    """`AttentionKernel.forward` of many blocks by one ``forward`` for each."""
    q, k, v = qkv
    outs: list[Tensor] = []
    lses: list[Tensor] = []
    for at_q, at_k, band in blocks.parts():
        out, lse = forward(q[:, :, at_q], k[:, :, at_k], v[:, :, at_k], scores, band)
        outs.append(out)
        lses.append(lse)
    return torch.cat(outs, dim=2), torch.cat(lses, dim=2)


def backward_each(
    backward: Callable[[Tensor, SavedForward, Scores, Band], tuple[Tensor, Tensor, Tensor]],
    dout: Tensor,
    saved: SavedForward,
    scores: Scores,
    blocks: PackedBlocks,
) -> tuple[Tensor, Tensor, Tensor]:
    """`AttentionKernel.backward` of many blocks by one ``backward`` for each."""
    parts = []
    for at_q, at_k, band in blocks.parts():
        q, out, lse = saved.q[:, :, at_q], saved.out[:, :, at_q], saved.lse[:, :, at_q]
        block = SavedForward(q, saved.k[:, :, at_k], saved.v[:, :, at_k], out, lse)
        parts.append(backward(dout[:, :, at_q], block, scores, band))
    dq, dk, dv = (torch.cat(of_blocks, dim=2) for of_blocks in zip(*parts, strict=True))
    return dq, dk, dv


@lru_cache(maxsize=256)
def boundaries(starts: tuple[int, ...], device: torch.device) -> Tensor:
    """Cumulative lengths as flash-attention reads them."""
    return copied_to(torch.tensor(starts, dtype=torch.int32), device)
