"""Run operators on packed blocks: one call per block, or for operators that take them, ``cu_seqlens`` of the blocks."""

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
    """Compute `AttentionKernel.forward` of packed blocks by one call of ``forward`` per block."""
    q, k, v = qkv
    outs: list[Tensor] = []
    lses: list[Tensor] = []
    for queries, keys, band in blocks.parts():
        out, lse = forward(q[:, :, queries], k[:, :, keys], v[:, :, keys], scores, band)
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
    """Compute `AttentionKernel.backward` of packed blocks by one call of ``backward`` per block."""
    parts = []
    for queries, keys, band in blocks.parts():
        q, out, lse = saved.q[:, :, queries], saved.out[:, :, queries], saved.lse[:, :, queries]
        block = SavedForward(q, saved.k[:, :, keys], saved.v[:, :, keys], out, lse)
        parts.append(backward(dout[:, :, queries], block, scores, band))
    dq, dk, dv = (torch.cat(of_blocks, dim=2) for of_blocks in zip(*parts, strict=True))
    return dq, dk, dv


@lru_cache(maxsize=256)
def boundaries(starts: tuple[int, ...], device: torch.device) -> Tensor:
    """Return ``starts`` as flash-attention's ``cu_seqlens``: an int32 tensor on the device."""
    return copied_to(torch.tensor(starts, dtype=torch.int32), device)
