"""Queries, keys and values under ``torch.autocast``, of which torch's own attention knows and ours would not.

Rotary products leave queries and keys in fp32 beside values in half precision; torch casts all three.
"""

from __future__ import annotations

import torch
from torch import Tensor


def cast_alike(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values in the data type that autocast gives to torch's attention; as they are without it."""
    device = query.device.type
    if not torch.is_autocast_enabled(device) or query.dtype == torch.float64:
        return query, key, value
    dtype = torch.get_autocast_dtype(device)
    return query.to(dtype), key.to(dtype), value.to(dtype)
