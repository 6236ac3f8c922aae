"""Blocks of keys and values, or of their gradients, that travel round a lane's ring.

A block is a list with one [2, B, heads, n, D] tensor per sub-ring, keys and values.

Dimension key: B batch, n tokens of the block, D head size, g KV heads of a sub-ring on this rank.
"""

from __future__ import annotations

from collections.abc import Mapping, Set
from functools import lru_cache

import torch
from torch import Tensor

from ds_hetero.batch.ring_steps import Ring
from ds_hetero.runtime.attention.wide_copy import stacked_rows
from ds_hetero.runtime.devices import copied_to
from ds_hetero.values.placement import Range


def pack_kv(k: Tensor, v: Tensor, ring: Ring) -> list[Tensor]:
    """Copy this rank's keys and values into a block; [] if no other group needs them.

    Args:
        k: [B, g, tokens of the lane, D], as ``v``.
    """
    key_ranges = ring.table.travelling_keys(ring.position)
    if not key_ranges:
        return []
    blocks = []
    for sub in ring.sub_rings:
        if len(key_ranges) == 1:
            tokens = slice(*key_ranges[0])
            blocks.append(stacked_rows([k[:, sub.kv_heads, tokens], v[:, sub.kv_heads, tokens]]))
        else:
            index = index_of(key_ranges, k.device)
            parts = [x[:, sub.kv_heads].index_select(2, index) for x in (k, v)]
            blocks.append(torch.stack(parts))
    return blocks


def add_key_gradients_(grad: Tensor, part: Tensor, key_ranges: tuple[Range, ...], first_key: int = 0) -> None:
    """Add the gradient of keys that have travelled to the gradient of all keys, in place.

    Args:
        grad: [B, heads, all tokens, D].
        part: [B, heads, n, D], of the keys in ``key_ranges``, or of a consecutive part of them.
        key_ranges: ranges of the keys that travel.
        first_key: index of the first key of ``part`` among the keys that travel.
    """
    if len(key_ranges) == 1:
        start = key_ranges[0][0] + first_key
        grad[:, :, start : start + part.shape[2]].add_(part)
    else:
        index = index_of(key_ranges, grad.device)[first_key : first_key + part.shape[2]]
        grad.index_add_(2, index, part.to(grad.dtype))


@lru_cache(maxsize=256)
def index_of(ranges: tuple[Range, ...], device: torch.device) -> Tensor:
    """Return the indices in ``ranges``, one range after the other, as a tensor [n]."""
    return copied_to(torch.cat([torch.arange(start, stop) for start, stop in ranges]), device)


def local_kv(k: Tensor, v: Tensor, packed: list[Tensor], ring: Ring) -> list[tuple[Tensor, Tensor]]:
    """Return this rank's own keys and values for each sub-ring, as views.

    If all tokens travel, they are views of ``packed``, which is contiguous; else slices of ``k`` and ``v``.
    """
    if packed and packed[0].shape[3] == k.shape[2]:
        return [(kv[0], kv[1]) for kv in packed]
    return [(k[:, sub.kv_heads], v[:, sub.kv_heads]) for sub in ring.sub_rings]


def block_like(q: Tensor, ring: Ring, tokens: int, dtype: torch.dtype) -> list[Tensor]:
    """Return an uninitialised block for KV, or the gradient of KV, of ``tokens`` tokens on the device of ``q``."""
    batch_size, _, _, head_dim = q.shape
    blocks = []
    for sub in ring.sub_rings:
        num_kv_heads = sub.kv_heads.stop - sub.kv_heads.start
        blocks.append(q.new_empty(2, batch_size, num_kv_heads, tokens, head_dim, dtype=dtype))
    return blocks


def blocks_of_sources(blocks: Mapping[int, list[Tensor]], keep: Set[int]) -> dict[int, list[Tensor]]:
    """Return the ``blocks``, by source, whose sources are in ``keep``."""
    return {source: block for source, block in blocks.items() if source in keep}
