"""Flash attention on CPU by torch's operator, tile by tile: float64, float32, bfloat16 and float16.

The operator takes grouped heads, rectangles and any strides of batch, heads and tokens, and its backward takes the out
and lse of whole rows. It aligns a causal mask to the top left corner, and dies of SIGFPE if a size is 0. Every tile of
queries reads all keys before it, so many keys are copied first if the tokens of a head are not consecutive in memory.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from ds_hetero.batch.tiles import CAUSAL, CHUNK, FULL, LEAF, Band, Tile, decompose
from ds_hetero.runtime.attention.kernels.band_tiles import backward_by_tiles, forward_by_tiles
from ds_hetero.runtime.attention.kernels.interface import SavedForward, Scores
from ds_hetero.runtime.attention.kernels.plain import band_mask

_MAX_GRADIENT_BYTES = 8 << 18  # that one call returns; on a large square the operator itself allocates 4 << 18
# Number of keys from which on keys and values are copied, unless the tokens of each head are consecutive. From 2,400
# keys on the copy saves 3 % of the time, and more than it takes; below it saves nothing. The command of that
# measurement was not recorded.
_MIN_COPIED_KEYS = 2048
# A causal square is one call if it has up to 256 queries, or more than 640 (in the backward more than 1,280). Sizes
# between are computed in tiles, which leave out the hidden half of the square, but take more calls and have to be
# merged. Timed with 1 to 8 heads of size 64 on one thread; the command was not recorded.
_MAX_SMALL_SQUARE, _MAX_TILED_FORWARD, _MAX_TILED_BACKWARD = 256, 640, 1280
_FORWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default


def cpu_forward(q: Tensor, k: Tensor, v: Tensor, scores: Scores, band: Band) -> tuple[Tensor, Tensor]:
    """Compute `AttentionKernel.forward` by torch's flash operator, which has no soft cap."""

    def attend(q: Tensor, k: Tensor, v: Tensor, band: Band) -> tuple[Tensor, Tensor]:
        out, lse = _FORWARD(q, k, v, 0.0, band == CAUSAL, attn_mask=_mask(q, k, band), scale=scores.scale)
        return out, lse

    q, k, v = _dense_rows(q), _dense_heads(k), _dense_heads(v)
    return forward_by_tiles(attend, q, k, v, _forward_tiles(q, k, band))


def cpu_backward(dout: Tensor, saved: SavedForward, scores: Scores, band: Band) -> tuple[Tensor, Tensor, Tensor]:
    """Compute `AttentionKernel.backward` by torch's flash operator, which has no soft cap."""

    def attend_backward(dout: Tensor, saved: SavedForward, band: Band) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v, mask = saved.q, saved.k, saved.v, _mask(saved.q, saved.k, band)
        is_causal = band == CAUSAL
        dq, dk, dv = _BACKWARD(dout, q, k, v, saved.out, saved.lse, 0.0, is_causal, attn_mask=mask, scale=scores.scale)
        return dq, dk, dv

    dout, q, out = (_dense_rows(x) for x in (dout, saved.q, saved.out))
    k, v = _dense_heads(saved.k), _dense_heads(saved.v)
    saved = SavedForward(q, k, v, out, saved.lse)
    return backward_by_tiles(attend_backward, dout, saved, _backward_tiles(q, k, band))


def _forward_tiles(q: Tensor, k: Tensor, band: Band) -> tuple[Tile, ...]:
    """Return the tiles of a block for the forward."""
    num_queries, num_keys = q.shape[2], k.shape[2]
    if _is_one_call(num_queries, num_keys, band, max_tiled=_MAX_TILED_FORWARD):
        return (Tile(0, 0, num_queries, num_keys, band, True),)
    return decompose(num_queries, num_keys, band)


def _is_one_call(num_queries: int, num_keys: int, band: Band, max_tiled: int) -> bool:
    """Whether a block is a causal square of a size that one call computes faster than tiles."""
    is_causal_square = band == CAUSAL and num_queries == num_keys
    return is_causal_square and not _MAX_SMALL_SQUARE < num_queries <= max_tiled


def _backward_tiles(q: Tensor, k: Tensor, band: Band) -> tuple[Tile, ...]:
    """Return the tiles of a block for the backward.

    The sides of a tile are limited, since every call returns new gradient tensors, which should add little to peak
    memory.
    """
    batch_size, heads, num_queries, head_dim = q.shape
    num_keys = k.shape[2]
    row_bytes = batch_size * (heads + 2 * k.shape[1]) * head_dim * q.element_size()
    side = min(max(_MAX_GRADIENT_BYTES // row_bytes // LEAF * LEAF, 2 * LEAF), CHUNK)
    if band == FULL or _is_one_call(num_queries, num_keys, band, max_tiled=_MAX_TILED_BACKWARD):
        return (Tile(0, 0, num_queries, num_keys, band, True),)
    return decompose(num_queries, num_keys, band, chunk=side, side=side)


def _dense_rows(x: Tensor) -> Tensor:
    """Return x, copied unless its stride in the last dimension is 1, which the operator takes for granted."""
    return x if x.stride(-1) == 1 else x.contiguous()


def _dense_heads(x: Tensor) -> Tensor:
    """Return keys or values in a layout that the operator reads fast.

    From `_MIN_COPIED_KEYS` keys on they are contiguous; fewer keys only have stride 1 in the last dimension.
    """
    if x.shape[2] >= _MIN_COPIED_KEYS and x.stride(2) != x.shape[3]:
        return x.contiguous()
    return _dense_rows(x)


def _mask(q: Tensor, k: Tensor, band: Band) -> Tensor | None:
    return None if band in (FULL, CAUSAL) else _additive_mask(band, q.shape[2], k.shape[2], q.dtype)


@lru_cache(maxsize=64)
def _additive_mask(band: Band, num_queries: int, num_keys: int, dtype: torch.dtype) -> Tensor | None:
    visible = band_mask(band, range(num_queries), range(num_keys), torch.device("cpu"))
    if visible is None:
        return None
    return torch.zeros(visible.shape, dtype=dtype).masked_fill_(~visible, -torch.inf)
