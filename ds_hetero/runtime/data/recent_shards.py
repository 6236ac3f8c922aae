"""Recognize shards that loaders gave out lately, where a copy of the tensor has lost its mark.

A loader marks a shard by attaching a `ShardInfo` to its ``position_ids``. Frameworks copy tensors, and scripts pass on
``input_ids`` alone; such a copy has no mark, but the same numbers. So this process remembers the shape and a digest of
the tokens of its latest shards, or of their embeddings if a batch has no tokens. For a rank without tokens it remembers
the position id of the placeholder, which no real token has.
"""

from __future__ import annotations

from collections import deque
from typing import Any

import torch
from torch import Tensor

from ds_hetero.runtime.data.shard_info import is_part, shard_info
from ds_hetero.runtime.data.shards import PLACEHOLDER_POSITION, Batch

_MAX_RECENT_SHARDS = 64  # a loop draws the micro-batches of an optimizer step before it runs them
_PRIME = 1_000_003
_INTEGER_DTYPES = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by bytes of an element

_recent: deque[tuple[tuple[int, ...], int]] = deque(maxlen=_MAX_RECENT_SHARDS)


def remember_shard(shard: Batch) -> None:
    """Remember a shard, as the loader gives it out, if other ranks hold parts of its sequences."""
    positions, tokens = shard["position_ids"], shard.get("input_ids", shard.get("inputs_embeds"))
    info = shard_info(positions)
    if not is_part(positions) or info is None or positions.shape[1] == info.placement.length:
        return
    if info.inputs_are_whole:
        return
    if not positions.shape[1]:
        tokens = torch.full((len(positions), 1), PLACEHOLDER_POSITION)
    if isinstance(tokens, Tensor):
        _recent.append((tuple(tokens.shape), _digest(tokens)))


def clear_recent_shards() -> None:
    """Forget all remembered shards; called when no loader gives out new shards."""
    _recent.clear()


def is_shard(*tensors: Any) -> bool:
    """Whether one of ``tensors`` belongs to a shard: it has the mark, or is a copy of a shard given out lately.

    Computes a digest only if a tensor has the shape of such a shard. On a GPU this waits for the device.
    """
    candidates = [tensor for tensor in tensors if isinstance(tensor, Tensor)]
    if any(is_part(tensor) for tensor in candidates):
        return True
    recent_shapes = {shape for shape, _ in _recent}
    for tensor in candidates:
        shape = tuple(tensor.shape)
        if shape in recent_shapes and (shape, _digest(tensor)) in _recent:
            return True
    return False


@torch.no_grad()
def _digest(tensor: Tensor) -> int:
    """Return the sum of (number + place * prime)^2 modulo 2^64, which depends on the order of the numbers.

    A floating-point number counts as the integer with the same bits.
    """
    numbers = tensor.reshape(-1)
    if numbers.is_floating_point():
        numbers = numbers.view(_INTEGER_DTYPES[numbers.element_size()])
    numbers = numbers.to(torch.int64)
    places = torch.arange(1, len(numbers) + 1, device=numbers.device) * _PRIME
    return int(((numbers + places) * (numbers + places)).sum())
