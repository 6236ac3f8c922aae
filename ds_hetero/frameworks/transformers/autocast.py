"""Cast queries, keys and values as ``torch.autocast`` does for torch's attention.

Under autocast, rotary embeddings leave queries and keys in fp32, while values are in half precision. For torch's own
attention function, autocast casts all three to half precision. For this engine's attention it does not, so
`cast_alike` does.
"""

from __future__ import annotations

import torch
from torch import Tensor


def cast_alike(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return queries, keys and values in autocast's data type; unchanged without autocast, and in fp64."""
    device = query.device.type
    if not torch.is_autocast_enabled(device) or query.dtype == torch.float64:
        return query, key, value
    dtype = torch.get_autocast_dtype(device)
    return query.to(dtype), key.to(dtype), value.to(dtype)
