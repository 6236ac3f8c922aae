"""Attention in plain torch operations: any device, dtype, head size and soft cap, in bounded memory.

It is slow, and used where no fused operator works: soft-capped scores on CPU, odd head sizes, the masked corners that a
decomposition into tiles leaves.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from ds_hetero.batch.tiles import Band
from ds_hetero.runtime.attention.kernels.interface import SavedForward, Scores
from ds_hetero.runtime.attention.kernels.merge import merge_

# Size of the part of the score matrix that is in memory, per sample and head. Chosen, never measured.
_QUERIES, _KEYS = 256, 1024


def band_mask(band: Band, queries: range, keys: range, device: torch.device) -> Tensor | None:
    """Return which keys are visible, as booleans [queries, keys]; None if all are."""
    lo = -torch.inf if band.lo is None else band.lo
    hi = torch.inf if band.hi is None else band.hi
    if lo <= keys.start - (queries.stop - 1) and keys.stop - 1 - queries.start <= hi:
        return None
    key_index = torch.arange(keys.start, keys.stop, device=device)
    query_index = torch.arange(queries.start, queries.stop, device=device)
    diagonal = key_index - query_index.unsqueeze(1)  # [queries, keys]
    return (lo <= diagonal) & (diagonal <= hi)


def plain_forward(q: Tensor, k: Tensor, v: Tensor, scores: Scores, band: Band) -> tuple[Tensor, Tensor]:
    """Compute `AttentionKernel.forward` in float32 (float64 for float64 inputs); out is token-major in memory."""
    wide = torch.promote_types(q.dtype, torch.float32)
    batch_size, heads, num_queries, head_dim = q.shape
    out = q.new_zeros(batch_size, num_queries, heads, head_dim, dtype=wide).transpose(1, 2)
    lse = torch.full((batch_size, heads, num_queries), -torch.inf, dtype=wide, device=q.device)
    for rows, cols, mask in _parts(band, num_queries, k.shape[2], q.device):
        v_part = v[:, :, cols].to(wide)
        s_part = _scores(q[:, :, rows].to(wide), k[:, :, cols].to(wide), mask, scores)
        lse_part = s_part.logsumexp(-1)
        out_part = _per_kv_head(_softmax(s_part, lse_part), v_part)
        merge_(out[:, :, rows], lse[:, :, rows], out_part, lse_part)
    return out.to(q.dtype), lse


def plain_backward(dout: Tensor, saved: SavedForward, scores: Scores, band: Band) -> tuple[Tensor, Tensor, Tensor]:
    """Compute `AttentionKernel.backward`; the gradients are float32 (float64 for float64 inputs)."""
    q, k, v, softcap = saved.q, saved.k, saved.v, scores.softcap
    wide = saved.lse.dtype
    dq, dk, dv = [torch.zeros(x.shape, dtype=wide, device=x.device) for x in (q, k, v)]
    for rows, cols, mask in _parts(band, q.shape[2], k.shape[2], q.device):
        q_part, dout_part = q[:, :, rows].to(wide), dout[:, :, rows].to(wide)
        k_part, v_part = k[:, :, cols].to(wide), v[:, :, cols].to(wide)
        delta = (dout_part * saved.out[:, :, rows].to(wide)).sum(-1, keepdim=True)
        s_part = _scores(q_part, k_part, mask, scores)
        probs = _softmax(s_part, saved.lse[:, :, rows])
        ds_part = probs * (_per_kv_head(dout_part, v_part.mT) - delta)
        if softcap is not None:  # the derivative of the cap; a hidden score is -inf, and its probability 0
            ds_part *= 1 - (s_part.clamp(min=-softcap) / softcap).square()
        dq[:, :, rows] += _per_kv_head(ds_part, k_part) * scores.scale
        dk[:, :, cols] += _sum_per_kv_head(ds_part, q_part, k.shape[1]) * scores.scale
        dv[:, :, cols] += _sum_per_kv_head(probs, dout_part, k.shape[1])
    return dq, dk, dv


def _parts(
    band: Band, num_queries: int, num_keys: int, device: torch.device
) -> Iterator[tuple[slice, slice, Tensor | None]]:
    """Yield (queries, keys, mask) of each part of a block in which a key is visible."""
    lo, hi = band.bounds(num_queries, num_keys)
    for row in range(0, num_queries, _QUERIES):
        rows = range(row, min(row + _QUERIES, num_queries))
        stop = min(rows[-1] + hi + 1, num_keys)
        for col in range(max(row + lo, 0), stop, _KEYS):
            cols = range(col, min(col + _KEYS, stop))
            yield slice(rows.start, rows.stop), slice(cols.start, cols.stop), band_mask(band, rows, cols, device)


def _scores(q: Tensor, k: Tensor, mask: Tensor | None, scores: Scores) -> Tensor:
    """Return the scores [B, H, Q, K]; -inf for keys that ``mask`` hides."""
    s = _per_kv_head(q, k.mT) * scores.scale
    if scores.softcap is not None:
        s = scores.softcap * torch.tanh(s / scores.softcap)
    return s if mask is None else s.masked_fill(~mask, -torch.inf)


def _softmax(s: Tensor, lse: Tensor) -> Tensor:
    """Return exp(s - lse); 0, not NaN, for a query that sees no key of this part."""
    return torch.exp(s - lse.clamp(min=torch.finfo(lse.dtype).min).unsqueeze(-1))


def _per_kv_head(x: Tensor, of_keys: Tensor) -> Tensor:
    """Multiply each group of query heads with its KV head: [B, H, Q, a] @ [B, G, a, b] -> [B, H, Q, b]."""
    batch_size, heads, num_queries, _ = x.shape
    grouped = x.reshape(batch_size, of_keys.shape[1], -1, x.shape[-1])
    return (grouped @ of_keys).view(batch_size, heads, num_queries, -1)


def _sum_per_kv_head(x: Tensor, of_queries: Tensor, num_kv_heads: int) -> Tensor:
    """Multiply x.T @ of_queries, [B, H, Q, K] and [B, H, Q, D], and sum over each group of heads: [B, G, K, D]."""
    x = x.reshape(x.shape[0], num_kv_heads, -1, x.shape[-1])  # [B, G, H / G * Q, K]
    of_queries = of_queries.reshape(of_queries.shape[0], num_kv_heads, -1, of_queries.shape[-1])
    return x.mT @ of_queries
