"""Attention in plain torch operations: any device, dtype, head size and soft cap, in bounded memory.

It is slow, and serves where no fused operator does: soft-capped scores on CPU, odd head sizes, the masked corners
that a decomposition into tiles leaves over.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from ds_hetero.batch.tiles import Band
from ds_hetero.runtime.attention.kernels.interface import SavedForward, Scores, merge_

_QUERIES, _KEYS = 256, 1024  # the part of the score matrix in memory, per sample and head; chosen, never measured


def band_mask(band: Band, queries: range, keys: range, device: torch.device) -> Tensor | None:
    """Visible keys, [queries, keys] as booleans; None if everything is visible."""
    lo = -torch.inf if band.lo is None else band.lo
    hi = torch.inf if band.hi is None else band.hi
    if lo <= keys.start - (queries.stop - 1) and keys.stop - 1 - queries.start <= hi:
        return None
    key_index = torch.arange(keys.start, keys.stop, device=device)
    query_index = torch.arange(queries.start, queries.stop, device=device)
    diagonal = key_index - query_index.unsqueeze(1)  # [queries, keys]
    return (lo <= diagonal) & (diagonal <= hi)


def plain_forward(q: Tensor, k: Tensor, v: Tensor, scores: Scores, band: Band) -> tuple[Tensor, Tensor]:
    """`AttentionKernel.forward` in float32 (float64 for float64 inputs), out laid out token-major."""
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
    """`AttentionKernel.backward`; gradients in float32 (float64 for float64 inputs)."""
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
        dk[:, :, cols] += _sum_of_group(ds_part, q_part, k.shape[1]) * scores.scale
        dv[:, :, cols] += _sum_of_group(probs, dout_part, k.shape[1])
    return dq, dk, dv


def _parts(
    band: Band, num_queries: int, num_keys: int, device: torch.device
) -> Iterator[tuple[slice, slice, Tensor | None]]:
    """(queries, keys, mask) of the parts of a block in which something is visible."""
    lo, hi = band.bounds(num_queries, num_keys)
    for row in range(0, num_queries, _QUERIES):
        rows = range(row, min(row + _QUERIES, num_queries))
        stop = min(rows[-1] + hi + 1, num_keys)
        for col in range(max(row + lo, 0), stop, _KEYS):
            cols = range(col, min(col + _KEYS, stop))
            yield slice(rows.start, rows.stop), slice(cols.start, cols.stop), band_mask(band, rows, cols, device)


def _scores(q: Tensor, k: Tensor, mask: Tensor | None, scores: Scores) -> Tensor:
    """[B, H, Q, K], -inf where ``mask`` hides a key."""
    s = _per_kv_head(q, k.mT) * scores.scale
    if scores.softcap is not None:
        s = scores.softcap * torch.tanh(s / scores.softcap)
    return s if mask is None else s.masked_fill(~mask, -torch.inf)


def _softmax(s: Tensor, lse: Tensor) -> Tensor:
    """exp(s - lse), and 0 rather than NaN where a query sees nothing of this part."""
    return torch.exp(s - lse.clamp(min=torch.finfo(lse.dtype).min).unsqueeze(-1))


def _per_kv_head(x: Tensor, of_keys: Tensor) -> Tensor:
    """Return product x @ of_keys, [B, H, Q, a] @ [B, G, a, b] -> [B, H, Q, b], each group of heads with its KV head."""
    batch_size, heads, num_queries, _ = x.shape
    grouped = x.reshape(batch_size, of_keys.shape[1], -1, x.shape[-1])
    return (grouped @ of_keys).view(batch_size, heads, num_queries, -1)


def _sum_of_group(x: Tensor, of_queries: Tensor, num_kv_heads: int) -> Tensor:
    """Product x.T @ of_queries, [B, H, Q, K] and [B, H, Q, D] -> [B, G, K, D], summed over each group of heads."""
    x = x.reshape(x.shape[0], num_kv_heads, -1, x.shape[-1])  # [B, G, H / G * Q, K]
    of_queries = of_queries.reshape(of_queries.shape[0], num_kv_heads, -1, of_queries.shape[-1])
    return x.mT @ of_queries
