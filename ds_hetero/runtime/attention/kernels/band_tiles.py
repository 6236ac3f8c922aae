"""Compute attention over a band tile by tile, with an operator that accepts simple tiles only.

The visible part of a block is covered by tiles from `ds_hetero.batch.tiles.decompose`, such as full rectangles and
causal squares. A tile may have several copies along the diagonal, which one call of the operator computes.

Dimension key: B batch, H query heads, G KV heads, Q queries, K keys, D head size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from ds_hetero.batch.tiles import Band, Tile
from ds_hetero.runtime.attention.kernels.interface import SavedForward
from ds_hetero.runtime.attention.kernels.merge import merge_

# (q, k, v, band) -> (out, lse)
Forward = Callable[[Tensor, Tensor, Tensor, Band], tuple[Tensor, Tensor]]
# (dout, saved, band) -> (dq, dk, dv)
Backward = Callable[[Tensor, SavedForward, Band], tuple[Tensor, Tensor, Tensor]]


def forward_by_tiles(attend: Forward, q: Tensor, k: Tensor, v: Tensor, tiles: Sequence[Tile]) -> tuple[Tensor, Tensor]:
    """Compute the attention over all ``tiles``: out [B, H, Q, D], token-major in memory, and lse [B, H, Q].

    Args:
        attend: the operator, for the bands of the tiles.
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
            out_part, lse_part = attend(q_tile, k_tile, v_tile, tile.band)
            if tile.first:
                out_tile.copy_(out_part)
                lse_tile.copy_(lse_part)
            else:
                merge_(out_tile, lse_tile, out_part, lse_part)
    return out.to(q.dtype), lse


def backward_by_tiles(
    attend_backward: Backward, dout: Tensor, saved: SavedForward, tiles: Sequence[Tile]
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients (dq, dk, dv) of the attention over all ``tiles``; in float32 if there are several.

    Args:
        attend_backward: the operator's backward, for the bands of the tiles.
        dout: gradient of the output, like ``saved.out``.
        saved: with out and lse of the whole rows, so that every tile's backward is exact by itself.
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
            saved_tile = SavedForward(q_tile, k_tile, v_tile, out_tile, lse_tile)
            dq_part, dk_part, dv_part = attend_backward(dout_tile, saved_tile, tile.band)
            dq_tile += dq_part
            dk_tile += dk_part
            dv_tile += dv_part
            del dq_part, dk_part, dv_part  # so that the next call can use their memory
    return dq, dk, dv


def _token_major(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Return an uninitialised tensor like x [B, H, S, D], token-major in memory as the operators' outputs are."""
    batch_size, heads, tokens, head_dim = x.shape
    return x.new_empty(batch_size, tokens, heads, head_dim, dtype=dtype).transpose(1, 2)


def _copies(
    tile: Tile, of_queries: Sequence[Tensor], of_keys: Sequence[Tensor]
) -> Iterator[tuple[list[Tensor], list[Tensor]]]:
    """Yield views of the rows (of queries) and columns (of keys) that the copies of a tile cover, for call after call.

    To make few calls, a view has one copy for all samples, [B, H, rows, D], or if there are more copies than samples,
    all copies for one sample, [copies, H, rows, D].
    """
    batch_size = of_queries[0].shape[0]
    if tile.copies <= batch_size:
        for copy in range(tile.copies):
            start = copy * tile.step
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
    """Return a view [copies, H, size, ...] of x [H, S, ...]: ``size`` tokens from each of start, start + step, ..."""
    stop = start + (tile.copies - 1) * tile.step + size
    return x[:, start:stop].unfold(1, size, tile.step).movedim(-1, 2).transpose(0, 1)
