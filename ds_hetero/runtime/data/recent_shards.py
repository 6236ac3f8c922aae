"""The shards that loaders of this process have given out lately, to know them again where a copy has lost their mark.

A loader marks a shard by what it attaches to its ``position_ids`` (`ds_hetero.runtime.data.shard_info`). Frameworks
copy tensors, and scripts hand on ``input_ids`` alone; a copy holds the same numbers. So a digest of the tokens is kept,
by shape, or of their embeddings where a batch has no tokens; of a rank without tokens, that of its placeholder's
position ids, which are of no sequence.
"""

from __future__ import annotations

from collections import deque
from typing import Any

import torch
from torch import Tensor

from ds_hetero.runtime.data.shard_info import is_part, shard_info
from ds_hetero.runtime.data.shards import PLACEHOLDER_POSITION, Batch

_KEPT = 64  # a loop draws the micro-batches of an optimizer step before it runs them
_PRIME = 1_000_003
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by bytes of an element

_recent: deque[tuple[tuple[int, ...], int]] = deque(maxlen=_KEPT)


def note_shard(shard: Batch) -> None:
    """Remember a shard that a loader gives out, if other ranks hold parts of its sequences.

    Args:
        shard: on the CPU, before `ds_hetero.runtime.data.shards.model_inputs`.
    """
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


def forget_shards() -> None:
    """Forget all shards: nobody gives out new ones."""
    _recent.clear()


def is_shard(*tensors: Any) -> bool:
    """Whether one of ``tensors`` belongs to a shard: has its mark, or is a copy of one given out lately.

    Looks at the numbers of those tensors only that have the shape of such a shard; on a GPU that waits for them.
    """
    given = [tensor for tensor in tensors if isinstance(tensor, Tensor)]
    if any(is_part(tensor) for tensor in given):
        return True
    shapes = {shape for shape, _ in _recent}
    return any(tuple(t.shape) in shapes and (tuple(t.shape), _digest(t)) in _recent for t in given)


@torch.no_grad()
def _digest(tensor: Tensor) -> int:
    """A sum that depends on the order: each number, or its bits, times its place, squared, modulo 2^64."""
    numbers = tensor.reshape(-1)
    if numbers.is_floating_point():
        numbers = numbers.view(_INTEGERS[numbers.element_size()])
    numbers = numbers.to(torch.int64)
    places = torch.arange(1, len(numbers) + 1, device=numbers.device) * _PRIME
    return int(((numbers + places) * (numbers + places)).sum())
