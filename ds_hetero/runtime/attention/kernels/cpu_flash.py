"""Flash attention on CPU by torch's operator, fed with tiles: float64, float32, bfloat16 and float16.

The operator takes grouped heads, rectangles and any strides over batch, heads and tokens, and its backward accepts the
out and lse of whole rows. It aligns a causal mask to the top left, and is killed by SIGFPE where a size is 0. Every
tile of queries reads all keys before it: where their heads are not consecutive in memory that costs 3 % from 2,400
tokens on, much more than a copy of keys and values; below that it costs nothing.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from ds_hetero.batch.tiles import CAUSAL, CHUNK, FULL, LEAF, Band, Tile, decompose
from ds_hetero.runtime.attention.kernels.band_tiles import backward_by_tiles, forward_by_tiles
from ds_hetero.runtime.attention.kernels.interface import SavedForward, Scores
from ds_hetero.runtime.attention.kernels.plain import band_mask

_PART_BYTES = 8 << 18  # of gradients that one call returns; on a large square the operator itself allocates 4 << 18
_DENSE_KEYS = 2048  # keys and values from which on they are copied, unless their heads are consecutive
# Causal squares of few tokens and of many are one call: there the operator wastes less than more calls, merging and
# adding up take. Measured with 1 to 8 heads of 64, one thread.
_FEW, _MANY_FORWARD, _MANY_BACKWARD = 256, 640, 1280
_FORWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default


def cpu_forward(q: Tensor, k: Tensor, v: Tensor, scores: Scores, band: Band) -> tuple[Tensor, Tensor]:
    """`AttentionKernel.forward` without a soft cap."""

    def attend(q: Tensor, k: Tensor, v: Tensor, band: Band) -> tuple[Tensor, Tensor]:
        out, lse = _FORWARD(q, k, v, 0.0, band == CAUSAL, attn_mask=_mask(q, k, band), scale=scores.scale)
        return out, lse

    q, k, v = _dense_rows(q), _dense_heads(k), _dense_heads(v)
    return forward_by_tiles(attend, q, k, v, _forward_tiles(q, k, band))


def cpu_backward(dout: Tensor, saved: SavedForward, scores: Scores, band: Band) -> tuple[Tensor, Tensor, Tensor]:
    """`AttentionKernel.backward` without a soft cap."""

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
    num_queries, num_keys = q.shape[2], k.shape[2]
    if _is_one_call(num_queries, num_keys, band, many=_MANY_FORWARD):
        return (Tile(0, 0, num_queries, num_keys, band, True),)
    return decompose(num_queries, num_keys, band)


def _is_one_call(num_queries: int, num_keys: int, band: Band, many: int) -> bool:
    return band == CAUSAL and num_queries == num_keys and not _FEW < num_queries <= many


def _backward_tiles(q: Tensor, k: Tensor, band: Band) -> tuple[Tile, ...]:
    """Smaller than in the forward: every call returns gradients of its own, and these should not show in the memory."""
    batch_size, heads, num_queries, head_dim = q.shape
    num_keys = k.shape[2]
    row_bytes = batch_size * (heads + 2 * k.shape[1]) * head_dim * q.element_size()
    side = min(max(_PART_BYTES // row_bytes // LEAF * LEAF, 2 * LEAF), CHUNK)
    if band == FULL or _is_one_call(num_queries, num_keys, band, many=_MANY_BACKWARD):
        return (Tile(0, 0, num_queries, num_keys, band, True),)
    return decompose(num_queries, num_keys, band, chunk=side, side=side)


def _dense_rows(x: Tensor) -> Tensor:
    """The operator reads a head's vector as consecutive numbers, whatever its stride says."""
    return x if x.stride(-1) == 1 else x.contiguous()


def _dense_heads(x: Tensor) -> Tensor:
    """Return the same for keys and values, and every head consecutive where there are many of them."""
    if x.shape[2] >= _DENSE_KEYS and x.stride(2) != x.shape[3]:
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
