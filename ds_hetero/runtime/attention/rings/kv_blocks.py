"""Keys and values as they travel round a lane's ring: one [2, B, heads, n, D] tensor per sub-ring and source."""

from __future__ import annotations

from collections.abc import Mapping, Set
from functools import lru_cache

import torch
from torch import Tensor

from ds_hetero.batch.ring_steps import Ring
from ds_hetero.runtime.devices import copied_to
from ds_hetero.values.placement import Range


def pack_kv(k: Tensor, v: Tensor, ring: Ring) -> list[Tensor]:
    """This rank's KV as it travels; no tensor if no other group needs it."""
    columns = ring.table.columns(ring.position)
    if not columns:
        return []
    blocks = []
    for sub in ring.sub_rings:
        if len(columns) == 1:
            blocks.append(torch.stack([x[:, sub.kv_heads, slice(*columns[0])] for x in (k, v)]))
        else:
            index = index_of(columns, k.device)
            blocks.append(torch.stack([x[:, sub.kv_heads].index_select(2, index) for x in (k, v)]))
    return blocks


def add_columns_(grad: Tensor, part: Tensor, columns: tuple[Range, ...], first: int = 0) -> None:
    """Add the gradient of keys that have travelled to that of all keys, both [B, heads, tokens, D].

    Args:
        grad: of all keys.
        part: of those in ``columns``, or of some of them that follow one another.
        columns: keys that travel.
        first: index of the first key of ``part`` among these.
    """
    if len(columns) == 1:
        start = columns[0][0] + first
        grad[:, :, start : start + part.shape[2]] += part
    else:
        grad.index_add_(2, index_of(columns, grad.device)[first : first + part.shape[2]], part)


@lru_cache(maxsize=256)
def index_of(columns: tuple[Range, ...], device: torch.device) -> Tensor:
    """The indices in ``columns``, one behind the other."""
    return copied_to(torch.cat([torch.arange(start, stop) for start, stop in columns]), device)


def local_kv(k: Tensor, v: Tensor, packed: list[Tensor], ring: Ring) -> list[tuple[Tensor, Tensor]]:
    """Keys and values of the local block, per sub-ring: the packed ones, being contiguous, if they hold all tokens."""
    if packed and packed[0].shape[3] == k.shape[2]:
        return [(kv[0], kv[1]) for kv in packed]
    return [(k[:, sub.kv_heads], v[:, sub.kv_heads]) for sub in ring.sub_rings]


def block_like(q: Tensor, ring: Ring, tokens: int, dtype: torch.dtype) -> list[Tensor]:
    """Uninitialised memory for the KV of so many tokens, or for its gradient."""
    batch_size, _, _, head_dim = q.shape
    return [
        q.new_empty(2, batch_size, sub.kv_heads.stop - sub.kv_heads.start, tokens, head_dim, dtype=dtype)
        for sub in ring.sub_rings
    ]


def only(blocks: Mapping[int, list[Tensor]], keep: Set[int]) -> dict[int, list[Tensor]]:
    """Those blocks whose sources are in ``keep``."""
    return {source: block for source, block in blocks.items() if source in keep}
