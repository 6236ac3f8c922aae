"""Attention over a band, computed tile by tile with an operator that only knows simple tiles."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from ds_hetero.batch.tiles import Band, Tile
from ds_hetero.runtime.attention.kernels.interface import SavedForward, merge_

Forward = Callable[[Tensor, Tensor, Tensor, Band], tuple[Tensor, Tensor]]
Backward = Callable[[Tensor, SavedForward, Band], tuple[Tensor, Tensor, Tensor]]


def forward_by_tiles(attend: Forward, q: Tensor, k: Tensor, v: Tensor, tiles: Sequence[Tile]) -> tuple[Tensor, Tensor]:
    """Attention over everything that ``tiles`` cover, out laid out token-major.

    Args:
        attend: (q, k, v, band) -> (out, lse), for the bands that occur in ``tiles``.
        q: [B, H, Q, D].
        k: [B, G, K, D].
        v: [B, G, K, D].
        tiles: from `decompose`.
    """
    if len(tiles) == 1 and tiles[0].copies == 1:
        return attend(q, k, v, tiles[0].band)
    wide = torch.promote_types(q.dtype, torch.float32)
    out = _token_major(q, wide)
    lse = torch.empty_like(out[..., 0])
    for tile in tiles:
        for (out_tile, lse_tile, q_tile), (k_tile, v_tile) in _copies(tile, (out, lse, q), (k, v)):
            part = attend(q_tile, k_tile, v_tile, tile.band)
            if tile.first:
                out_tile.copy_(part[0])
                lse_tile.copy_(part[1])
            else:
                merge_(out_tile, lse_tile, *part)
    return out.to(q.dtype), lse


def backward_by_tiles(
    attend_backward: Backward, dout: Tensor, saved: SavedForward, tiles: Sequence[Tile]
) -> tuple[Tensor, Tensor, Tensor]:
    """Return gradients of the same, from the out and lse of the whole rows; in float32 where tiles had to be added up.

    Args:
        attend_backward: (dout, saved, band) -> (dq, dk, dv), for the bands that occur in ``tiles``.
        dout: gradient of the output, like ``saved.out``.
        tiles: from `decompose`.
    """
    if len(tiles) == 1 and tiles[0].copies == 1:
        return attend_backward(dout, saved, tiles[0].band)
    q, k, v = saved.q, saved.k, saved.v
    wide = torch.promote_types(q.dtype, torch.float32)
    dq, dk, dv = (_token_major(x, wide).zero_() for x in (q, k, v))
    for tile in tiles:
        for of_queries, of_keys in _copies(tile, (dout, q, saved.out, saved.lse, dq), (k, v, dk, dv)):
            dout_tile, q_tile, out_tile, lse_tile, dq_tile = of_queries
            k_tile, v_tile, dk_tile, dv_tile = of_keys
            part = attend_backward(dout_tile, SavedForward(q_tile, k_tile, v_tile, out_tile, lse_tile), tile.band)
            dq_tile += part[0]
            dk_tile += part[1]
            dv_tile += part[2]
            del part  # before the next call makes the next one
    return dq, dk, dv


def _token_major(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Uninitialised [B, H, S, D] in the memory order of the operators' outputs, which makes adding them up cheap."""
    batch_size, heads, tokens, head_dim = x.shape
    return x.new_empty(batch_size, tokens, heads, head_dim, dtype=dtype).transpose(1, 2)


def _copies(
    tile: Tile, of_queries: Sequence[Tensor], of_keys: Sequence[Tensor]
) -> Iterator[tuple[list[Tensor], list[Tensor]]]:
    """Views of ``of_queries`` and ``of_keys`` on the copies of a tile, in as few steps as possible.

    Either one copy of every sample at a time, [B, H, rows, D], or every copy of one sample, [copies, H, rows, D].
    """
    batch_size = of_queries[0].shape[0]
    if tile.copies <= batch_size:
        for start in (copy * tile.step for copy in range(tile.copies)):
            rows = slice(tile.row + start, tile.row + start + tile.rows)
            cols = slice(tile.col + start, tile.col + start + tile.cols)
            yield [x[:, :, rows] for x in of_queries], [x[:, :, cols] for x in of_keys]
    else:
        for sample in range(batch_size):
            yield (
                [_diagonal(x[sample], tile.row, tile.rows, tile) for x in of_queries],
                [_diagonal(x[sample], tile.col, tile.cols, tile) for x in of_keys],
            )


def _diagonal(x: Tensor, start: int, size: int, tile: Tile) -> Tensor:
    """[H, S, ...] -> view [copies, H, size, ...] of the tokens from ``start``, ``start + step`` and so on."""
    stop = start + (tile.copies - 1) * tile.step + size
    return x[:, start:stop].unfold(1, size, tile.step).movedim(-1, 2).transpose(0, 1)
